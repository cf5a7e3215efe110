"""The one account that speculation is paid from, counted in non-speculative steps. Pure.

Every second beyond a non-speculative step is charged, every extra token is credited, and a fixed share of the time
refills the account. A text on which no draft is ever right therefore loses its allowance and that share, no more.
Does not know what is bought (`adaptive.py`).
"""

from __future__ import annotations

PROBE_SHARE = 0.005
"""Of the time, for tries that gain nothing. Costs that cannot be measured (waiting ranks, cold caches) come to up to
four times as much on two ranks that share a machine; all must stay below a fiftieth."""
ALLOWANCE = 1.5
"""Steps that one text may lose beyond the refill: 0.6 % of 256 tokens, and enough for a few tries."""
WINNINGS = 8.0
"""Steps that it may lose of what it gained: bad luck must not end what pays, nor gains pay for what stopped paying."""
CAPACITY = 128.0
"""Steps that the account holds: the most that a draft model's reading of one long prompt may cost."""


class Budget:
    """The exploration budget; `share` of the time refills it."""

    def __init__(self, share: float = PROBE_SHARE) -> None:
        self.share = share
        self.balance = 2 * ALLOWANCE  # half of it for reading
        self._floor = ALLOWANCE  # what the drafts of the texts of now must leave

    @property
    def spendable(self) -> float:
        """Steps that the drafts of the texts of now may lose; below 0, what they owe."""
        return self.balance - self._floor

    def settle(self, cost: float, gained: float) -> None:
        """A step cost so many non-speculative steps, and its tokens would have cost `gained` more than one."""
        self.balance = min(CAPACITY, self.balance + self.share * cost + gained - (cost - 1.0))
        self._floor = max(self._floor, self.balance - WINNINGS)

    def charge_reading(self, steps: float, *, saved: bool) -> None:
        """A draft model read for so long; if `saved`, that is first paid from what drafts must leave."""
        self.balance -= steps
        self._floor = max(0.0, self._floor - steps * saved)

    def begin(self, share: float) -> None:
        """A text began that is this share of the rows: it may lose its allowance, not all that others gained."""
        floor = max(0.0, self.balance - ALLOWANCE, self._floor - share * ALLOWANCE)
        self._floor = min(floor, self._floor + share * WINNINGS)
