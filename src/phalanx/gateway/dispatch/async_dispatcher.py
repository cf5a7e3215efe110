"""Where requests wait for a replica: the dispatcher's decisions as awaitables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.errors import PhalanxError
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Dispatcher, Grant
from phalanx.gateway.dispatch.replica import Replica

TICK_S = 0.1  # between checks for overdue requests and for circuits that may half-open


class AsyncDispatcher:
    """See the module's docstring. Call `settle` after a replica has changed or a grant has ended.

    Args:
        core: makes the decisions. Its replicas may be read and changed directly.
        clock: monotonic seconds.
    """

    def __init__(self, core: Dispatcher, clock: Callable[[], float]) -> None:
        self.core = core
        self.clock = clock
        self._changed = asyncio.Event()  # `settle` was called since `until_idle` began to wait
        self._waiting: dict[DispatchRequest, asyncio.Future[Grant]] = {}

    async def place(self, request: DispatchRequest) -> Grant:
        """A place on a replica; `Dispatcher.end` must follow.

        Raises:
            PhalanxError: those of `Dispatcher.arrive`, now or after a wait.
        """
        grant = self.core.arrive(request, self.clock())
        if grant is not None:
            return grant
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        self.settle()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.core.end(future.result(), "cancelled", self.clock())
                self.settle()
            self.core.withdraw(request)
            raise
        finally:
            del self._waiting[request]

    async def until_idle(self, replica: Replica, limit_s: float) -> bool:
        """Wait until a replica has no requests, or the limit is over. Returns whether it has none."""
        try:
            async with asyncio.timeout(limit_s):
                while replica.in_flight:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: PhalanxError) -> None:
        """End every waiting request with this error."""
        for request, future in self._waiting.items():
            self.core.withdraw(request)
            if not future.done():
                future.set_exception(error)

    def settle(self) -> None:
        """Deliver the dispatcher's decisions to waiting requests."""
        self._changed.set()
        for request, decision in self.core.decided(self.clock()):
            future = self._waiting[request]
            if isinstance(decision, Grant):
                if future.done():  # its client has just left
                    self.core.end(decision, "cancelled", self.clock())
                else:
                    future.set_result(decision)
            elif not future.done():
                future.set_exception(decision)

    async def tick(self) -> None:
        """Settle periodically. Runs until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._waiting:
                self.settle()
