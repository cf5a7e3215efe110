"""The measured cost of a step by number of rows and tokens per row. The caller measures the seconds.

Tokens per row are those that a step computes, in halves where rows are packed (`forwards.py`). A cost is kept as a
ratio to a recent *non-speculative* step (one token per row) with the same number of rows: growing contexts and other
programs on the machine slow both steps down alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

SAMPLES = 5  # per kind of step; their median counts, of one or two the smaller, so that one disturbed step does not
FRESH = 100  # steps for which the time of a non-speculative step is valid: measuring it costs 1 % of the gains
SETTLED = 16  # the same once all sequences are new, with other context lengths; short answers have few steps
HOLDS = 300  # steps for which a ratio is valid
UNSURE = 16  # the same of a single measurement: one disturbed step must not rule out a width for `HOLDS` steps
PER_TOKEN = 0.02  # least cost of one more token per row, and that before any measurement: memory-bound


def tokens_per_row(rows: int, tokens: int) -> float:
    """Tokens per row of a step that computes `tokens` tokens, rounded up to a half."""
    return math.ceil(2 * tokens / rows) / 2


@dataclass
class _Samples:
    """The latest measurements of one kind of step."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    value: float = 0.0
    at: int = 0  # step of the latest
    arrivals: float = 0.0  # `CostCurve._arrivals` at that step

    def add(self, value: float, at: int, arrivals: float = 0.0) -> None:
        self.values.append(value)
        self.value = median(self.values) if len(self.values) > 2 else min(self.values)
        self.at, self.arrivals = at, arrivals

    @property
    def holds(self) -> int:
        """Steps for which a ratio is valid."""
        return HOLDS if len(self.values) > 1 else UNSURE


class CostCurve:
    """t(rows, tokens per row), in non-speculative steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._arrivals = 0.0  # new sequences so far, each counted as its share of the rows
        self._base: dict[int, _Samples] = {}  # rows -> seconds
        self._ratios: dict[int, dict[float, _Samples]] = {}  # rows -> tokens per row -> ratio

    def observe(self, rows: int, per_row: float, seconds: float) -> None:
        """Record the duration of a step; with several tokens per row, only if there is a base time. Changes state."""
        self._steps += 1
        if per_row == 1:
            samples = self._base.setdefault(rows, _Samples())
            if samples.values and self._is_old(samples) and not 0.9 <= seconds / samples.value <= 1.1:
                samples.values.clear()  # contexts have changed: a step may take half as long
            samples.add(seconds, self._steps, self._arrivals)
        elif rows in self._base:
            samples = self._ratios.setdefault(rows, {}).setdefault(per_row, _Samples())
            if self._steps - samples.at > HOLDS:
                samples.values.clear()
            samples.add(seconds / max(self._base[rows].value, 1e-9), self._steps)

    def elapse(self, steps: int) -> None:
        """Steps that were not measured: older measurements expire. Changes state."""
        self._steps += steps

    def base(self, rows: int) -> float | None:
        """Seconds of a non-speculative step; None if there are too few measurements or no recent ones."""
        samples = self._base.get(rows)
        return None if samples is None or len(samples.values) < 3 or self._is_old(samples) else samples.value

    def begin(self, share: float) -> None:
        """A sequence begins, which is this share of the rows. Changes state."""
        self._arrivals += share

    def _is_old(self, base: _Samples) -> bool:
        return self._steps - base.at > (FRESH if self._arrivals - base.arrivals < 1.0 else SETTLED)

    def reach(self, rows: int) -> float:
        """The widest step whose cost may be extrapolated: twice the widest measured one. So a first try is small, and
        kernel blocks often end at powers of two."""
        return 2 * max(self._ratios.get(rows, ()), default=1)

    def ratios(self, rows: int, widths: Sequence[float], *, optimistic: bool = False) -> list[float]:
        """Costs of steps by tokens per row, in non-speculative steps, each >= 1.

        Unmeasured widths are interpolated between two measured ones, or extrapolated from 1 through the widest; if
        `optimistic`, beyond the widest a token costs `PER_TOKEN` only. For a number of rows that was never measured,
        the ratios of fewer rows are used: they are lower, which leads to a try.
        """
        known = {1.0: 1.0, **self._measured(rows)}
        last = max(known)
        slope = (known[last] - 1.0) / (last - 1) if last > 1 and not optimistic else 0.0
        ratios: list[float] = []
        for wide in widths:
            below = max(width for width in known if width <= wide)
            above = min((width for width in known if width > wide), default=None)
            per_token = max(PER_TOKEN, slope) if above is None else (known[above] - known[below]) / (above - below)
            ratios.append(max(1.0, known[below] + (wide - below) * per_token))
        return ratios

    def _measured(self, rows: int) -> dict[float, float]:
        """Valid ratios for this number of rows, else for the next smaller number that has any."""
        for measured_rows in sorted((r for r in self._ratios if r <= rows), reverse=True):
            samples = self._ratios[measured_rows].items()
            held = {width: max(1.0, s.value) for width, s in samples if self._steps - s.at <= s.holds}
            if held:
                return held
        return {}
