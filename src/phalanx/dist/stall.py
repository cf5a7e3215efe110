"""Decides whether a rank is stuck in a step, and which ranks cause it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.dist.peers import Heartbeat, Identity, PeerFailure
from phalanx.errors import ExitCode

ALL_INSIDE = 1.25
"""Times the limit: when a step that every rank has reached counts as stuck. A stage that waits for its input reports
its link earlier (`engine/stages.py`)."""


class StepPosition(NamedTuple):
    """The step of this rank's engine thread. Replaced as a whole, so that the watchdog reads it without a lock."""

    step: int = -1
    since: float | None = None  # when the thread entered it, by the `AwakeClock`; None if it has left the step
    limit_s: float = 0.0  # how long the step may take

    def inside_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since


def stalled(
    me: Identity,
    position: StepPosition,
    others: Sequence[tuple[Identity, Heartbeat]],
    now: float,
    *,
    grace_s: float = 0.0,
) -> PeerFailure | None:
    """The failure of a step that exceeds its limit; None within the limit.

    It names the ranks that have not reached the step, by their heartbeats. If all have, it comes somewhat later and
    names all that are in the step.

    Args:
        now: seconds on the clock of `position.since`.
        grace_s: seconds beyond the limit.
    """
    seconds = position.inside_s(now)
    if position.since is None or seconds <= position.limit_s + grace_s:
        return None
    step = position.step
    behind = [(rank, heartbeat) for rank, heartbeat in others if heartbeat.step < step]
    if behind:
        return _failure(
            [(rank, f"stands {_describe(heartbeat)}") for rank, heartbeat in behind],
            f"while the others are in step {step} (limit {position.limit_s:.3g} s)",
        )
    if seconds <= position.limit_s * ALL_INSIDE + grace_s:
        return None
    inside = [(me, seconds)]
    inside += [(rank, beat.inside_s) for rank, beat in others if beat.inside and beat.step == step]
    return _failure(
        [(rank, f"is inside step {step} for {s:.1f} s") for rank, s in inside], f"(limit {position.limit_s:.3g} s)"
    )


def _describe(beat: Heartbeat) -> str:
    if beat.step < 0:
        return "before its first step"
    return f"at step {beat.step} " + (f"(inside for {beat.inside_s:.1f} s)" if beat.inside else "(which it has left)")


def _failure(stuck: Sequence[tuple[Identity, str]], reason: str) -> PeerFailure:
    if len(stuck) == 1:
        ((rank, text),) = stuck
        return PeerFailure.of(rank, ExitCode.STALLED, f"{text} {reason}")
    causes = ", ".join(f"{rank} {text}" for rank, text in stuck)
    return PeerFailure(code=ExitCode.STALLED, cause=f"{causes} {reason}")
