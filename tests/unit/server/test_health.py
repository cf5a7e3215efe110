"""When the engine is asked for its counters."""

from __future__ import annotations

import asyncio

from phalanx.server.endpoints import engine_health
from phalanx.server.sequences.output_queue import Timings
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.server.sequences.speed_meter import PredictedSpeed, SpeedMeter
from phalanx.supervision.fake_engine import FakeEngine
from phalanx.types import Batch, EngineStats, Finished, Timing, Tokens


class Counted(FakeEngine):
    """An engine that counts its pings."""

    def __init__(self) -> None:
        super().__init__(manual=True)
        self.pings = 0
        self.asked = asyncio.Event()

    async def ping(self) -> EngineStats:
        self.pings += 1
        self.asked.set()
        return await super().ping()


def test_the_end_of_an_answer_is_counted_at_once(monkeypatch):
    """Not only with the next ping, which here never comes."""
    monkeypatch.setattr(engine_health, "PING_EVERY_S", 3600.0)
    monkeypatch.setattr(engine_health, "MIN_GAP_S", 0.0)

    async def scenario():
        engine = Counted()
        await engine.start()
        found = engine_health.EngineHealth(
            engine, ServerMetrics("tiny"), stall_s=60.0, limit=16, determinism_key=lambda info: info.dtype
        )
        watch = asyncio.create_task(found.watch())
        engine.become_ready()
        await engine.asked.wait()
        engine.asked.clear()
        found.on_batch(Batch(1, [Tokens("a", 0, [1])]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.pings == 1
        found.on_batch(Batch(2, [Finished("a", "stop", 1)]))
        await asyncio.wait_for(engine.asked.wait(), 60.0)
        assert engine.pings == 2
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await engine.close()

    asyncio.run(scenario())


def test_health_says_what_was_predicted_and_what_is_measured():
    async def scenario():
        engine = FakeEngine(manual=True)
        await engine.start()
        speeds = SpeedMeter(PredictedSpeed(tokens_per_second=200.0, ttft_seconds=0.5))
        metrics = ServerMetrics("tiny", speeds)
        found = engine_health.EngineHealth(
            engine, metrics, stall_s=60.0, limit=16, determinism_key=lambda info: info.dtype
        )
        engine.become_ready()
        assert found.report()[1]["predicted"] == {"tokens_per_second": 200.0, "ttft_seconds": 0.5}
        assert "measured" not in found.report()[1]
        ended = Finished("a", "length", 101, timing=Timing(decode_s=1.0))
        metrics.finished(Timings(0.0, 0.6), ended, 512, 1.6, is_alone=True)
        assert found.report()[1]["measured"] == {"tokens_per_second": 100.0, "ttft_seconds": 0.6}
        await engine.close()

    asyncio.run(scenario())


def test_health_says_how_many_sequences_run_wait_and_are_taken():
    """A gateway shares requests out by these figures."""

    class Busy(FakeEngine):
        async def ping(self) -> EngineStats:
            await super().ping()
            return EngineStats(running=3, waiting=2)

    async def scenario():
        engine = Busy(manual=True)
        await engine.start()
        found = engine_health.EngineHealth(
            engine, ServerMetrics("tiny"), stall_s=60.0, limit=16, determinism_key=lambda info: info.dtype
        )
        assert found.report()[1]["requests"] == {"running": 0, "waiting": 0, "limit": 16}  # its first ping is to come
        watch = asyncio.create_task(found.watch())
        engine.become_ready()
        while "ranks" not in found.report()[1]:
            await asyncio.sleep(0)
        assert found.report()[1]["requests"] == {"running": 3, "waiting": 2, "limit": 16}
        assert found.report()[1]["determinism_key"] == "float32"
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await engine.close()

    asyncio.run(scenario())
