"""What a step costs: seconds for so many rows of so many tokens, as measured.

How wide a step is are the tokens that it computes per row: a number of halves, where rows are packed (`forwards.py`).
Kept as a ratio to the *plain* step (one token per row) with as many rows, measured lately: contexts grow and machines
are shared, but both slow all steps down alike. Pure: the seconds are handed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

SAMPLES = 5
"""Of which the median counts, so that one disturbed step means nothing."""
ENOUGH = 3
"""Samples from which a median can be taken; with fewer, the cheapest counts, so that a disturbed first try is
repeated."""
FRESH = 100
"""Steps for which a plain step's time holds: measuring it again costs 1 % of what speculation gains."""
SETTLED = 16
"""The same where other sequences have come since, so that short answers are not made of plain steps."""
SAME = 1.1
"""Times as long that a plain step may take as those before a pause or a change, for them to count still: with other
texts, whose contexts are shorter, it may take half."""
HOLDS = 300
"""Steps for which a ratio holds before it is measured again, should that look worth it."""
PER_TOKEN = 0.02
"""Cost of a further token per row before anything was measured, in plain steps: a memory-bound machine's, so that
every other machine finds out by one try."""


def width(rows: int, tokens: int) -> float:
    """Tokens per row of a step that computes so many, in halves."""
    return math.ceil(2 * tokens / rows) / 2


class _Samples:
    """The latest measurements of one kind of step."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=SAMPLES)
        self.at = 0  # step of the latest

    def add(self, value: float, step: int) -> None:
        self.values.append(value)
        self.at = step

    @property
    def value(self) -> float:
        return median(self.values) if len(self.values) >= ENOUGH else min(self.values)


class CostCurve:
    """t(rows, tokens per row), in plain steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._other = 0.0  # share of the sequences that came since plain steps were doubted last
        self._changed = 0  # the step after which that was
        self._plain: dict[int, _Samples] = {}  # rows -> seconds
        self._ratios: dict[int, dict[float, _Samples]] = {}  # rows -> width -> plain steps

    def observe(self, rows: int, width: float, seconds: float) -> None:
        """A step with `width` tokens per row took so long. Changes state.

        Wider ones are dropped while there is no plain step to compare with.
        """
        self._steps += 1
        if width == 1:
            samples = self._plain.setdefault(rows, _Samples())
            if samples.values and not self._holds(samples) and not 1 / SAME <= seconds / samples.value <= SAME:
                samples.values.clear()
            samples.add(seconds, self._steps)
        elif rows in self._plain:
            samples = self._ratios.setdefault(rows, {}).setdefault(width, _Samples())
            if self._steps - samples.at > HOLDS:
                samples.values.clear()
            samples.add(seconds / max(self._plain[rows].value, 1e-9), self._steps)

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step with so many rows; None while too little is known, or nothing of late."""
        samples = self._plain.get(rows)
        if samples is None or len(samples.values) < ENOUGH or not self._holds(samples):
            return None
        return samples.value

    def begin(self, share: float) -> None:
        """A sequence came, that makes up this share of the rows. When as many came as there are, plain steps do not
        hold for long. Changes state."""
        self._other += share
        if self._other >= 1.0:
            self._other, self._changed = 0.0, self._steps

    def _holds(self, plain: _Samples) -> bool:
        return self._steps - plain.at <= (FRESH if plain.at > self._changed else SETTLED)

    def reach(self, rows: int) -> float:
        """The widest step whose cost may be guessed: twice the widest measured with so many rows, so that a first try
        is a small one, and powers of two are tried, where stairs often end."""
        return 2 * max(self._ratios.get(rows, ()), default=1)

    def ratio(self, rows: int, width: float) -> float:
        """Cost of a step of that width in plain steps, >= 1."""
        return self.ratios(rows, [width])[0]

    def ratios(self, rows: int, widths: Sequence[float], *, hopeful: bool = False) -> list[float]:
        """Costs of steps in plain steps, >= 1, by width.

        What was not measured lies on a straight line: between two widths that were, or beyond the widest, from the
        plain step on. Fewer rows stand in for a number of rows that was never measured: they cost less, and so lead to
        a try.

        Args:
            hopeful: the widest ends no line but stands on a stair, for kernels work on so many rows at once: a further
                token costs hardly anything.
        """
        known = {1.0: 1.0, **self._measured(rows)}
        last = max(known)
        slope = (known[last] - 1.0) / (last - 1) if last > 1 and not hopeful else 0.0
        ratios: list[float] = []
        for wide in widths:
            if wide > last:
                ratio = max(1.0, known[last]) + (wide - last) * max(PER_TOKEN, slope)
            else:
                below, above = max(w for w in known if w <= wide), min(w for w in known if w >= wide)
                share = (wide - below) / (above - below) if above > below else 0.0
                ratio = max(1.0, known[below]) * (1.0 - share) + known[above] * share
            ratios.append(max(1.0, ratio))
        return ratios

    def _measured(self, rows: int) -> dict[float, float]:
        """Ratios by width that hold, of these rows or else of the most rows below."""
        for there in sorted((r for r in self._ratios if r <= rows), reverse=True):
            held = {w: s.value for w, s in self._ratios[there].items() if self._steps - s.at <= HOLDS}
            if held:
                return held
        return {}
