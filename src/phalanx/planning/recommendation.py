"""Recommends a plan and gives the reason in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from phalanx.planning.candidates import Candidate, Fit
from phalanx.planning.predictor import STREAMS, Speed

Wish = Literal["latency", "throughput", "context"]

SAME = 0.05
"""Plans within this relative difference count as equally fast; then fewer ranks win."""


class GroupPlan(Struct, frozen=True, kw_only=True):
    """A candidate with its memory and its predicted speed."""

    fit: Fit
    speed: Speed | None = None
    """None if it does not fit, or nothing was measured."""

    @property
    def candidate(self) -> Candidate:
        return self.fit.candidate


class Recommendation(Struct, frozen=True, kw_only=True):
    """The recommended plan and the reason."""

    plan: GroupPlan
    why: str


def recommend(plans: Sequence[GroupPlan], wish: Wish) -> Recommendation | None:
    """The best plan that fits; None if none does.

    Among the plans within 5 % of the best, the one with the fewest ranks; of one shape that on the first hosts.
    """
    able = [plan for plan in plans if not plan.fit.problem and (wish == "context" or plan.speed is not None)]
    if not able:
        able = [plan for plan in plans if not plan.fit.problem]
        if not able:
            return None
        fewest = min(able, key=lambda plan: len(plan.candidate.hosts))
        return Recommendation(plan=fewest, why="It is the smallest plan that fits; no speed was measured.")
    best = max(_score(plan, wish) for plan in able)
    near = [plan for plan in able if _score(plan, wish) >= best * (1 - SAME)]
    chosen = min(near, key=lambda plan: (len(plan.candidate.hosts), -_score(plan, wish)))
    chosen = next(plan for plan in near if plan.candidate.name == chosen.candidate.name)
    return Recommendation(plan=chosen, why=_reason(chosen, able, wish))


def _score(plan: GroupPlan, wish: Wish) -> float:
    if wish == "context":
        return float(plan.fit.context)
    assert plan.speed is not None
    return plan.speed.tokens_per_s[1 if wish == "latency" else STREAMS[-1]]


def _reason(chosen: GroupPlan, able: Sequence[GroupPlan], wish: Wish) -> str:
    """Compares the chosen plan with the best other one, and names that one's link time."""
    if wish == "context":
        return f"Its rows may have {chosen.fit.context:,} tokens."
    others = [plan for plan in able if plan is not chosen]
    streams = 1 if wish == "latency" else STREAMS[-1]
    own = f"{_score(chosen, wish):.1f} tokens/s with {streams} stream{'s' * (streams > 1)}"
    if not others:
        return f"It is the only plan that fits: {own}."
    other = max(others, key=lambda plan: _score(plan, wish))
    assert other.speed is not None and chosen.speed is not None
    percent = 100 * (1 - _score(other, wish) / _score(chosen, wish))
    links = other.speed.parts_s["link latency"] + other.speed.parts_s["link bandwidth"]
    cost = f"; its links take {1000 * links:.1f} ms a token" if links > 0 else ""
    if percent < 0:
        return f"{own}; {other.candidate.name} gains only {-percent:.0f} % with more ranks{cost}."
    return f"{own}; {other.candidate.name} is {percent:.0f} % slower{cost}."
