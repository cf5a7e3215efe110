"""Writes server-sent events, and keep-alive comments."""

from __future__ import annotations

from phalanx.server.fields.json_pieces import to_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Line separators that JSON may contain, but many clients split at (httpx does: `str.splitlines`)."""


def one_line(payload: object) -> bytes:
    """JSON on one line for every client."""
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
