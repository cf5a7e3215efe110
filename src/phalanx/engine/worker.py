"""A worker receives plans and executes them; it decides nothing (design: Lock step)."""

from __future__ import annotations

import os

import mlx.core as mx

from phalanx.dist.fault_injection import Injection, inject
from phalanx.engine.execute import execute
from phalanx.engine.link import Link, WorkerLink
from phalanx.engine.mirror import Mirror
from phalanx.engine.stages import StagedRunner
from phalanx.memory import process_rss, trim_heap
from phalanx.sched.plan import RankReport, Reset, Step
from phalanx.types import RankStats


class Worker:
    """Owns a mirror, the runner and the link to the leader."""

    def __init__(self, staged: StagedRunner, link: WorkerLink, injection: Injection | None = None) -> None:
        self.runner = staged.runner
        self._staged = staged
        self.mirror = Mirror()
        self._link = link
        self._injection = injection

    def run(self) -> None:
        """Execute orders until the leader ends the group. A worker that left first would count as lost."""
        self.runner.samples = False
        while (order := self._link.receive()) is not None:
            match order.plan:
                case Step():
                    self._step(order.plan, order.limit_s)
                case RankReport():
                    self._link.answer(rank_stats(self._link, self.mirror, self._staged))
                case Reset():
                    self.runner.reset()
                    trim_heap()

    def _step(self, step: Step, limit_s: float) -> None:
        if self._injection is not None:
            inject_fault(self._injection, step.id, self.mirror)
        self._link.enter(step.id, limit_s)
        self._staged.expect(step, limit_s)
        execute(step, self.mirror, self._staged)
        self._link.leave(step.id)


def inject_fault(injection: Injection, step: int, mirror: Mirror) -> None:
    """Inject a fault into this rank before it executes a step, if the fault is due."""
    if injection.kind == "tamper" and step >= injection.step and mirror.rows:
        next(iter(mirror.rows.values())).crc ^= 1
    inject(injection, step)


def rank_stats(link: Link, mirror: Mirror, staged: StagedRunner) -> RankStats:
    """This rank's figures now."""
    reducer, stage = staged.runner.reducer, staged.runner.stage
    return RankStats(
        rank=link.rank,
        stage=staged.number,
        layers=None if stage is None else (stage.first, stage.last - 1),
        host=link.host,
        pid=os.getpid(),
        steps=mirror.step,
        matches=mirror.matches,
        reductions=reducer.tally.reductions if reducer.checked else 0,
        active_bytes=mx.get_active_memory() + staged.runner.uncounted_bytes,
        peak_bytes=mx.get_peak_memory(),
        rss_bytes=process_rss(),
        links=[*link.links(), *staged.links()],
    )
