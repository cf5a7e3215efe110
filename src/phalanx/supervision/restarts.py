"""Decides when an engine whose ranks have ended starts again. Pure: callers pass the times.

An engine that has served always starts again, unattended. An engine that never served likely has a wrong flag, a loose
cable or a full machine, and its user waits: after a few starts the server ends with the cause.
"""

from __future__ import annotations

from phalanx.errors import ExitCode

FIRST_STARTS = 5  # that may fail before the engine has ever served
SHORT_S = 5.0  # an engine that ended so soon after it was ready counts as a start that failed
FIRST_PAUSE_S = 0.1  # after a first crash: streams wait
PAUSE_GROWTH = 4  # per start that failed: 0.1, 0.4, 1.6, 6.4, then the longest pause
LONGEST_PAUSE_S = 10.0  # so that a group starts soon after its cause has passed: a cable, a full machine


class Restarts:
    """The history of one engine's starts."""

    def __init__(self) -> None:
        self.failed = 0
        """Starts in succession that never became ready, or ended soon after."""
        self._has_served = False

    def pause_s(self, served_s: float | None, code: ExitCode) -> float | None:
        """Seconds until the next start. None if there is none: the cause cannot change, or no start ever succeeded.

        Args:
            served_s: how long the engine that has ended was ready; None if it never was.
            code: of the cause.
        """
        self._has_served = self._has_served or served_s is not None
        self.failed = self.failed + 1 if served_s is None or served_s < SHORT_S else 0
        memory_may_come_back = self._has_served and code == ExitCode.MEMORY
        if not (code.restart_helps or memory_may_come_back):
            return None
        if not self._has_served and self.failed >= FIRST_STARTS:
            return None
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * PAUSE_GROWTH ** max(0, self.failed - 1)))
