"""Stages with several plans in flight, in pure simulation: equal rows, right tokens, no fault unnoticed (P1, P3).

Granules and thresholds are small here, so that short rows meet every case: growth, both length classes, preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
from pipeline import Pipeline
from stories import FAULTS, Story
from support.examples import SOAK

from phalanx.dist.stage_frames import FrameSequence, decode
from phalanx.engine.mirror import Mirror
from phalanx.sched import admission
from phalanx.sched.arena import ArenaLayout
from phalanx.sched.commit import commit_chunk
from phalanx.sched.plan import Forward
from phalanx.sched.scheduler import Scheduler
from phalanx.sched.sequence import Sequence, state_digest

STORIES = 10_000 if SOAK else 150


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GRANULE", 8)
    monkeypatch.setattr(admission, "MIN_THRESHOLD", 32)


@pytest.mark.grows
def test_thousands_of_conversations():
    noticed: Counter[str] = Counter()
    preempted = 0
    together = set()
    for seed in range(STORIES):
        story = Story(seed)
        try:
            story.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        noticed.update(fault.partition(":")[0] for fault in story.noticed)
        preempted += story.preemptions
        together.add((story.topology.n_stages, story.max_in_flight, story.max_decoding))
    assert noticed.keys() == set(FAULTS) and preempted
    assert {(n, n + 1) for n in (2, 3, 4)} <= {(stages, plans) for stages, plans, _ in together}
    assert all(any(s == n and d >= n for s, _, d in together) for n in (2, 3, 4))  # every stage: a plan that samples


# Mutants: each changes one rule of the contract, and some conversation without any other fault must fail -----------

Mutate = Callable[[pytest.MonkeyPatch], None]


def wrapped(owner: type, name: str) -> Callable[[Callable[..., Any]], Mutate]:
    """A mutant that replaces a method by a function of the method and its arguments."""

    def decorate(change: Callable[..., Any]) -> Mutate:
        original = getattr(owner, name)

        @wraps(change)
        def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(owner, name, lambda *args: change(original, *args))

        return mutate

    return decorate


@wrapped(Pipeline, "commits")
def a_chunk_committed_when_its_plan_returns(original: Any, self: Pipeline, output: Any) -> Iterator[Any]:
    """Beside the commit that the scheduler made when it planned the chunk."""
    yield from original(self, output)
    for row in self.scheduler.layout.rows():
        if not row.decoding and row.kv_len:
            yield commit_chunk(row, row.kv_len, 1)


@wrapped(Scheduler, "_put_in_flight")
def a_chunk_committed_twice(original: Any, self: Scheduler, forwards: list[Forward]) -> None:
    original(self, forwards)
    for forward in forwards:
        if not forward.sample:
            self.by_number[forward.seqs[0]].kv_len += forward.valid[0]


@wrapped(Scheduler, "_put_in_flight")
def a_chunk_committed_never(original: Any, self: Scheduler, forwards: list[Forward]) -> None:
    before = {row.number: row.kv_len for row in self.layout.rows()}
    original(self, forwards)
    for forward in forwards:
        if not forward.sample:
            self.by_number[forward.seqs[0]].kv_len = before[forward.seqs[0]]


@wrapped(Scheduler, "digest")
def a_digest_without_positions_in_flight(_original: Any, self: Scheduler) -> int:
    return state_digest((r.arena, r.slot, r.number, r.kv_len, r.crc) for r in self.layout.rows())


@wrapped(Mirror, "lengths")
def a_stale_length(original: Any, self: Mirror, forward: Forward) -> list[int]:
    """The row's length before the plan in flight."""
    lengths = original(self, forward)
    return [max(0, length - 1) if not forward.sample else length for length in lengths]


@wrapped(Scheduler, "_end_or_mark")
def a_row_that_ends_in_flight(_original: Any, self: Scheduler, seq: Sequence | None, ending: Any, now: float) -> None:
    if seq is not None:
        self._end(seq, ending, now)


@wrapped(ArenaLayout, "next_group")
def a_row_that_is_fed_again_in_flight(_original: Any, self: ArenaLayout, *_: Any) -> int | None:
    return next((group for group in range(self.row_groups) if self.decoding(group)), None)


@wrapped(Scheduler, "_grow")
def a_row_that_is_preempted_in_flight(original: Any, self: Scheduler) -> set[int]:
    hidden = {row: row.in_flight for row in self.layout.rows()}
    for row in hidden:
        row.in_flight = 0
    short: set[int] = original(self)
    for row, positions in hidden.items():
        row.in_flight = positions
    return short


def a_buffer_cut_below_positions_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "extent", property(lambda self: len(self.tokens)))


@wrapped(FrameSequence, "begin")
def a_skipped_frame(_original: Any, self: FrameSequence, header: bytes) -> int:
    """A receiver that takes whatever comes."""
    self._arriving = decode(header, self._link)
    return self._arriving.frame.n_bytes


@wrapped(FrameSequence, "end")
def a_payload_taken_unseen(_original: Any, self: FrameSequence, payload: bytes) -> None:
    self._arriving = None
    self._expected.popleft()


WITHOUT_FAULTS = [
    a_chunk_committed_when_its_plan_returns,
    a_chunk_committed_twice,
    a_chunk_committed_never,
    a_digest_without_positions_in_flight,
    a_stale_length,
    a_row_that_ends_in_flight,
    a_row_that_is_fed_again_in_flight,
    a_row_that_is_preempted_in_flight,
    a_buffer_cut_below_positions_in_flight,
]
WITH_FAULTS = [a_skipped_frame, a_payload_taken_unseen]
MOST = 500  # conversations


@pytest.mark.parametrize("mutate", WITHOUT_FAULTS)
def test_a_mutant_is_caught_without_any_fault(mutate: Mutate, monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    assert any(fails(seed, faults=False) for seed in range(MOST))


@pytest.mark.parametrize("mutate", WITH_FAULTS)
def test_a_receiver_that_checks_nothing_is_caught(mutate: Mutate, monkeypatch: pytest.MonkeyPatch):
    mutate(monkeypatch)
    assert any(fails(seed, faults=True) for seed in range(MOST))


def fails(seed: int, *, faults: bool) -> bool:
    try:
        Story(seed, faults=faults).run()
    except (AssertionError, KeyError, TypeError, ValueError, IndexError):
        return True
    return False
