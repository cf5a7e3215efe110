"""Whether a rank is stuck in a step, and which ranks keep it there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.dist.peers import Heartbeat, Identity, PeerFailure
from phalanx.errors import ExitCode


class Position(NamedTuple):
    """Where the own engine thread stands. Replaced as a whole, so that the watchdog reads it without a lock."""

    step: int = -1
    since: float | None = None  # awake seconds at which it entered; None is outside
    limit_s: float = 0.0

    def inside_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since


def stalled(
    me: Identity, position: Position, others: Sequence[tuple[Identity, Heartbeat]], now: float, *, grace_s: float = 0.0
) -> PeerFailure | None:
    """Whether the own engine thread is in its step for too long, and who keeps it there.

    That is the ranks that have not come to the step, where heartbeats show any; else all that are in it.
    """
    seconds = position.inside_s(now)
    if position.since is None or seconds <= position.limit_s + grace_s:
        return None
    step = position.step
    behind = [(who, beat) for who, beat in others if beat.step < step]
    if behind:
        return _blame(
            [(who, f"stands {_place(beat)}") for who, beat in behind],
            f"while the others are in step {step} (limit {position.limit_s:.3g} s)",
        )
    inside = [(me, seconds), *((who, beat.inside_s) for who, beat in others if beat.inside and beat.step == step)]
    return _blame(
        [(who, f"is inside step {step} for {s:.1f} s") for who, s in inside], f"(limit {position.limit_s:.3g} s)"
    )


def _place(beat: Heartbeat) -> str:
    if beat.step < 0:
        return "before its first step"
    return f"at step {beat.step} " + (f"(inside for {beat.inside_s:.1f} s)" if beat.inside else "(which it has left)")


def _blame(what: Sequence[tuple[Identity, str]], tail: str) -> PeerFailure:
    if len(what) == 1:
        return PeerFailure.of(what[0][0], ExitCode.STALLED, f"{what[0][1]} {tail}")
    return PeerFailure(code=ExitCode.STALLED, cause=", ".join(f"{who} {text}" for who, text in what) + f" {tail}")
