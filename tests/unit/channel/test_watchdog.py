"""What a watchdog decides by itself: sleep, stuck steps, words. No sockets, no waiting."""

from __future__ import annotations

import pytest
from support.channels import identity

from phalanx.dist.awake_clock import AwakeClock
from phalanx.dist.peers import Heartbeat, PeerFailure
from phalanx.dist.stall import StepPosition, stalled
from phalanx.errors import ExitCode


class Hands:
    """A clock set by hand."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_the_clock_runs_while_the_process_runs():
    hands = Hands()
    clock = AwakeClock(0.25, hands)
    for _ in range(100):
        hands.s += 0.2
        assert clock.tick() == 0.0
    assert clock.now() == pytest.approx(120.0)


def test_a_stop_is_not_counted_but_reported():
    hands = Hands()
    clock = AwakeClock(0.25, hands)
    heard = clock.now()
    hands.s += 30.0
    assert clock.tick() == pytest.approx(30.0)
    assert clock.now() - heard == pytest.approx(0.25)  # so that nobody else is blamed for the 30 s
    hands.s += 0.2
    assert clock.tick() == 0.0 and clock.now() - heard == pytest.approx(0.45)


ME, B, C = identity(0), identity(1), identity(2)


def blame(position: StepPosition, *beats: Heartbeat, now: float = 10.0, grace_s: float = 0.0) -> PeerFailure | None:
    return stalled(ME, position, list(zip((B, C), beats, strict=False)), now, grace_s=grace_s)


def test_no_step_no_stall():
    assert blame(StepPosition(), Heartbeat()) is None
    assert blame(StepPosition(42), Heartbeat(42)) is None  # left
    assert blame(StepPosition(42, 9.0, 1.0), Heartbeat(41)) is None  # exactly at the limit
    assert blame(StepPosition(42, 8.0, 1.0), Heartbeat(41), grace_s=2.0) is None


@pytest.mark.parametrize(
    ("beat", "place"),
    [
        (Heartbeat(), "stands before its first step"),
        (Heartbeat(41), "stands at step 41 (which it has left)"),
        (Heartbeat(41, True, 3.21), "stands at step 41 (inside for 3.2 s)"),
    ],
)
def test_only_ranks_that_have_not_reached_the_step_are_named(beat: Heartbeat, place: str):
    failure = blame(StepPosition(42, 8.0, 1.5), beat, Heartbeat(42, True, 2.0))
    assert failure is not None and (failure.code, failure.rank, failure.host) == (ExitCode.STALLED, 1, "host1")
    assert str(failure) == f"rank 1 (host1, pid {B.pid}) {place} while the others are in step 42 (limit 1.5 s)"


def test_several_that_have_not_come_are_all_named():
    failure = blame(StepPosition(42, 8.0, 1.5), Heartbeat(40), Heartbeat(41))
    assert failure is not None and failure.rank is None
    assert str(failure) == (
        f"{B} stands at step 40 (which it has left), {C} stands at step 41 (which it has left) "
        "while the others are in step 42 (limit 1.5 s)"
    )


def test_when_all_have_come_those_still_inside_are_named():
    both = blame(StepPosition(42, 8.0, 1.5), Heartbeat(42, True, 1.9), Heartbeat(42))
    assert both is not None and both.rank is None
    assert str(both) == f"{ME} is inside step 42 for 2.0 s, {B} is inside step 42 for 1.9 s (limit 1.5 s)"
    alone = blame(StepPosition(42, 8.0, 1.5), Heartbeat(42), Heartbeat(42))
    assert alone is not None and alone.rank == 0
