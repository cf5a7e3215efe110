"""A quota that API keys' owners share fairly: of choices that a server holds, or of bytes of bodies."""

from __future__ import annotations

from collections import Counter


class FairQuota:
    """An owner may hold the whole capacity while no other wants any. It cannot keep others out: an owner that holds
    nothing, or less than a fair share, may exceed the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: Counter[str] = Counter()  # by owner

    def has_room(self, owner: str, n: int) -> bool:
        """Whether `owner` may take n more."""
        held = self._held[owner]
        owners = len(self._held.keys() | {owner})
        return self._held.total() + n <= self.capacity or not held or held + n <= self.capacity // owners

    def held_by(self, owner: str) -> int:
        """What an owner holds."""
        return self._held[owner]

    def take(self, owner: str, n: int) -> None:
        """Take n for an owner."""
        self._held[owner] += n

    def give_back(self, owner: str, n: int) -> None:
        """Give n of an owner's back."""
        self._held[owner] -= n
        if not self._held[owner]:
            del self._held[owner]
