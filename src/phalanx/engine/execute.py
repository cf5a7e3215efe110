"""Executes a plan: the part of a step that every rank does, the leader included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from phalanx.engine.mirror import Mirror
from phalanx.sched.plan import Forward, RowOp, Step

Logits = TypeVar("Logits", covariant=True)


class Executor(Protocol[Logits]):
    """The runner's methods that `execute` calls: `StagedRunner`, or the simulation in the tests."""

    def begin(self, step: int, /) -> None:
        """Set the number of the step, which errors name."""

    def apply(self, ops: Sequence[RowOp], /) -> None:
        """Execute buffer operations in order."""

    def forward(self, forward: Forward, kv_len: Sequence[int], /) -> Logits | None:
        """Run the model; logits [rows, L, V] where the forward samples or scores."""


class ForwardOutput(NamedTuple, Generic[Logits]):
    """The logits of one forward."""

    forward: Forward
    kv_len: list[int]  # [rows], valid KV length before the forward
    logits: Logits  # [rows, L, V]


class Execution(NamedTuple, Generic[Logits]):
    """The outcome of a step: the forwards with logits, and the time of its copies of rows and of its prefill chunks."""

    outputs: list[ForwardOutput[Logits]]
    prefill_tokens: int
    prefill_s: float
    copy_s: float


def execute(step: Step, mirror: Mirror, runner: Executor[Logits]) -> Execution[Logits]:
    """Bring the rows to the plan's state, compare them with its digest, and run the forwards.

    Raises:
        Desync: this rank's rows differ from the plan's.
        CollectiveFault: an all-reduce was wrong on some rank.
    """
    mirror.begin(step)
    begun = time.perf_counter()
    runner.begin(step.id)
    runner.apply(step.ops)
    copy_s = time.perf_counter() - begun
    outputs: list[ForwardOutput[Logits]] = []
    prefill_tokens, prefill_s = 0, 0.0
    for forward in step.forwards:
        kv_len = mirror.lengths(forward)
        before = time.perf_counter()
        logits = runner.forward(forward, kv_len)
        if not forward.sample:
            prefill_tokens += sum(forward.valid)
            prefill_s += time.perf_counter() - before
        mirror.advance(forward)
        if logits is not None:
            outputs.append(ForwardOutput(forward, kv_len, logits))
    return Execution(outputs, prefill_tokens, prefill_s, copy_s)
