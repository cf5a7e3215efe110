"""A clock that stands still while this process is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds that do not pass while this process is stopped or the machine sleeps.

    With another clock, a process that continues after a stop would count all other ranks as silent and its own engine
    thread as stuck.

    Args:
        pause_s: a process that runs calls `tick` at least this often. A longer gap counts as stopped time.
        clock: seconds, including stopped time.
    """

    def __init__(self, pause_s: float, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or boot_time
        self._pause_s = pause_s
        self._asleep_s = 0.0
        self._last = self._clock()

    def now(self) -> float:
        """Seconds since an arbitrary start. Excludes a stop only from the next `tick` on. Any thread may call this."""
        return self._clock() - self._asleep_s

    def tick(self) -> float:
        """Call it in every round of the loop. Returns the seconds of a stop since the last call, else 0."""
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap <= self._pause_s:
            return 0.0
        self._asleep_s += gap - self._pause_s
        return gap


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux, macOS: the clocks that count a machine's sleep


def boot_time() -> float:
    """Seconds that also pass while this process is stopped or the machine sleeps."""
    return time.clock_gettime(_CLOCK)
