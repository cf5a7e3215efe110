"""How far drafts were right, as counts that fade.

Kept per grade (`drafters.Draft`), by which a drafter tells its own tokens apart: a token is judged only where those
before it were right, so the probability that a draft is right up to there is the product of the rates so far. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.spec.drafters import GRADES

POOL_FADES = 0.95
"""Of what is known about a drafter, after each draft: the last 20 count."""
ROW_FADES = 0.85
"""Of what is known about one sequence: the last 7 count, for texts change."""
DOUBT = 1.0
"""Judgements that what is assumed beforehand (of the drafter, about a new sequence) is worth."""
UNKNOWN = 0.5
"""Rate of a drafter before anything is known."""


class Acceptance:
    """Rates of acceptance by grade.

    Args:
        fades: what all counts are multiplied with at each new draft, those of grades that are not tried any more as
            well: one wrong token must not end them for ever.
        pool: whose rates are assumed while nothing is known; without, a grade's is that of the one below.
    """

    def __init__(self, fades: float, pool: Acceptance | None = None) -> None:
        self._fades = fades
        self._pool = pool
        self.clear()

    def clear(self) -> None:
        """Nothing is known any more. Changes state."""
        self._right = [0.0] * GRADES
        self._judged = [0.0] * GRADES
        self._rates: list[float] | None = None

    def begin(self) -> None:
        """A new draft is going to be judged: what is known counts less. Changes state."""
        self._right = [count * self._fades for count in self._right]
        self._judged = [count * self._fades for count in self._judged]
        self._rates = None

    def judge(self, grade: int, right: bool) -> None:
        """A token of this grade, all before it being right, was right or not. Changes state."""
        self._right[grade] += right
        self._judged[grade] += 1.0
        self._rates = None

    @property
    def rates(self) -> Sequence[float]:
        """Estimated probability, per grade, that a token is right, given those before it are."""
        if self._pool is not None:  # which changes as well
            return [
                (right + DOUBT * assumed) / (judged + DOUBT)
                for right, judged, assumed in zip(self._right, self._judged, self._pool.rates, strict=True)
            ]
        if self._rates is None:
            self._rates = []
            below = UNKNOWN
            for right, judged in zip(self._right, self._judged, strict=True):
                below = (right + DOUBT * below) / (judged + DOUBT)
                self._rates.append(below)
        return self._rates
