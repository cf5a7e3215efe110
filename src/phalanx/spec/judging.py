"""What drafts are expected to bring, by how far earlier ones were right.

Tokens do not depend on speculation (design: Keyed sampling), so a draft that was not verified is judged all the same,
by comparing it with what is committed: to learn that drafts became good costs drafting, and no forward. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from phalanx.spec.acceptance import POOL_FADES, ROW_FADES, Acceptance
from phalanx.spec.drafters import Draft

WORTH = 0.1
"""Probability below which a position of a draft is not worth sampling, even where the forward has room for it."""

Chances = list[float]
"""The probability that the first j tokens are right, j = 1 .., as far as worth it."""


class Judging:
    """Knows of each sequence how far its drafts were right, and of which draft that is not decided yet."""

    def __init__(self) -> None:
        self._pool = Acceptance(POOL_FADES)
        self._rows: dict[int, Acceptance] = {}
        self._open: dict[int, tuple[Draft, int]] = {}  # with the tokens that were right so far

    def chances(self, grades: Mapping[int, Sequence[int]]) -> dict[int, Chances]:
        """Of drafts with these grades, by sequence."""
        return {key: _chances(self._rates(key), of_row, 1.0) for key, of_row in grades.items()}

    def ahead(self, keys: Collection[int]) -> dict[int, tuple[float, Chances]]:
        """Of the drafts that the next step may have, as far as the open ones tell: sequence -> the probability that its
        token of this step is the one expected, and the chances of what follows. The others' are not known."""
        found: dict[int, tuple[float, Chances]] = {}
        for key in keys:
            if key in self._open:
                draft, at = self._open[key]
                rates = self._rates(key)
                likely = rates[draft.grades[at]]
                found[key] = likely, _chances(rates, draft.grades[at + 1 :], likely)
        return found

    def is_open(self, key: int) -> bool:
        """Whether a draft of this sequence is being compared with what comes."""
        return key in self._open

    def open(self, key: int, draft: Draft) -> None:
        """Compare this one from now on. Changes state."""
        self._open[key] = draft, 0

    def judge(self, key: int, tokens: Sequence[int]) -> bool:
        """Compare what is open with what was committed, up to the first difference; whether there was anything."""
        if key not in self._open:
            return False
        draft, at = self._open.pop(key)
        row = self._rows.setdefault(key, Acceptance(ROW_FADES, self._pool))
        for token in tokens:
            if at == 0:
                self._pool.begin()
                row.begin()
            right = token == draft.tokens[at]
            self._pool.judge(draft.grades[at], right)
            row.judge(draft.grades[at], right)
            at += 1
            if not right or at == len(draft.tokens):
                return True
        self._open[key] = draft, at
        return True

    def end(self, key: int) -> None:
        """The sequence is over; unknown ones are ignored. Changes state."""
        self._rows.pop(key, None)
        self._open.pop(key, None)

    def forget_drafter(self) -> None:
        """Think of it as a new one; what is known of each sequence stays. Changes state."""
        self._pool.clear()

    def _rates(self, key: int) -> Sequence[float]:
        return self._rows[key].rates if key in self._rows else self._pool.rates


def _chances(rates: Sequence[float], grades: Sequence[int], chance: float) -> Chances:
    chances: Chances = []
    for grade in grades:
        chance *= rates[grade]
        if chance < WORTH:
            break
        chances.append(chance)
    return chances
