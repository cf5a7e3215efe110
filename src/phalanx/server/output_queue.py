"""The bounded buffer between the engine's events and the one reader of a request's answer.

All choices of a request share a output, so that one reader interleaves them in the order in which they were committed.
The writer never waits: a reader that falls too far behind is given up (design: The server never blocks). Does not know
HTTP.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct

from phalanx.errors import PhalanxError
from phalanx.types import Finished, PromptScored, Tokens


class Timings(Struct):
    """Seconds on the server's monotonic clock (G3: the first token and the first flushed byte are separate)."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None


class Ended(Struct, frozen=True):
    """The last event of a choice."""

    finished: Finished
    timings: Timings


Event = Tokens | PromptScored | Ended


class OutputQueue:
    """Events of one request's choices: (index of the choice, event)."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit  # tokens that may be unread
        self._unread = 0
        self._events: list[tuple[int, Event]] = []
        self._error: PhalanxError | None = None
        self._news = asyncio.Event()

    def push(self, index: int, event: Event) -> bool:
        """Append an event; False when the reader is too far behind (the event is kept all the same)."""
        self._events.append((index, event))
        if isinstance(event, Tokens):
            self._unread += len(event.tokens)
        self._news.set()
        return self._unread <= self._limit

    def fail(self, error: PhalanxError) -> None:
        """End the output: `read` raises this once the events before it were taken. The first failure counts."""
        self._error = self._error or error
        self._news.set()

    async def read(self) -> list[tuple[int, Event]]:
        """All unread events, at least one; waits for them.

        Raises:
            PhalanxError: the request failed and everything before that was read.
        """
        await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        self._unread = 0
        if self._error is not None:
            if not events:
                raise self._error
            self._news.set()  # the failure is next
        return events
