"""A worker receives plans and executes them (design: Lock step). Does not know policy, sampling, stop rules or text."""

from __future__ import annotations

import os
import socket

import mlx.core as mx

from phalanx.dist.fault_injection import Injection, inject
from phalanx.engine.execute import execute
from phalanx.engine.link import WorkerLink
from phalanx.engine.mirror import Mirror
from phalanx.memory import process_rss, trim_heap
from phalanx.model.runner import Runner
from phalanx.sched.plan import Report, Reset, Step, Stop
from phalanx.types import RankStats


class Worker:
    """Owns a mirror, the runner and the link to the leader."""

    def __init__(self, runner: Runner, link: WorkerLink, injection: Injection | None = None) -> None:
        self.runner = runner
        self.mirror = Mirror()
        self._link = link
        self._injection = injection

    def run(self) -> None:
        """Execute orders until one says stop, or the leader ends the group."""
        self.runner.samples = False
        while (order := self._link.receive()) is not None:
            match order.plan:
                case Step():
                    self._step(order.plan, order.limit_s)
                case Report():
                    self._link.answer(rank_stats(self._link.rank, self.mirror, self.runner))
                case Reset():
                    self.runner.reset()
                    trim_heap()
                case Stop():
                    return

    def _step(self, step: Step, limit_s: float) -> None:
        if self._injection is not None:
            inject_fault(self._injection, step.id, self.mirror)
        self._link.enter(step.id, limit_s)
        execute(step, self.mirror, self.runner)
        self._link.leave(step.id)


def inject_fault(injection: Injection, step: int, mirror: Mirror) -> None:
    """Inject a fault into this rank before it executes a step, if the fault is due."""
    if injection.kind == "tamper" and step >= injection.step and mirror.rows:
        next(iter(mirror.rows.values())).crc ^= 1
    inject(injection, step)


def rank_stats(rank: int, mirror: Mirror, runner: Runner) -> RankStats:
    """This rank's figures now."""
    return RankStats(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        steps=mirror.step,
        matches=mirror.matches,
        reductions=runner.reducer.tally.reductions if runner.reducer.checked else 0,
        active_bytes=mx.get_active_memory(),
        peak_bytes=mx.get_peak_memory(),
        rss_bytes=process_rss(),
    )
