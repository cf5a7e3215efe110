"""Accounts of what speculation may cost, in plain steps. Pure. Does not know what is bought (`balance.py`)."""

from __future__ import annotations

SHARE = 0.005
"""Of the time, for tries that bring no gain: half for forwards, half for asking the drafter. What is not counted, other
ranks that wait and caches that are cold, comes to as much again and up to four times as much on two ranks that share
a machine with the server; all must stay below a fiftieth."""
FORWARDS = 1.5
"""Plain steps for such forwards at first: what a text on which drafts never helped may lose beyond the share."""
INHERITED = 2.0
"""The same for the texts after one that gained, as far as there are savings: a first draft that is wrong must not end
what others show to pay."""
RECORD = 8.0
"""Plain steps gained, less what asking has cost since, that are remembered at most: for so long texts are tried anew
and asked about often after the last that gained. Half of it is what a drafter is thought to have gained at first."""
WINNINGS = 8.0
"""Plain steps that the purse for forwards holds at most: bad luck must not end what pays, nor gains pay for what became
hopeless."""
ASKING = 0.5
"""Plain steps for asking in vain, at first and at most; and owed at most."""
SAVED = 2.5
"""Plain steps for reading prompts at first, a hundredth of one answer; what the other purses cannot hold goes there."""
SAVINGS = 128.0
"""Plain steps that may be saved for reading at most: the most that one long prompt may take."""


class Purses:
    """Three of them: for forwards, for asking, and savings, for reading.

    Args:
        share: of the time, for what brings no gain.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.forwards = FORWARDS
        self.asking = ASKING
        self.savings = SAVED
        self.record = RECORD / 2
        self._half = share / 2

    @property
    def may_ask(self) -> bool:
        """Whether there is anything for asking: in its own purse or, where drafts have gained of late, beyond what the
        other began with."""
        return self.asking > 0 or self._lends

    @property
    def _lends(self) -> bool:
        return self.record > 0 and self.forwards > FORWARDS

    def earn(self, steps: float, gained: float = 0.0) -> None:
        """So much time is over, and forwards gained or lost so much in it. What the purses cannot hold is saved."""
        asking, forwards = self.asking + self._half * steps, self.forwards + self._half * steps + gained
        self.record = min(max(0.0, self.record + gained), RECORD)
        self.asking, self.forwards = min(asking, ASKING), min(forwards, WINNINGS)
        self.save(asking - self.asking + forwards - self.forwards)

    def pay_asking(self, price: float) -> None:
        """From its own purse, else from the other's where that lends. No more is owed than what the purse holds when
        full; the other one pays what is beyond that, as much again at most: one disturbed step means nothing."""
        lends = self._lends
        self.record = max(0.0, self.record - price)
        if self.asking <= 0 and lends:
            self.forwards -= price
            return
        owed = price - self.asking
        self.asking = max(-owed, -ASKING)
        self.forwards -= min(max(0.0, owed - ASKING), ASKING)

    def save(self, steps: float) -> None:
        """For reading, up to a limit; below 0, pay for it."""
        self.savings = min(self.savings + steps, SAVINGS)

    def leave(self, share: float) -> None:
        """A text ended that had this share of the purse. Most of what it has won is not lost on the next one, and what
        it has lost is made good, as far as there are savings; all of it only where drafts have gained of late."""
        full = FORWARDS + min(self.record, INHERITED - FORWARDS)
        won = max(share * (self.forwards - full), -max(self.savings, 0.0))
        self.forwards -= won
        self.record = max(0.0, self.record + min(won, 0.0))
        self.save(won)

    def to_ask_again(self, most: int) -> int:
        """Steps, up to `most`, until the share has earned what is owed for asking."""
        return 1 + int(min(most - 1, max(0.0, -self.asking) / self._half)) if self._half else most

    def share_of(self, steps: float) -> float:
        """What so many steps have earned for one of the purses."""
        return self._half * steps
