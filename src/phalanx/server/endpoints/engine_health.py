"""The engine's health: pings the engine every second and after each answer, and reports the result for /health.

An engine that is ready may still hang, so /health is 200 only while the engine's own loop answers pings. The engine
client kills an engine that stopped answering; this module only reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from phalanx.errors import EngineUnavailable
from phalanx.http.error_responses import without_paths
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.supervision.client import EngineClient
from phalanx.types import Batch, EngineStats, Finished, ModelInfo

PING_EVERY_S = 1.0  # while idle: greatest age of /health and /metrics
MIN_GAP_S = 0.1  # least time between two pings, however many answers end
SILENT_S = 15.0  # longer than any step should take; less than the default limit for killing the engine


class EngineHealth:
    """Listens to the engine's events, pings the engine, and reports its state.

    Args:
        limit: sequences that the engine computes together.
        determinism_key: of a server with this model; see `determinism_key.py`.
        keeps_prefixes: whether the engine keeps prefixes on disk, so that a restart loses none.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: ServerMetrics,
        *,
        stall_s: float,
        limit: int,
        determinism_key: Callable[[ModelInfo], str],
        keeps_prefixes: bool = False,
    ) -> None:
        self._engine = engine
        self._limit = limit
        self._determinism_key = determinism_key
        self._keeps_prefixes = keeps_prefixes
        self._metrics = metrics
        self._silent_s = min(SILENT_S, stall_s)
        self._ready = asyncio.Event()
        self._answer_ended = asyncio.Event()  # since the last ping, so a new one fetches the changed counters
        self._stats: EngineStats | None = None
        engine.subscribe(self)

    async def watch(self) -> None:
        """Ping the engine while it is ready. Runs until cancelled."""
        while True:
            await self._ready.wait()
            self._answer_ended.clear()
            with suppress(EngineUnavailable):  # it went down: `on_down` stops the pings, `on_ready` resumes them
                self._stats = await self._engine.ping()
                self._metrics.stats(self._stats)
            await asyncio.sleep(MIN_GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_EVERY_S - MIN_GAP_S):
                    await self._answer_ended.wait()

    @property
    def stats(self) -> EngineStats | None:
        """The engine's last figures; None before the first ones, and while it is away."""
        return self._stats

    def speeds(self) -> dict[str, dict[str, float]]:
        """`predicted` and `measured` speed of one stream, each where known."""
        return self._metrics.speeds.report()

    def report(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health."""
        state = self._engine.state
        age = state.last_pong_age_s
        body: dict[str, Any] = {"status": "ok", "restarts": state.restarts}
        if state.phase != "ready":
            reason = without_paths(state.reason) or f"the engine is {state.phase}"
            body |= {"status": state.phase, "reason": reason}
            if state.down_since is not None:
                body["since"] = datetime.fromtimestamp(state.down_since, UTC).isoformat(timespec="seconds")
            if state.progress is not None:
                progress = state.progress
                body["progress"] = {"phase": progress.phase, "done": progress.done, "total": progress.total}
        elif age is None:
            body |= {"status": "starting", "reason": "the engine has not answered a ping yet"}
        elif age > self._silent_s:
            body |= {"status": "stalled", "reason": f"the engine's loop has not answered for {age:.0f} s"}
        if state.phase == "ready" and (info := self._engine.info) is not None:
            body["determinism_key"] = self._determinism_key(info)
            stats = self._stats or EngineStats()  # just started; without a limit a gateway would assume 1
            body |= {"keeps_prefixes": True} if self._keeps_prefixes else {}
            body |= self.speeds()
            body["requests"] = {"running": stats.running, "waiting": stats.waiting, "limit": self._limit}
        if state.phase == "ready" and self._stats is not None:
            body["ranks"] = [
                {
                    "rank": rank.rank,
                    "stage": rank.stage,
                    "layers": rank.layers,
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
        """Stop pinging, and drop the statistics of the ranks that ended."""
        self._ready.clear()
        self._stats = None

    def on_batch(self, batch: Batch) -> None:
        """Ping soon if the batch ends a sequence. (A batch cannot replace a pong: an idle engine sends none.)"""
        if any(isinstance(event, Finished) for event in batch.events):
            self._answer_ended.set()
