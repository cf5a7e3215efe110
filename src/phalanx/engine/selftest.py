"""What a group proves about itself before it serves: same software, same model, correct sums, equal tokens.

Every rank runs all of it and sees the values of every rank, so that all come to the same verdict (F4, A1, A6). It is
also the warm-up, which gives the first step deadlines. Does not know requests.
"""

from __future__ import annotations

import logging
import time
from typing import cast

import mlx.core as mx
from msgspec import Struct

from phalanx.dist.fabric_test import sum_of_ranks, test_fabric
from phalanx.engine.link import Link
from phalanx.engine.step_deadline import StepDeadline
from phalanx.errors import Desync, GroupError
from phalanx.model.runner import Runner
from phalanx.sched.admission import GRANULE
from phalanx.sched.plan import Admit, Forward, Free, Resize
from phalanx.types import FabricFigure, SelfTest

log = logging.getLogger("phalanx.selftest")

CHUNK = 16  # tokens of a prefill chunk
PROMPT = 2 * CHUNK + 5  # tokens; more than one chunk, and not a multiple
TOKENS = 8  # decoded after the prompt
ROUND_TRIPS = 20
SLOW_CONTROL_MS = 1.0


class RankFacts(Struct, frozen=True, kw_only=True):
    """What must be the same on all ranks."""

    phalanx: str
    mlx: str
    mlx_lm: str
    model: str  # fingerprint of its files
    dtype: str


class SelfTestOutcome(Struct, frozen=True, kw_only=True):
    """What a rank computed."""

    tokens: list[int]


def compare_facts(link: Link, facts: RankFacts) -> None:
    """Check that all ranks run the same software on the same model.

    Raises:
        GroupError: names the rank, what differs, and both values.
    """
    everyone = link.share(facts)
    for rank, other in enumerate(everyone):
        for name in RankFacts.__struct_fields__:
            mine, theirs = getattr(everyone[0], name), getattr(other, name)
            if mine != theirs:
                raise GroupError(
                    f"Rank {rank} has {name} {theirs}, rank 0 has {mine}.",
                    remedy="Install the same versions and copy the same model files to every machine.",
                )


def self_test(
    link: Link, runner: Runner, vocab_size: int, deadline: StepDeadline, *, unchecked: int = 0
) -> SelfTest | None:
    """Run the tests. Returns None for a single rank, which only warms up.

    Args:
        unchecked: collectives that the model makes without the reducer.

    Raises:
        CollectiveFault: the fabric adds wrongly.
        Desync: ranks computed different tokens; names the rank and the first difference.
    """
    started = time.perf_counter()
    group = runner.reducer.group
    fabric: list[FabricFigure] = [] if group is None else test_fabric(group)
    total = 1.0 if group is None else sum_of_ranks(group)
    control_ms = _control_round_trip_ms(link) if link.size > 1 else 0.0
    before = runner.reducer.tally.reductions
    tokens = _generate(runner, vocab_size, deadline)
    _compare_tokens(link, tokens)
    if link.size == 1:
        return None
    forwards = -(-PROMPT // CHUNK) + TOKENS
    return SelfTest(
        total=total,
        expected=link.size * (link.size + 1) / 2,
        fabric=fabric,
        control_ms=control_ms,
        tokens=len(tokens),
        unchecked=unchecked,
        reductions=(runner.reducer.tally.reductions - before) // forwards,
        seconds=time.perf_counter() - started,
    )


def describe(result: SelfTest, backend: str, size: int) -> str:
    """One line for the log."""
    small, large = result.fabric[0], result.fabric[-1]
    return (
        f"self-test passed in {result.seconds:.1f} s: {size} ranks over {backend}, all_sum {small.median_us:.0f} us, "
        f"{large.gb_per_s:.2f} GB/s at {large.bytes >> 20} MB, control {result.control_ms:.2f} ms, "
        f"{result.tokens} tokens equal on all ranks, {result.reductions} sums per forward"
    )


def _control_round_trip_ms(link: Link) -> float:
    """The slowest of `ROUND_TRIPS` round trips through all ranks, in ms."""
    slowest = 0.0
    for number in range(ROUND_TRIPS):
        before = time.perf_counter()
        link.share(number)
        slowest = max(slowest, time.perf_counter() - before)
    if slowest * 1000 > SLOW_CONTROL_MS and link.rank == 0:
        log.warning(
            "the control connection took %.1f ms for a round trip; it should be wired (below %g ms)",
            slowest * 1000, SLOW_CONTROL_MS,
        )  # fmt: skip
    return slowest * 1000


def _generate(runner: Runner, vocab_size: int, deadline: StepDeadline) -> list[int]:
    """Greedy tokens after a fixed prompt that is prefilled in chunks, as this rank computes them."""
    prompt = [(7919 * (i + 1)) % max(vocab_size, 2) for i in range(PROMPT)]
    capacity = -(-(PROMPT + TOKENS) // GRANULE) * GRANULE
    runner.begin(0)
    runner.apply([Resize(0, 1, capacity), Admit(0, 0, 0)])
    tokens: list[int] = []
    length = 0
    for start in range(0, PROMPT - 1, CHUNK):
        chunk = prompt[start : min(start + CHUNK, PROMPT - 1)]
        before = time.perf_counter()
        runner.forward(_forward(chunk, sample=False), [length])
        deadline.observe(len(chunk), time.perf_counter() - before, 0.0)
        length += len(chunk)
    fed = prompt[-1]
    for _ in range(TOKENS):
        before = time.perf_counter()
        logits = runner.forward(_forward([fed], sample=True), [length])
        assert logits is not None
        best = mx.argmax(logits[0, -1])
        mx.eval(best, runner.written_caches())
        deadline.observe(0, 0.0, time.perf_counter() - before)
        fed = int(cast(int, best.item()))
        tokens.append(fed)
        length += 1
    runner.apply([Free(0, 0), Resize(0, 0, 0)])
    runner.reset()
    return tokens


def _forward(tokens: list[int], *, sample: bool) -> Forward:
    return Forward(0, 0, (0,), (tuple(tokens),), (len(tokens),), sample=sample)


def _compare_tokens(link: Link, tokens: list[int]) -> None:
    everyone = link.share(SelfTestOutcome(tokens=tokens))
    for rank, outcome in enumerate(everyone):
        for at, (mine, theirs) in enumerate(zip(everyone[0].tokens, outcome.tokens, strict=True)):
            if mine != theirs:
                raise Desync(f"self-test: token {at} is {theirs} on rank {rank} and {mine} on rank 0.")
