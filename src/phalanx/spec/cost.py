"""What a step costs: seconds for so many rows of so many tokens, as measured. Pure: the seconds are handed in.

Tokens per row are what a step computes: a number of halves, where rows are packed (`forwards.py`). A cost is kept as a
ratio to the *non-speculative* step (one token per row) with as many rows, measured lately: contexts grow and machines
are shared, but both slow all steps down alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

SAMPLES = 5  # of which the median counts, so that one disturbed step means nothing; of one or two the cheaper
FRESH = 100  # steps for which a non-speculative step's time holds: measuring it costs 1 % of what speculation gains
SETTLED = 16  # the same where all sequences are others: their contexts are, but short answers have few steps
HOLDS = 300  # steps for which a ratio holds before it is measured again, should that look worth it
PER_TOKEN = 0.02  # cost of a further token per row before anything was measured: a memory-bound machine's


def tokens_per_row(rows: int, tokens: int) -> float:
    """Of a step that computes so many tokens, in halves."""
    return math.ceil(2 * tokens / rows) / 2


@dataclass
class _Samples:
    """The latest measurements of one kind of step."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    value: float = 0.0
    at: int = 0  # step of the latest
    came: float = 0.0  # sequences that had come then

    def add(self, value: float, at: int, came: float = 0.0) -> None:
        self.values.append(value)
        self.value = median(self.values) if len(self.values) > 2 else min(self.values)
        self.at, self.came = at, came


class CostCurve:
    """t(rows, tokens per row), in non-speculative steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._came = 0.0  # sequences, each as its share of the rows
        self._base: dict[int, _Samples] = {}  # rows -> seconds
        self._ratios: dict[int, dict[float, _Samples]] = {}  # rows -> tokens per row -> ratio

    def observe(self, rows: int, per_row: float, seconds: float) -> None:
        """A step took so long; one of several tokens per row counts once there is a base time. Changes state."""
        self._steps += 1
        if per_row == 1:
            samples = self._base.setdefault(rows, _Samples())
            if samples.values and self._is_old(samples) and not 0.9 <= seconds / samples.value <= 1.1:
                samples.values.clear()  # other contexts: a step may take half
            samples.add(seconds, self._steps, self._came)
        elif rows in self._base:
            samples = self._ratios.setdefault(rows, {}).setdefault(per_row, _Samples())
            if self._steps - samples.at > HOLDS:
                samples.values.clear()
            samples.add(seconds / max(self._base[rows].value, 1e-9), self._steps)

    def base(self, rows: int) -> float | None:
        """Seconds of a non-speculative step; None while too little is known, or nothing of late."""
        samples = self._base.get(rows)
        return None if samples is None or len(samples.values) < 3 or self._is_old(samples) else samples.value

    def begin(self, share: float) -> None:
        """A sequence came that is this share of the rows. Changes state."""
        self._came += share

    def _is_old(self, base: _Samples) -> bool:
        return self._steps - base.at > (FRESH if self._came - base.came < 1.0 else SETTLED)

    def reach(self, rows: int) -> float:
        """The widest step whose cost may be guessed: a first try is small, and powers of two often end stairs."""
        return 2 * max(self._ratios.get(rows, ()), default=1)

    def ratios(self, rows: int, widths: Sequence[float], *, hopeful: bool = False) -> list[float]:
        """Costs of steps by tokens per row, in non-speculative steps, each >= 1. What was not measured lies on a line:
        between two that were, or beyond the widest, from 1 on; if `hopeful`, that one stands on a stair (kernels work
        on so many tokens at once), and a further token costs hardly anything. Fewer rows stand in for a number of rows
        that was never measured: they cost less, and so lead to a try."""
        known = {1.0: 1.0, **self._measured(rows)}
        last = max(known)
        slope = (known[last] - 1.0) / (last - 1) if last > 1 and not hopeful else 0.0
        ratios: list[float] = []
        for wide in widths:
            below = max(width for width in known if width <= wide)
            above = min((width for width in known if width > wide), default=None)
            per_token = max(PER_TOKEN, slope) if above is None else (known[above] - known[below]) / (above - below)
            ratios.append(max(1.0, known[below] + (wide - below) * per_token))
        return ratios

    def _measured(self, rows: int) -> dict[float, float]:
        """Ratios that hold, of these rows or else of the most rows below."""
        for there in sorted((r for r in self._ratios if r <= rows), reverse=True):
            held = {w: max(1.0, s.value) for w, s in self._ratios[there].items() if self._steps - s.at <= HOLDS}
            if held:
                return held
        return {}
