"""The limit of open files is raised as far as the system lets it, and never lowered."""

from __future__ import annotations

import resource

import pytest

from phalanx import open_files
from phalanx.open_files import ENOUGH, raise_limit

INFINITY = resource.RLIM_INFINITY


class Limits:
    """This process's limits on a system that refuses more than `most`, as macOS does (kern.maxfilesperproc)."""

    def __init__(self, soft: int, hard: int, most: int = 1 << 40) -> None:
        self.now = (soft, hard)
        self._most = most

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.now

    def set(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        if limits[0] > self._most:
            raise ValueError("current limit exceeds maximum limit")
        self.now = limits


@pytest.mark.parametrize(
    ("limits", "wanted", "soft"),
    [
        (Limits(256, INFINITY), ENOUGH, 8192),
        (Limits(256, INFINITY, most=61440), 100_000, 50_000),
        (Limits(256, INFINITY, most=10240), 20_000, 10_000),
        (Limits(256, INFINITY, most=256), ENOUGH, 256),
        (Limits(1024, 4096), ENOUGH, 4096),
        (Limits(256, 256), ENOUGH, 256),
        (Limits(65536, 65536), ENOUGH, 65536),
        (Limits(INFINITY, INFINITY), ENOUGH, INFINITY),
    ],
)
def test_the_soft_limit_goes_up_and_the_hard_one_stays(
    limits: Limits, wanted: int, soft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = limits.now[1]
    monkeypatch.setattr(open_files.resource, "getrlimit", limits.get)
    monkeypatch.setattr(open_files.resource, "setrlimit", limits.set)
    raise_limit(wanted)
    assert limits.now == (soft, hard)


def test_a_process_may_open_more_afterwards() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = min(before[1], 2048) if before[1] != INFINITY else 2048
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(room, 256), before[1]))
    try:
        raise_limit(room)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (room, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
