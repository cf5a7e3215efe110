"""Where requests wait for a replica: the dispatcher's decisions as awaitables. Does not know HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.errors import PhalanxError
from phalanx.gateway.asks import Ask
from phalanx.gateway.dispatcher import Dispatcher, Grant, Verdict
from phalanx.gateway.replica import Replica

TICK_S = 0.1  # between two looks for requests that have waited too long, and for circuits whose time is over


class Desk:
    """See the module's docstring. `settle` must be called with each replica that was changed."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self.dispatcher = dispatcher
        self.clock = clock
        self._ended = asyncio.Event()  # an attempt, since `until_idle` began to wait
        self._waiting: dict[Ask, asyncio.Future[Grant]] = {}

    async def place(self, ask: Ask) -> Grant:
        """A place on a replica; `end` must follow.

        Raises:
            PhalanxError: those of `Dispatcher.arrive`, now or after a wait.
        """
        grant = self.dispatcher.arrive(ask, self.clock())
        if grant is not None:
            return grant
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[ask] = future
        self.settle()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.end(future.result(), "abandoned")
            self.dispatcher.withdraw(ask)
            raise
        finally:
            del self._waiting[ask]

    def elsewhere(self, ask: Ask, replica: Replica) -> Grant | None:
        """See `Dispatcher.elsewhere`; `end` must follow for both grants."""
        return self.dispatcher.elsewhere(ask, replica, self.clock())

    async def until_idle(self, replica: Replica, limit_s: float) -> bool:
        """Wait for the last request of a replica to end, so long at most. Returns whether it has none."""
        try:
            async with asyncio.timeout(limit_s):
                while replica.in_flight:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def end(self, grant: Grant, verdict: Verdict) -> None:
        """An attempt is over; another request may have its place."""
        self.dispatcher.end(grant, verdict, self.clock())
        self._ended.set()
        self.settle()

    def fail_all(self, error: PhalanxError) -> None:
        """Let no request wait any longer."""
        for ask, future in self._waiting.items():
            self.dispatcher.withdraw(ask)
            if not future.done():
                future.set_exception(error)

    def settle(self, *changed: Replica) -> None:
        """Take in that these replicas have changed, and tell waiting requests what was decided."""
        for replica in changed:
            self.dispatcher.changed(replica)
        for ask, decision in self.dispatcher.decided(self.clock()):
            future = self._waiting[ask]
            if isinstance(decision, Grant):
                if future.done():  # its client has just left
                    self.dispatcher.end(decision, "abandoned", self.clock())
                else:
                    future.set_result(decision)
            elif not future.done():
                future.set_exception(decision)

    async def tick(self) -> None:
        """Settle now and then. Runs until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._waiting:
                self.settle()
