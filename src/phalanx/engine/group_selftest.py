"""The self-test of a group before it serves: same software, same model, correct all-reduces, equal tokens.

Every rank runs all of it on the values of every rank, so that all come to the same verdict. It is also the warm-up,
which gives the first time limits of steps.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import cast

import mlx.core as mx
from msgspec import Struct

from phalanx.dist.all_reduce_test import sum_of_ranks, test_all_reduce
from phalanx.engine.link import Link
from phalanx.engine.stages import StagedRunner
from phalanx.engine.step_deadline import StepDeadline
from phalanx.errors import Desync, GroupError
from phalanx.sched.admission import GRANULE
from phalanx.sched.plan import Admit, Forward, Free, Resize
from phalanx.types import AllReduceFigure, SelfTest

log = logging.getLogger("phalanx.selftest")

CHUNK = 16  # tokens of a prefill chunk
PROMPT = 2 * CHUNK + 5  # tokens; more than one chunk, and not a multiple
TOKENS = 8  # decoded after the prompt
NO_TOKEN = -1  # the entry of a rank without logits
PATIENCE_S = 600.0  # for the stage before: its first forward may read weights from a slow disk
ROUND_TRIPS = 20  # of the control connections; the slowest counts
SLOW_CONTROL_MS = 1.0  # a slower round trip delays the steps of a small model


class RankFacts(Struct, frozen=True, kw_only=True):
    """Software and model, which must be the same on all ranks."""

    phalanx: str
    mlx: str
    mlx_lm: str
    model: str  # fingerprint of its files
    dtype: str


def compare_facts(link: Link, facts: RankFacts) -> None:
    """Check that all ranks run the same software on the same model.

    Raises:
        GroupError: names the rank, what differs, and both values.
    """
    by_rank = link.share(facts)
    for rank, other in enumerate(by_rank):
        for name in RankFacts.__struct_fields__:
            mine, theirs = getattr(by_rank[0], name), getattr(other, name)
            if mine != theirs:
                raise GroupError(
                    f"Rank {rank} has {name} {theirs}, rank 0 has {mine}.",
                    remedy="Install the same versions and copy the same model files to every machine.",
                )


def self_test(
    link: Link, staged: StagedRunner, vocab_size: int, deadline: StepDeadline, *, unchecked: int = 0
) -> SelfTest | None:
    """Run the tests. Returns None for a single rank, which only warms up.

    Args:
        unchecked: collectives that the model makes without the reducer.

    Raises:
        CollectiveFault: an all-reduce is wrong.
        Desync: ranks computed different tokens; names the rank and the first difference.
    """
    started = time.perf_counter()
    runner = staged.runner
    group = runner.reducer.group
    all_reduce: list[AllReduceFigure] = [] if group is None else test_all_reduce(group)
    total = 1.0 if group is None else sum_of_ranks(group)
    control_ms = _control_round_trip_ms(link) if link.size > 1 else 0.0
    before = runner.reducer.tally.reductions
    n_tokens, steps_s = _generate(link, staged, vocab_size, deadline)
    if link.size == 1:
        return None
    forwards = -(-PROMPT // CHUNK) + TOKENS
    return SelfTest(
        summed=runner.reducer.size,
        total=total,
        expected=runner.reducer.size * (runner.reducer.size + 1) / 2,
        all_reduce=all_reduce,
        control_ms=control_ms,
        tokens=n_tokens,
        step_ms=statistics.median(steps_s) * 1000,
        unchecked=unchecked,
        reductions=(runner.reducer.tally.reductions - before) // forwards,
        seconds=time.perf_counter() - started,
    )


def describe(result: SelfTest, backend: str, size: int) -> str:
    """One line for the log."""
    all_reduce = ""
    if result.all_reduce:
        small, large = result.all_reduce[0], result.all_reduce[-1]
        all_reduce = (
            f" over {backend}, all_sum {small.median_us:.0f} us, {large.gb_per_s:.2f} GB/s at {large.bytes >> 20} MiB"
        )
    equal = f"equal on {result.summed} ranks" if result.summed > 1 else "of one rank"
    return (
        f"self-test passed in {result.seconds:.1f} s: {size} ranks{all_reduce}, control {result.control_ms:.2f} ms, "
        f"{result.tokens} tokens {equal}, {result.step_ms:.2f} ms each, {result.reductions} all-reduces per forward"
    )


def _control_round_trip_ms(link: Link) -> float:
    """The slowest of `ROUND_TRIPS` round trips through all ranks, in ms."""
    slowest = 0.0
    is_one_host = len(set(link.share(link.host))) == 1
    for number in range(ROUND_TRIPS):
        before = time.perf_counter()
        link.share(number)
        slowest = max(slowest, time.perf_counter() - before)
    if slowest * 1000 > SLOW_CONTROL_MS and link.rank == 0:
        log.warning(
            "the control connection took %.1f ms for a round trip, and should take less than %g ms: %s",
            slowest * 1000, SLOW_CONTROL_MS,
            "other programs keep this machine busy" if is_one_host else "it should be wired",
        )  # fmt: skip
    return slowest * 1000


def _generate(link: Link, staged: StagedRunner, vocab_size: int, deadline: StepDeadline) -> tuple[int, list[float]]:
    """Prefill a fixed prompt in chunks, decode greedily, and compare each token with the other ranks'.

    Returns:
        The number of tokens, and the seconds of each.

    Raises:
        Desync: names the rank and the token.
    """
    prompt = [(7919 * (i + 1)) % max(vocab_size, 2) for i in range(PROMPT)]
    capacity = -(-(PROMPT + TOKENS) // GRANULE) * GRANULE
    runner = staged.runner
    staged.begin(0)
    staged.apply([Resize(0, 1, capacity), Admit(0, 0, 0)])
    steps_s: list[float] = []
    length = 0
    for start in range(0, PROMPT - 1, CHUNK):
        chunk = prompt[start : min(start + CHUNK, PROMPT - 1)]
        before = time.perf_counter()
        staged.forward_alone(_forward(chunk, sample=False), [length], PATIENCE_S)
        deadline.observe(len(chunk), time.perf_counter() - before, 0.0)
        length += len(chunk)
    fed = prompt[-1]
    for at in range(TOKENS):
        before = time.perf_counter()
        best = NO_TOKEN
        logits = staged.forward_alone(_forward([fed], sample=True), [length], PATIENCE_S)
        if logits is not None:
            drawn = mx.argmax(logits[0, -1])
            mx.eval(drawn, runner.written_caches())
            best = int(cast(int, drawn.item()))
        runner.check_sums()
        steps_s.append(time.perf_counter() - before)
        deadline.observe(0, 0.0, steps_s[-1])
        fed = _agreed(at, link.share(best))
        length += 1
    staged.apply([Free(0, 0), Resize(0, 0, 0)])
    runner.reset()
    return TOKENS, steps_s


def _forward(tokens: list[int], *, sample: bool) -> Forward:
    return Forward(0, 0, (0,), (tuple(tokens),), (len(tokens),), sample=sample)


def _agreed(at: int, tokens: list[int]) -> int:
    """The token that all ranks of the last stage, rank 0 among them, have drawn. Raises `Desync`."""
    for rank, token in enumerate(tokens):
        if token not in (tokens[0], NO_TOKEN):
            raise Desync(f"self-test: token {at} is {token} on rank {rank} and {tokens[0]} on rank 0.")
    return tokens[0]
