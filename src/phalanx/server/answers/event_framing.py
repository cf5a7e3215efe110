"""Server-sent events: how they are written, and comments that keep a client waiting."""

from __future__ import annotations

from phalanx.server.fields.json_pieces import to_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Characters that JSON may contain, but that many clients take for the end of a line (httpx does: `str.splitlines`)."""


def one_line(payload: object) -> bytes:
    """JSON that no client takes for more than one line."""
    data = to_json(payload)
    for char, escaped in _LINE_ENDS.items():
        data = data.replace(char, escaped)
    return data


def event(payload: object) -> bytes:
    """One `data:` event."""
    return b"data: " + one_line(payload) + b"\n\n"


def named_event(name: str, payload: object) -> bytes:
    """One `data:` event with its name in an `event:` line before it."""
    return b"event: " + name.encode() + b"\n" + event(payload)
