"""The exploration budget of speculation, counted in non-speculative steps.

Every second beyond a non-speculative step is charged, every extra token is credited, and a fixed share of the time
refills the budget. A text on which no draft is ever right therefore loses its allowance and that share, no more.
"""

from __future__ import annotations

PROBE_SHARE = 0.005
"""Share of the time that may go to drafts without gain. Costs that cannot be measured (waiting ranks, cold caches) are
up to four times as large on two ranks that share a machine; all together must stay below 2 %."""
ALLOWANCE = 1.5
"""Steps that one text may lose beyond the refill: 0.6 % of 256 tokens, and enough for a few tries."""
GAINS_AT_RISK = 8.0
"""Steps that a text may lose of its own gains. A few wrong drafts must not end speculation that pays, and old gains
must not pay for long for drafts that are no longer right."""
CAPACITY = 128.0
"""Most steps that the budget holds, and so the most that reading one long prompt with a draft model may cost."""


class ExplorationBudget:
    """The exploration budget; `share` of the time refills it."""

    def __init__(self, share: float = PROBE_SHARE) -> None:
        self.share = share
        self.balance = 2 * ALLOWANCE  # half of it for reading prompts
        self._floor = ALLOWANCE  # part of the balance that drafts of the running texts must not spend

    @property
    def spendable(self) -> float:
        """Steps that drafts of the running texts may lose; negative if they have overdrawn it."""
        return self.balance - self._floor

    def charge_step(self, cost: float, gained: float) -> None:
        """Record a step: its cost in non-speculative steps, and the tokens per row that it gained beyond one."""
        self.balance = min(CAPACITY, self.balance + self.share * cost + gained - (cost - 1.0))
        self._floor = max(self._floor, self.balance - GAINS_AT_RISK)

    def charge_reading(self, steps: float, *, reserved: bool) -> None:
        """Record prompt reading by a draft model. If `reserved`, it may use the part that drafts must not spend."""
        self.balance -= steps
        self._floor = max(0.0, self._floor - steps * reserved)

    def begin(self, share: float) -> None:
        """A text begins, which is this share of the rows. It may spend its own allowance, not the gains of others."""
        floor = max(0.0, self.balance - ALLOWANCE, self._floor - share * ALLOWANCE)
        self._floor = min(floor, self._floor + share * GAINS_AT_RISK)
