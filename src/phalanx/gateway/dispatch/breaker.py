"""A replica's circuit breaker: after failed requests in a row, no requests for a while, then single trials.

    closed --(failures in a row)--> open --(time)--> half-open --(successes)--> closed
                                     ^---(one failure)--'

The caller decides what counts as a failure: not what the request may have caused itself, nor a client that left.
"""

from __future__ import annotations

from msgspec import Struct


class BreakerRules(Struct, frozen=True, kw_only=True):
    """When a circuit opens and closes; seconds."""

    failures: int = 10
    successes: int = 3
    open_s: float = 60.0
    window_s: float = 120.0


class Breaker:
    """See the module's docstring. Every request that begins ends with one of the three reports."""

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._failed_at: list[float] = []  # failures since the last success, within the window
        self._open_until: float | None = None
        self._successes = 0  # since the circuit is half-open
        self._on_trial = False  # a trial request is under way

    def allows(self, now: float) -> bool:
        """Whether a request may begin. Changes nothing."""
        return self._open_until is None or (now >= self._open_until and not self._on_trial)

    @property
    def is_closed(self) -> bool:
        """Requests pass as usual."""
        return self._open_until is None

    def reason(self, now: float) -> str:
        """Why no request may begin; empty if one may."""
        if self._open_until is None or self.allows(now):
            return ""
        left = self._open_until - now
        wait = f"for another {left:.0f} s" if left > 0 else "until the request on trial has ended"
        return f"failed {self._rules.failures} requests in a row and gets none {wait}"

    def begin(self) -> bool:
        """A request begins; `allows` must hold. Returns whether it is a trial, for its report."""
        self._on_trial = self._open_until is not None
        return self._on_trial

    def succeed(self, trial: bool) -> None:
        """A request was answered."""
        if self._open_until is None:
            self._failed_at.clear()
        elif trial:
            self._on_trial = False
            self._successes += 1
            if self._successes >= self._rules.successes:
                self._open_until = None
                self._successes = 0

    def fail(self, trial: bool, now: float) -> None:
        """The replica failed a request, which may have been reported as cancelled before. Once the circuit is open,
        only trials count.
        """
        if self._open_until is None:
            self._failed_at = [at for at in self._failed_at if now - at <= self._rules.window_s] + [now]
            if len(self._failed_at) >= self._rules.failures:
                self._open(now)
        elif trial:
            self._on_trial = False
            self._open(now)

    def reset(self) -> None:
        """The replica has restarted: close the circuit and forget its failures."""
        self._open_until = None
        self._failed_at.clear()
        self._successes = 0
        self._on_trial = False

    def cancel(self, trial: bool) -> None:
        """A request ended without showing whether the replica works."""
        if trial:
            self._on_trial = False

    def _open(self, now: float) -> None:
        self._open_until = now + self._rules.open_s
        self._successes = 0
        self._failed_at.clear()
