"""The gateway's own time stamp in a phalanx server's `timing`, for clients that asked for that (G3). Pure.

It is the one thing that a gateway adds to an event; every other byte stays.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct, field

from phalanx.gateway.foreign_json import decoder

MARK = b'"first_byte":'  # which a phalanx server's `timing` of a stream has, and no other server's
NAME = b'"gateway_first_byte":'


class _Inner(Struct):
    timing: Raw = Raw()


class _Event(Struct):
    timing: Raw = Raw()  # of chat and text completions
    response: _Inner = field(default_factory=_Inner)  # of Responses


_read = decoder(_Event)


def with_first_byte(event: bytes, seconds: float) -> bytes:
    """The event with this time in its `timing`; as it is, if it has none, or another gateway's time already.

    Args:
        event: of server-sent events.
        seconds: from the request's arrival until the first byte was handed to the network.
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
