"""The figures of speculation: counted per draft, reported in one line."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.spec.comparison import Comparison
from phalanx.types import SpecStats


@dataclass
class SpecMeter:
    """Counts the drafts of an engine, or of one request, and holds the figures of a comparison."""

    method: str
    window: int = 50
    comparison: Comparison | None = None
    _steps: int = 0
    _drafts: Counter[tuple[int, int]] = field(default_factory=Counter)  # (tokens verified, accepted) -> drafts

    def __post_init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=self.window)

    def count(self, drafts: Iterable[tuple[int, int]] = ()) -> None:
        """Count a decoding step: (tokens verified, tokens accepted, even if clipped by a stop) of each draft."""
        self._steps += 1
        for draft in drafts:
            self._drafts[draft] += 1
            self._recent.append(draft)

    def stats(self) -> SpecStats:
        """The figures so far."""
        drafts, totals = self._drafts.items(), {} if self.comparison is None else self.comparison.totals
        places = range(max((drafted for drafted, _ in self._drafts), default=0))
        return SpecStats(
            method=self.method,
            steps=self._steps,
            drafts=self._drafts.total(),
            drafted=sum(drafted * n for (drafted, _), n in drafts),
            accepted=sum(accepted * n for (_, accepted), n in drafts),
            drafted_at=[sum(n for (drafted, _), n in drafts if drafted > at) for at in places],
            accepted_at=[sum(n for (_, accepted), n in drafts if accepted > at) for at in places],
            recent_drafted=sum(drafted for drafted, _ in self._recent),
            recent_accepted=sum(accepted for _, accepted in self._recent),
            window=self.window,
            compared_with=totals.get(True),
            compared_without=totals.get(False),
        )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def speedup(stats: SpecStats) -> float | None:
    """Speed with drafts / speed without; None unless there is a comparison with steps of both kinds."""
    if stats.compared_with is None or stats.compared_without is None:
        return None
    (tokens, seconds), (other_tokens, other_seconds) = stats.compared_with, stats.compared_without
    return tokens * other_seconds / (seconds * other_tokens) if seconds and other_tokens else None


def report(stats: SpecStats) -> dict[str, object]:
    """For `--json`: counts and rates; a rate without observations is None."""
    return {
        "method": stats.method,
        "steps": stats.steps,
        "drafts": stats.drafts,
        "draft_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "alpha": _share(stats.accepted, stats.drafted),
        "mean_accepted": _share(stats.accepted, stats.drafts),
        "mean_k": _share(stats.drafted, stats.drafts),
        "accepted_at": [_share(*pair) for pair in zip(stats.accepted_at, stats.drafted_at, strict=True)],
        "recent_alpha": _share(stats.recent_accepted, stats.recent_drafted),
        "window": stats.window,
        "speedup": speedup(stats),
    }


def log_line(stats: SpecStats) -> str:
    """One line for the log. `at` lists, by position, the share of drafts of that length accepted up to there."""
    times = speedup(stats)
    compared = "" if times is None else f", {times:.3f} times as fast as without"
    if not stats.drafts:
        return f"speculation ({stats.method}): {stats.steps} steps, no draft was worth verifying{compared}"
    at = " ".join(f"{a / d:.2f}" for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))
    return (
        f"speculation ({stats.method}): {stats.steps} steps, {stats.drafts} drafts, "
        f"alpha {stats.accepted / stats.drafted:.3f}, "
        f"accepted {stats.accepted / stats.drafts:.2f} / {stats.drafted / stats.drafts:.2f}, at {at}, "
        f"last {min(stats.window, stats.drafts)} drafts {stats.recent_accepted / stats.recent_drafted:.3f}{compared}"
    )
