"""Execute a plan: what every rank, the leader included, does in a step. No policy, no sampler, no tokenizer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from phalanx.engine.mirror import Mirror
from phalanx.sched.plan import Forward, RowOp, Step

Logits = TypeVar("Logits", covariant=True)


class Executor(Protocol[Logits]):
    """What `model.runner.Runner` offers, and the simulation in the tests as well."""

    def begin(self, step: int, /) -> None:
        """A step begins; for messages."""

    def apply(self, ops: Sequence[RowOp], /) -> None:
        """Execute buffer operations in order."""

    def forward(self, forward: Forward, kv_len: Sequence[int], /) -> Logits | None:
        """Run the model; logits [rows, L, V] where the forward samples or scores."""


class ForwardOutput(NamedTuple, Generic[Logits]):
    """The logits of one forward, and the rows' valid KV lengths before it."""

    forward: Forward
    kv_len: list[int]
    logits: Logits


class Execution(NamedTuple, Generic[Logits]):
    """What a step produced: outputs of forwards with logits, and how long its prefill chunks took."""

    outputs: list[ForwardOutput[Logits]]
    prefill_tokens: int
    prefill_s: float


def execute(step: Step, mirror: Mirror, runner: Executor[Logits]) -> Execution[Logits]:
    """Bring the rows to the plan's state, check it, and run the forwards.

    Raises:
        Desync: this rank's rows are not the plan's.
        CollectiveFault: a sum over ranks was wrong on some rank.
    """
    mirror.begin(step)
    runner.begin(step.id)
    runner.apply(step.ops)
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
    return Execution(outputs, prefill_tokens, prefill_s)
