"""What the self-test says: of a slow control connection, and of a token's time, which plans have predicted."""

from __future__ import annotations

import pytest

from phalanx.engine import group_selftest
from phalanx.types import SelfTest


class Slow:
    """Rank 0 of two ranks, at these hosts."""

    rank = 0

    def __init__(self, *hosts: str) -> None:
        self.host = hosts[0]
        self._hosts = hosts

    def share(self, value: object) -> list[object]:
        """What both ranks have shared."""
        return list(self._hosts) if value == self.host else [value, value]


@pytest.mark.parametrize(
    ("hosts", "said", "unsaid"),
    [(("a", "a"), "keep this machine busy", "wired"), (("a", "b"), "it should be wired", "busy")],
)
def test_a_cable_is_advised_between_machines_only(hosts, said, unsaid, monkeypatch, caplog):
    monkeypatch.setattr(group_selftest, "SLOW_CONTROL_MS", 0.0)
    group_selftest._control_round_trip_ms(Slow(*hosts))
    assert said in caplog.text and unsaid not in caplog.text


def test_the_log_has_the_time_of_a_token():
    result = SelfTest(seconds=1.0, control_ms=0.5, tokens=16, summed=2, reductions=16, step_ms=12.345)
    assert "16 tokens equal on 2 ranks, 12.35 ms each" in group_selftest.describe(result, "ring", 2)
