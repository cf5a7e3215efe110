"""A process's state for web pages and `phalanx top`, as server-sent events: a snapshot, then changes.

    event: snapshot
    data: {"server": {...}, "requests/chatcmpl-1": {...}}

    event: change
    data: {"set": {"requests/chatcmpl-1": {...}}, "drop": ["requests/chatcmpl-0"]}

Costs nothing without viewers; viewers with the same rights share the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

from phalanx.errors import QueueFull
from phalanx.http.fair_quota import FairQuota
from phalanx.http.http_exchange import EventStream

TICK_S = 0.25  # between two changes
QUIET_S = 10.0  # without a change, before a keep-alive comment
MAX_VIEWERS = 64  # each costs as much as a slow stream; owners share them fairly
EVENTS = "text/event-stream"
ALL = "/"  # who sees everything, as a holder of places (an owner has no slash)

Parts = Mapping[str, Any]
"""Name of each part -> its JSON value."""


class OverviewStream:
    """See the module's docstring.

    Args:
        parts: owner -> the parts that this owner may see now; None: all.
        is_over: owner -> whether its streams end: the process ends, or the owner's key is not accepted any more.
        clock: monotonic seconds.
    """

    def __init__(
        self, parts: Callable[[str | None], Parts], is_over: Callable[[str | None], bool], clock: Callable[[], float]
    ) -> None:
        self._parts = parts
        self._is_over = is_over
        self._clock = clock
        self._viewers = FairQuota(MAX_VIEWERS)
        self._last: dict[str | None, tuple[float, dict[str, bytes]]] = {}  # by owner: time and parts

    def open(self, owner: str | None) -> EventStream:
        """A stream for a new viewer.

        Raises:
            QueueFull: there are MAX_VIEWERS already, this owner's fair share or more among them.
        """
        holder = ALL if owner is None else owner
        if not self._viewers.has_room(holder, 1):
            raise QueueFull(f"{MAX_VIEWERS} pages watch already.", retry_after=5.0)
        self._viewers.take(holder, 1)
        return EventStream(self._events(owner), lambda: self._close(owner, holder), EVENTS)

    def _close(self, owner: str | None, holder: str) -> None:
        self._viewers.give_back(holder, 1)
        if not self._viewers.held_by(holder):
            self._last.pop(owner, None)

    async def _events(self, owner: str | None) -> AsyncGenerator[bytes]:
        seen = self._encoded(owner)
        yield framed("snapshot", _object(seen))
        quiet = 0.0
        while not self._is_over(owner):
            await asyncio.sleep(TICK_S)
            now = self._encoded(owner)
            quiet += TICK_S
            if now is not seen and (change := _change(seen, now)) is not None:
                yield framed("change", change)
                quiet = 0.0
            elif quiet >= QUIET_S:
                yield b": the stream goes on\n\n"
                quiet = 0.0
            seen = now

    def _encoded(self, owner: str | None) -> dict[str, bytes]:
        """The parts as JSON, encoded once per tick and owner."""
        now = self._clock()
        made = self._last.get(owner)
        if made is None or now - made[0] >= TICK_S * 0.9:
            made = now, {name: msgspec.json.encode(part) for name, part in self._parts(owner).items()}
            self._last[owner] = made
        return made[1]


def framed(event: str, data: bytes) -> bytes:
    """A server-sent event; JSON has no line breaks."""
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


def _change(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes | None:
    new = {name: part for name, part in after.items() if before.get(name) != part}
    gone = [name for name in before if name not in after]
    if not new and not gone:
        return None
    return b'{"set":' + _object(new) + b',"drop":' + msgspec.json.encode(gone) + b"}"


def _object(parts: Mapping[str, bytes]) -> bytes:
    return msgspec.json.encode({name: msgspec.Raw(part) for name, part in parts.items()})
