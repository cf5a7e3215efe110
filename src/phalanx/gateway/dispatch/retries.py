"""How often requests may be tried again: a budget of each client, and pauses before a replica is asked again.

Without a budget, retries multiply the load just when replicas fail for too much of it. With one for all, a client whose
requests make replicas fail would take it from the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

PER_SECOND = 10.0  # retries that few requests may use as well
CLIENTS = 4096  # whose budgets are remembered: more than there are keys
MOST = 100.0  # retries that may be saved up: the requests in flight of a few replicas that die together


class Backoff(Struct, frozen=True, kw_only=True):
    """Pauses before a request goes to a replica that has failed it already; seconds."""

    initial_s: float = 0.05
    longest_s: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2

    def pause(self, n: int, random: Callable[[], float]) -> float:
        """The pause before the n-th such attempt, from 1.

        Args:
            random: from 0 to 1.
        """
        exponent = min(n - 1, 100)  # 1.5 ** 100 is far above every longest pause, and 10 ** 400 would be no float
        pause = min(self.longest_s, self.initial_s * self.multiplier**exponent)
        return pause * (1 + self.jitter * (2 * random() - 1))


class RetryBudget:
    """A bucket of retries, which requests and time fill."""

    def __init__(self, per_request: float) -> None:
        self._per_request = per_request
        self._left = MOST
        self._at = 0.0

    def note_request(self) -> None:
        """A request came."""
        self._left = min(MOST, self._left + self._per_request)

    def take(self, now: float) -> bool:
        """Take one retry. Returns whether there was one."""
        self._left = min(MOST, self._left + max(0.0, now - self._at) * PER_SECOND)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RetryBudgets:
    """A budget for each client; those that asked last are remembered."""

    def __init__(self, per_request: float) -> None:
        self._per_request = per_request
        self._of: OrderedDict[str, RetryBudget] = OrderedDict()

    def of(self, client: str) -> RetryBudget:
        """The budget of one client."""
        budget = self._of.setdefault(client, RetryBudget(self._per_request))
        self._of.move_to_end(client)
        if len(self._of) > CLIENTS:
            self._of.popitem(last=False)
        return budget
