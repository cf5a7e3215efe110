"""How far drafts were right, as counts that fade.

Kept per position of a draft: the j-th token is judged only where those before it were right, so the probability that a
draft is right up to there is the product of the rates so far. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

POOL_FADES = 0.95
"""Of what is known about a drafter, after each draft: the last 20 count."""
ROW_FADES = 0.85
"""Of what is known about one sequence: the last 7 count, for texts change."""
DOUBT = 1.0
"""Judgements that what is assumed beforehand (of the drafter, about a new sequence) is worth."""
UNKNOWN = 0.5
"""Rate of a drafter before anything is known."""


class Acceptance:
    """Rates of acceptance by position of the draft, from 0."""

    def __init__(self, most: int, fades: float) -> None:
        """
        Args:
            most: positions.
            fades: what all counts are multiplied with at each new draft, those of positions too far back to be
                tried any more as well: one wrong token must not end them for ever.
        """
        self._fades = fades
        self._right = [0.0] * most
        self._judged = [0.0] * most

    def judge(self, position: int, right: bool) -> None:
        """The token at this position, all before it being right, was right or not. Changes state."""
        if position == 0:
            self._right = [count * self._fades for count in self._right]
            self._judged = [count * self._fades for count in self._judged]
        self._right[position] += right
        self._judged[position] += 1.0

    def rates(self, assumed: Sequence[float] | None = None) -> list[float]:
        """Estimated probability, per position, that its token is right, given those before it are.

        Args:
            assumed: what the rates are while nothing is known; without, a position's is that of the one before it.
        """
        rates: list[float] = []
        for position, (right, judged) in enumerate(zip(self._right, self._judged, strict=True)):
            if assumed is not None:
                before = assumed[position]
            else:
                before = rates[-1] if rates else UNKNOWN
            rates.append((right + DOUBT * before) / (judged + DOUBT))
        return rates
