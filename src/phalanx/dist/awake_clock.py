"""A clock that stands still while this process does."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds that do not pass while this process is stopped or the machine sleeps.

    After waking, everybody else seems to have been silent, and the own engine thread slow; on this clock they were not.

    Args:
        pause_s: `turn` is called at least this often by a process that is awake.
        clock: seconds that include sleep.
    """

    def __init__(self, pause_s: float, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or with_sleep
        self._pause_s = pause_s
        self._asleep_s = 0.0
        self._last = self._clock()

    def now(self) -> float:
        """Of use between `turn`s only for differences; any thread may ask."""
        return self._clock() - self._asleep_s

    def turn(self) -> float:
        """A turn of the loop has come: the seconds that were slept through since the last, nearly always 0."""
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap <= self._pause_s:
            return 0.0
        self._asleep_s += gap - self._pause_s
        return gap


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux, macOS: those that count a sleeping machine


def with_sleep() -> float:
    """Seconds that go on while this process is stopped or the machine sleeps."""
    return time.clock_gettime(_CLOCK)
