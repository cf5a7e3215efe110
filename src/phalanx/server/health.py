"""Is the engine alive? Pings it once a second and when an answer has ended; answers /health from what came back.

Ready is not enough: 200 is given only while the engine's own loop answers. Killing an engine that stopped answering is
the engine client's matter; this only tells. Does not know HTTP frameworks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from phalanx.errors import EngineUnavailable
from phalanx.server.metrics import Metrics
from phalanx.supervision.client import EngineClient
from phalanx.types import Batch, EngineStats, Finished, ModelInfo

PING_EVERY_S = 1.0
LEAST_GAP_S = 0.1  # between pings, however many answers end
SILENT_S = 15.0  # longer than any step should take; less than the default limit for killing the engine


class Health:
    """Listens, pings, reports."""

    def __init__(self, engine: EngineClient, metrics: Metrics, *, stall_s: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._silent_s = min(SILENT_S, stall_s)
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()  # an answer, since the last ping: what was counted for it is worth asking for
        self._stats: EngineStats | None = None
        engine.subscribe(self)

    async def watch(self) -> None:
        """Ping for ever, while the engine is ready."""
        while True:
            await self._ready.wait()
            self._ended.clear()
            with suppress(EngineUnavailable):  # down: on_down has stopped the pings, on_ready lets them go on
                self._stats = await self._engine.ping()
                self._metrics.stats(self._stats)
            await asyncio.sleep(LEAST_GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_EVERY_S - LEAST_GAP_S):
                    await self._ended.wait()

    def report(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health."""
        state = self._engine.state
        age = state.last_pong_age_s
        body: dict[str, Any] = {"status": "ok", "restarts": state.restarts}
        if state.phase != "ready":
            body |= {"status": state.phase, "reason": state.reason or f"the engine is {state.phase}"}
            if state.down_since is not None:
                body["since"] = datetime.fromtimestamp(state.down_since, UTC).isoformat(timespec="seconds")
            if state.progress is not None:
                progress = state.progress
                body["progress"] = {"phase": progress.phase, "done": progress.done, "total": progress.total}
        elif age is None:
            body |= {"status": "starting", "reason": "the engine has not answered a ping yet"}
        elif age > self._silent_s:
            body |= {"status": "stalled", "reason": f"the engine's loop has not answered for {age:.0f} s"}
        if state.phase == "ready" and self._stats is not None:
            body["ranks"] = [
                {
                    "rank": rank.rank,
                    "host": rank.host,
                    "pid": rank.pid,
                    "steps": rank.steps,
                    "mismatches": rank.steps - rank.matches,
                    "reductions_checked": rank.reductions,
                }
                for rank in self._stats.ranks
            ]
        return (200 if body["status"] == "ok" else 503), body

    def on_ready(self, info: ModelInfo) -> None:
        """Start pinging."""
        self._ready.set()

    def on_down(self, reason: str, will_restart: bool) -> None:
        """Stop pinging; what the old ranks said counts no more."""
        self._ready.clear()
        self._stats = None

    def on_batch(self, batch: Batch) -> None:
        """A batch is not an answer of an idle engine; but it may be the last of a request."""
        if any(isinstance(event, Finished) for event in batch.events):
            self._ended.set()
