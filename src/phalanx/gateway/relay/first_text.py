"""Finds the event with the model's first text, reasoning or call, for the gateway's TTFT.

Earlier events only open the answer, perhaps before any token exists.
"""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.gateway.relay.api_kinds import OPAQUE, Dialect
from phalanx.http.foreign_json import decoder

_value = decoder(dict[str, Any])
TEXTS = ("content", "text", "reasoning_content", "reasoning", "refusal", "thinking", "response", "partial_json")
"""Fields with the model's output, in an object that depends on the dialect."""
CALLS = ("tool_calls", "function_call")


def shows_text(dialect: Dialect, data: bytes) -> bool:
    """Whether an event has text, reasoning or a call; in opaque dialects every event counts.

    Args:
        data: anything but JSON has no text.
    """
    if dialect in OPAQUE:
        return True
    try:
        event = _value(data)
    except msgspec.DecodeError:
        return False
    if dialect == "chat":
        choices = event.get("choices")
        return isinstance(choices, list) and any(_has(choice) or _has(_in(choice, "delta")) for choice in choices)
    if dialect == "ollama":
        return _has(event) or _has(_in(event, "message"))
    kind = str(event.get("type"))
    if dialect == "messages":
        called = str(_in(_in(event, "content_block"), "type"))
        return (kind == "content_block_delta" and _has(_in(event, "delta"))) or called.endswith("tool_use")
    called = str(_in(_in(event, "item"), "type"))
    return (kind.endswith(".delta") and bool(event.get("delta"))) or called.endswith("_call")


def _in(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _has(value: Any) -> bool:
    return isinstance(value, dict) and any(value.get(name) for name in (*TEXTS, *CALLS))
