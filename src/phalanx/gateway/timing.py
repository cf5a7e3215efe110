"""The gateway's own time stamp in a phalanx server's `timing`, for clients that asked for that (G3).

It is the one thing that a gateway adds to an event; every other byte stays. It is that of the first event with
something that the model wrote: what comes before says that the answer begins, and may come before any token.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from phalanx.gateway.dialects import OPAQUE, Dialect
from phalanx.gateway.foreign_json import decoder

MARK = b'"first_byte":'  # which a phalanx server's `timing` of a stream has, and no other server's
NAME = b'"gateway_first_byte":'


class _Inner(Struct):
    timing: Raw = Raw()


class _Event(Struct):
    timing: Raw = Raw()  # of chat and text completions
    response: _Inner = field(default_factory=_Inner)  # of Responses


_read = decoder(_Event)
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


def with_first_byte(event: bytes, seconds: float) -> bytes:
    """The event with this time in its `timing`; as it is, if it has none, or another gateway's time already.

    Args:
        event: of server-sent events.
        seconds: from the request's arrival until the first text was passed on.
    """
    if MARK not in event:
        return event
    try:
        found = _read(event[event.find(b"{") :])
    except msgspec.DecodeError:
        return event
    timing = bytes(found.timing) or bytes(found.response.timing)
    at = event.rfind(timing) if timing.startswith(b"{") and MARK in timing and NAME not in timing else -1
    if at < 0:
        return event
    end = at + len(timing) - 1
    return b"%b,%b%.6f%b" % (event[:end], NAME, seconds, event[end:])
