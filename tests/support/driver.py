"""Drives a real engine process without HTTP: submits sequences and collects their tokens."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from phalanx.config import EngineConfig
from phalanx.supervision.attach import AttachedEngine
from phalanx.supervision.process import EngineProcess
from phalanx.types import Batch, Finished, ModelInfo, PromptScored, Sampling, SequenceRequest, StopRule, Submit, Tokens

DEADLINE_S = 240.0
PATIENT: dict[str, float] = {"heartbeat_timeout_seconds": 8.0, "join_seconds": 240.0}
"""Settings of a group on a busy machine, where a rank may stand still for seconds."""


class Driver:
    """An `EngineListener` that records all events."""

    def __init__(self, engine: EngineProcess | AttachedEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list] = {}
        self.scored: dict[str, list] = {}
        self.finished: dict[str, Finished] = {}
        self.downs: list[tuple[str, bool]] = []
        self.ready = asyncio.Event()
        self.news = asyncio.Condition()
        engine.subscribe(self)

    def on_batch(self, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case Tokens():
                    known = self.tokens.setdefault(event.id, [])
                    assert event.start == len(known)
                    known.extend(event.tokens)
                    self.logprobs.setdefault(event.id, []).extend(event.logprobs or [])
                case PromptScored():
                    self.scored[event.id] = event.logprobs
                case Finished():
                    assert event.id not in self.finished
                    self.finished[event.id] = event
        self._notify()

    def on_ready(self, info: ModelInfo) -> None:
        self.ready.set()
        self._notify()

    def on_down(self, reason: str, will_restart: bool) -> None:
        self.downs.append((reason, will_restart))
        self.ready.clear()
        self._notify()

    def submit(self, *requests: SequenceRequest) -> None:
        for request in requests:
            self.tokens[request.id] = list(request.committed)
            self.engine.send(Submit(request))

    async def until(self, condition) -> None:
        """Wait until `condition()` holds; checks it after every event."""
        async with asyncio.timeout(DEADLINE_S), self.news:
            await self.news.wait_for(condition)

    async def generate(self, *requests: SequenceRequest) -> list[list[int]]:
        """Submit all requests, wait for all, and return their tokens."""
        self.submit(*requests)
        await self.until(lambda: all(r.id in self.finished for r in requests))
        return [self.tokens[r.id] for r in requests]

    def _notify(self) -> None:
        async def notify() -> None:
            async with self.news:
                self.news.notify_all()

        self._task = asyncio.ensure_future(notify())


@asynccontextmanager
async def running(config: EngineConfig, **options):
    """Start an engine and wait until it is ready; yields its driver. Closes the engine afterwards."""
    engine = EngineProcess(config, **options)
    driver = Driver(engine)
    await engine.start()
    try:
        await driver.until(lambda: driver.ready.is_set() or driver.downs)
        assert driver.ready.is_set(), driver.downs
        yield driver
    finally:
        await engine.close()


def ask(seq_id: str, prompt: list[int], max_tokens: int = 16, **more) -> SequenceRequest:
    """A sequence request; greedy unless told otherwise."""
    sampling = Sampling(**{"temperature": 0.0, **more.pop("sampling", {})})
    stop = StopRule(max_tokens=max_tokens, stop_ids=frozenset(more.pop("stop_ids", ())))
    return SequenceRequest(
        id=seq_id, group=more.pop("group", seq_id), prompt=prompt, sampling=sampling, stop=stop, **more
    )
