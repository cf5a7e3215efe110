"""Retry budget of each client, and back-off before a replica is asked again.

Without a budget, retries multiply the load just when replicas fail of overload. If all clients shared one, a client
whose requests make replicas fail would use it up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from phalanx.gateway.settings.gateway_settings import GatewayConfig

PER_SECOND = 10.0  # retries that are allowed however few the requests
CLIENTS = 4096  # whose budgets are remembered: more than there are keys
MAX_RETRIES = 100.0  # that may be saved up: the requests in flight of a few replicas that die together


def pause(config: GatewayConfig, n: int, random: Callable[[], float]) -> float:
    """Seconds before a request that has failed n times is sent again to a replica that failed it.

    Args:
        random: from 0 to 1.
    """
    exponent = min(n - 1, 100)  # 1.5 ** 100 is far above any longest pause, and 10 ** 400 overflows a float
    pause_ms = config.retry_initial_backoff_ms * config.retry_backoff_multiplier**exponent
    jitter = 1 + config.retry_jitter_factor * (2 * random() - 1)
    return min(config.retry_max_backoff_ms, pause_ms) * jitter / 1000


class RetryBudget:
    """A bucket of retries, refilled by requests and time."""

    def __init__(self, per_request: float) -> None:
        self._per_request = per_request
        self._left = MAX_RETRIES
        self._at = 0.0

    def note_request(self) -> None:
        """A request came."""
        self._left = min(MAX_RETRIES, self._left + self._per_request)

    def take(self, now: float) -> bool:
        """Take one retry. Returns whether there was one."""
        self._left = min(MAX_RETRIES, self._left + max(0.0, now - self._at) * PER_SECOND)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RetryBudgets:
    """The budgets of the most recent clients."""

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
