"""The bounded queue of the engine's events for the reader of a request's answer.

All choices of a request share one queue, so that the reader gets their events in the order of their commits. The writer
never waits; the server cancels the request of a reader that falls too far behind (design: The server never blocks).
"""

from __future__ import annotations

import asyncio

from msgspec import Struct

from phalanx.errors import PhalanxError
from phalanx.types import Finished, PromptScored, Tokens


class Timings(Struct):
    """When a sequence's request and tokens arrived: seconds on the server's monotonic clock.

    The time of the first byte that reaches the network is another measurement, made in `endpoints/generating.py`.
    """

    arrived: float
    first_token: float | None = None
    last_token: float | None = None


class StreamEnd(Struct, frozen=True):
    """The last event of a choice."""

    finished: Finished
    timings: Timings


Event = Tokens | PromptScored | StreamEnd


class OutputQueue:
    """Events of one request's choices: (index of the choice, event)."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit  # tokens that may be unread
        self._unread = 0
        self._events: list[tuple[int, Event]] = []
        self._error: PhalanxError | None = None
        self._news = asyncio.Event()
        self.is_paused = False
        """No event comes until the engine is back."""

    def push(self, index: int, event: Event) -> bool:
        """Append an event. Returns False if the reader is now too far behind; the event is kept anyway."""
        self._events.append((index, event))
        if isinstance(event, Tokens):
            self._unread += len(event.tokens)
        self._news.set()
        return self._unread <= self._limit

    def set_paused(self, is_paused: bool) -> None:
        """Tell the reader that the engine is down, or back."""
        if is_paused != self.is_paused:
            self.is_paused = is_paused
            self._news.set()

    def fail(self, error: PhalanxError) -> None:
        """Fail the request: `read` raises this error after the earlier events. The first error counts."""
        self._error = self._error or error
        self._news.set()

    async def read(self) -> list[tuple[int, Event]]:
        """Wait for events and return all unread ones; none if only `is_paused` was set.

        Raises:
            PhalanxError: the request failed, and all events before that were read.
        """
        await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        self._unread = 0
        if self._error is not None:
            if not events:
                raise self._error
            self._news.set()  # the next call raises the error
        return events
