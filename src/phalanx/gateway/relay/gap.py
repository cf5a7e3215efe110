"""The time in which a begun stream has no replica: its client is kept waiting, and what became of it is counted."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from phalanx.gateway.relay.exchange import ClientExchange
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics

KEEP_ALIVE_S = 5.0  # between two signs of life, as a phalanx server's


class Gap:
    """See the module's docstring. One per request: it may open again and again."""

    def __init__(self, exchange: ClientExchange, metrics: GatewayMetrics) -> None:
        self._exchange = exchange
        self._metrics = metrics
        self._replica = ""  # that broke off last; empty: there is no gap
        self._since = 0.0
        self._waiting: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """The stream has no replica."""
        return self._waiting is not None

    def open(self, replica: str) -> None:
        """This replica broke off, before or after it had sent something."""
        if self._replica:
            self._metrics.migrated(self._replica, "failed")
        else:
            self._since = self._exchange.last_written
            self._waiting = asyncio.create_task(self._keep_waiting())
        self._replica = replica

    def close(self, outcome: str) -> float:
        """It is over; does nothing where there is none. Returns the seconds without a byte of a replica.

        Args:
            outcome: "continued", "failed" or "abandoned" (the client left).
        """
        if self._waiting is None:
            return 0.0
        self._waiting.cancel()
        self._waiting = None
        seconds = asyncio.get_running_loop().time() - self._since
        self._metrics.migrated(self._replica, outcome)
        if outcome == "continued":
            self._metrics.gap(seconds)
        self._replica = ""
        return seconds

    async def _keep_waiting(self) -> None:
        with suppress(ConnectionError):  # the client left, which ends the request as well
            while True:
                await asyncio.sleep(KEEP_ALIVE_S)
                await self._exchange.keep_alive()
