"""Requests that wait for a replica: bounded, and fair between the owners of API keys.

Owners take turns. If the queue is full, a request of an owner with fewer waiting evicts the newest request of the
owner with most: a heavy user keeps no other out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A request that can wait."""

    @property
    def owner(self) -> str:
        """Of its API key; "" without keys."""

    @property
    def give_up_at(self) -> float:
        """When its wait ends; monotonic seconds."""


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """See the module's docstring.

    Args:
        capacity: None is unbounded.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._of: dict[str, deque[W]] = {}
        """Owner -> its requests, oldest first. The owner whose turn it is comes first."""
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def __iter__(self) -> Iterator[W]:
        return (entry for entries in self._of.values() for entry in entries)

    def add(self, entry: W) -> W | None:
        """Let a request wait. Changes state.

        Returns:
            None if there was room; else the evicted request, which may be `entry` itself.
        """
        if self.capacity is None or self._held < self.capacity:
            self._append(entry)
            return None
        mine = len(self._of.get(entry.owner, ()))
        heaviest = max(self._of.values(), key=len, default=None)
        if heaviest is None or len(heaviest) <= mine + 1:
            return entry
        evicted = heaviest[-1]
        self.remove(evicted)
        self._append(entry)
        return evicted

    def take(self, can_go: Callable[[W], bool]) -> W | None:
        """The next request that can go, by turns between owners; None if none can. Changes state."""
        for owner, entries in self._of.items():
            for entry in entries:
                if can_go(entry):
                    self.remove(entry)
                    if owner in self._of:
                        self._of[owner] = self._of.pop(owner)  # its next turn comes after all others'
                    return entry
        return None

    def take_overdue(self, now: float) -> list[W]:
        """The requests that have waited too long. Changes state."""
        found = [entry for entry in self if entry.give_up_at <= now]
        for entry in found:
            self.remove(entry)
        return found

    def remove(self, entry: W) -> bool:
        """Remove a request from the queue. Returns whether it was there. Changes state."""
        entries = self._of.get(entry.owner)
        if entries is None or entry not in entries:
            return False
        entries.remove(entry)
        self._held -= 1
        if not entries:
            del self._of[entry.owner]
        return True

    def _append(self, entry: W) -> None:
        self._of.setdefault(entry.owner, deque()).append(entry)
        self._held += 1


class DrainRate:
    """Estimates how fast requests end, from the last of them."""

    LAST = 64  # requests: the rate follows a change of load within as many
    MIN_S, MAX_S = 1.0, 60.0  # of an estimate: clients retry within a minute, and not at once

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=self.LAST)

    def note(self, now: float) -> None:
        """A request has ended."""
        self._at.append(now)

    def seconds_until(self, n: int, now: float) -> float:
        """Seconds until about n more requests have ended."""
        if not self._at or now <= self._at[0]:
            return self.MIN_S
        per_request = (now - self._at[0]) / len(self._at)
        return min(self.MAX_S, max(self.MIN_S, n * per_request))
