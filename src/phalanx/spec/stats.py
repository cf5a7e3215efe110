"""What came of speculation: counted per draft, said in one line (A8).

The figures themselves are `types.SpecStats`, which travels to the server. Does not know why k was what it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from phalanx.spec.comparison import Comparison
from phalanx.types import SpecStats


class SpecMeter:
    """Counts the drafts of an engine, or of one request.

    Args:
        comparison: whose figures are told as well.
    """

    def __init__(self, method: str, window: int = 50, comparison: Comparison | None = None) -> None:
        self._method = method
        self._comparison = comparison
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self._window = window
        self._steps = 0
        self._drafts = 0
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []

    def count(self, drafts: Iterable[tuple[int, int]] = ()) -> None:
        """A step that decoded.

        Args:
            drafts: (tokens verified, tokens accepted) of each row that had a draft; 0 <= accepted <= verified >= 1.
                What was accepted and then clipped by a stop or the length counts as accepted.
        """
        self._steps += 1
        for drafted, accepted in drafts:
            self._drafts += 1
            self._recent.append((drafted, accepted))
            _count_up_to(self._drafted_at, drafted)
            _count_up_to(self._accepted_at, accepted)

    def stats(self) -> SpecStats:
        """The figures so far."""
        return SpecStats(
            method=self._method,
            steps=self._steps,
            drafts=self._drafts,
            drafted=sum(self._drafted_at),
            accepted=sum(self._accepted_at),
            drafted_at=list(self._drafted_at),
            accepted_at=[*self._accepted_at, *[0] * (len(self._drafted_at) - len(self._accepted_at))],
            recent_drafted=sum(drafted for drafted, _ in self._recent),
            recent_accepted=sum(accepted for _, accepted in self._recent),
            window=self._window,
            compared_drafted=None if self._comparison is None else self._comparison.drafted.figures,
            compared_plain=None if self._comparison is None else self._comparison.plain.figures,
        )


def _count_up_to(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def speedup(stats: SpecStats) -> float | None:
    """Times as fast with drafts as without, where that is compared and there are steps of both kinds."""
    if stats.compared_drafted is None or stats.compared_plain is None:
        return None
    (tokens, seconds), (plain_tokens, plain_seconds) = stats.compared_drafted, stats.compared_plain
    return tokens * plain_seconds / (seconds * plain_tokens) if seconds and plain_tokens else None


def report(stats: SpecStats) -> dict[str, object]:
    """For `--json`: the counts, and the rates that follow from them; a rate of nothing is null."""
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


def line(stats: SpecStats) -> str:
    """For people: steps, acceptance and tokens per step in one line (A8).

    `at` lists, by position in the draft, the share of the drafts that long which were accepted up to there.
    """
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
