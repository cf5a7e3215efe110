"""Which event of a stream has the first thing that the model wrote: the gateway's time stamp is taken there.

What comes before says that the answer begins, and may come before any token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.gateway.relay.api_kinds import OPAQUE, Dialect
from phalanx.http.foreign_json import decoder

_value = decoder(dict[str, Any])
TEXTS = ("content", "text", "reasoning_content", "reasoning", "refusal", "thinking", "response", "partial_json")
"""Fields of what the model wrote; in which object they are depends on the dialect."""
CALLS = ("tool_calls", "function_call")


def shows_text(dialect: Dialect, data: bytes) -> bool:
    """Whether the client sees a piece of text, reasoning or a call in an event; of opaque dialects, in any.

    Args:
        data: JSON, or nothing that has a text.
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
