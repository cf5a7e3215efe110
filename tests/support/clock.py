"""A clock that a test moves, by which servers judge how long their clients keep them waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

LOOK_S = 0.01  # between two looks of an acceptor at its connections
LIMIT_S = 120.0  # for what takes milliseconds on a machine that is not busy


class Clock:
    """Stands for the module `time` in an acceptor: goes only when it is moved, and counts how often it is read."""

    def __init__(self) -> None:
        self.now = 0.0
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return self.now

    def move(self, seconds: float) -> None:
        """Let time pass, and the acceptor look at all of its connections after it."""
        self.now += seconds
        wanted = self._looks + 2  # the first may have begun before
        wait_until(lambda: self._looks >= wanted)


@contextmanager
def moved_clock() -> Iterator[Clock]:
    """The clock of one server that is started in here, on one port."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.http.acceptor.time", clock)
        patch.setattr("phalanx.http.acceptor.CHECK_INTERVAL_S", LOOK_S)
        patch.setattr("phalanx.http.connection.time", SimpleNamespace(monotonic=lambda: clock.now))
        yield clock


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
