"""Whether a step waits for drafts, where a plain one could begin while the one before is still looked at.

Pure, as the control that asks (`balance.py`).
"""

from __future__ import annotations

FADES = 1 / 8
"""What the latest step counts in what waiting costs, and what drafts promise."""
WORTH = 3.0
"""Times what waiting in vain costs that drafts must promise: their purse pays both, and is of more use to drafts."""
MOST = 1.0
"""Plain steps that one step can have lost by waiting: what is beyond that was somebody else."""


class Waiting:
    """Which steps began early, what waiting for drafts costs, and what it has brought of late."""

    def __init__(self) -> None:
        self._early: set[int] = set()  # numbers of rows whose plain steps have begun early
        self._begun = False
        self._waits = False
        self._will_wait = False
        self._cost = 0.0
        self._promise = 0.0
        self._offered = 0.0

    def is_known(self, rows: int) -> bool:
        """Whether plain steps with so many rows have begun early."""
        return rows in self._early

    def begin(self) -> None:
        """This step began early."""
        self._begun = True

    def decide(self, wait: bool) -> bool:
        """Whether the next one waits."""
        self._will_wait = wait
        return wait

    @property
    def waits(self) -> bool:
        """Whether the step after the one that was over last waits."""
        return self._waits

    def note(self, promise: float) -> None:
        """Drafts were asked for: plain steps that they were expected to save, verified or not."""
        self._promise += FADES * (promise - self._promise)
        self._offered += FADES * ((promise > 0) - self._offered)

    @property
    def pays(self) -> bool:
        """Whether the drafts of late promised more than waiting in vain costs."""
        return self.is_worth(self._promise, self._offered)

    def is_worth(self, promise: float, likely: float) -> bool:
        """Whether drafts do that promise so much, and come with this probability."""
        return promise > WORTH * self._cost * (1.0 - likely)

    def forget(self, share: float) -> None:
        """A text ended that had this share of what was promised: the next one begins where little stands that could be
        looked up. Changes state."""
        self._promise *= 1.0 - share
        self._offered *= 1.0 - share

    def end(self, rows: int) -> tuple[bool, bool]:
        """The step is over: whether, had it no drafts, it measures what plain steps take; and whether it waited."""
        if self._begun:
            self._early.add(rows)
        measures = self._begun or rows not in self._early
        waited = self._waits and not measures
        self._begun, self._waits, self._will_wait = False, self._will_wait, False
        return measures, waited

    def lost(self, steps: float | None) -> float:
        """A step that waited had no drafts. What that usually costs, in plain steps; changes state.

        Args:
            steps: plain steps that it took beyond one; None if that was not measured.
        """
        if steps is not None:
            self._cost += (FADES if self._cost else 1.0) * (min(max(0.0, steps), MOST) - self._cost)
        return self._cost
