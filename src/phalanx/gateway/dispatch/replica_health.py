"""Whether a replica is up, from its health checks, and the load that it reports."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec
from msgspec import Struct

from phalanx.http.foreign_json import decoder

MAX_RUNNING = 65536  # requests; a larger number in a /health is taken for an error


class HealthRules(Struct, frozen=True):
    """Consecutive checks that change a replica's state."""

    failures: int = 3
    successes: int = 2


class ReplicaLoad(Struct, frozen=True):
    """`requests` in a phalanx server's /health: the requests that run and wait, and how many can run."""

    running: int
    waiting: int
    limit: int


class HealthReport(Struct, frozen=True):
    """The fields of a phalanx server's /health that the gateway reads."""

    requests: ReplicaLoad | None = None
    determinism_key: str = ""  # equal ones compute equal tokens; empty: its streams cannot move
    keeps_prefixes: bool = False  # on disk, so that a restart loses none


_read = decoder(HealthReport)


class Check(Struct, frozen=True, kw_only=True):
    """The result of one health check.

    `answered` without `ok`: the replica itself reports that it cannot serve. Its streams may still continue: a phalanx
    server resumes them once its engine is back.
    """

    ok: bool
    answered: bool = True
    reason: str = ""
    report: HealthReport = HealthReport()


def report_of(body: bytes) -> HealthReport:
    """The report in the body of a /health; an empty one for other vendors' servers."""
    try:
        report = _read(body)
    except msgspec.DecodeError:
        return HealthReport()
    load = report.requests
    if load is None or (0 < load.limit <= MAX_RUNNING and load.running >= 0 and load.waiting >= 0):
        return report
    return HealthReport(determinism_key=report.determinism_key)


class ReplicaHealth:
    """The state of one replica: `unknown` before its first check, which decides alone; then `up` or `down`."""

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self.state: Literal["unknown", "up", "down"] = "unknown"
        self.reason = "has not been checked yet"
        self.load: ReplicaLoad | None = None
        self.determinism_key = ""
        """Of its last good check; see `HealthReport`."""
        self.keeps_prefixes = False
        """The same."""
        self.checked_at = 0.0
        """Begin of the last check that has ended."""
        self.refused_since: float | None = None
        """Begin of the first of the latest consecutive checks that report it cannot serve; None if the last did not."""
        self._silent: deque[float] = deque(maxlen=rules.failures)  # ends of the latest checks, while unanswered
        self._failures = 0
        self._successes = 0

    @property
    def is_degraded(self) -> bool:
        """The last check failed, though the replica is not down yet."""
        return self._failures > 0

    def silence(self, last_byte: float, now: float) -> float:
        """Seconds since a stream's last byte, if a later check has ended unanswered; else 0. The check may have begun
        before that byte.
        """
        return now - last_byte if self._silent and last_byte < self._silent[-1] else 0.0

    def is_lost(self, last_byte: float) -> bool:
        """Whether the replica is down, and the last byte is older than the first unanswered check."""
        return self.state == "down" and bool(self._silent) and last_byte < self._silent[0]

    def note(self, check: Check, begun: float, ended: float) -> bool:
        """Take in a check. Returns whether the state has changed.

        Args:
            begun, ended: times of the check.
        """
        before = self.state
        self.checked_at = begun
        if check.answered:
            self._silent.clear()
        else:
            self._silent.append(ended)
        if check.ok or not check.answered:
            self.refused_since = None
        elif self.refused_since is None:
            self.refused_since = begun
        if check.ok:
            self.load, self.determinism_key = check.report.requests, check.report.determinism_key
            self.keeps_prefixes = check.report.keeps_prefixes
            self._failures = 0
            self._successes += 1
            if self.state == "unknown" or self._successes >= self._rules.successes:
                self.state, self.reason = "up", ""
        else:
            self._successes = 0
            self._failures += 1
            if self.state == "unknown" or self._failures >= self._rules.failures:
                self.state = "down"
            if self.state == "down":
                self.reason = check.reason
        return self.state != before
