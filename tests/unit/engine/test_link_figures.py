"""What a rank reports of its links: time waited inside steps, and both kinds of connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from phalanx.dist.stage_link import StageConnections
from phalanx.engine import stages
from phalanx.engine.mirror import Mirror
from phalanx.engine.stages import StagedRunner
from phalanx.engine.worker import rank_stats
from phalanx.sched.plan import Forward
from phalanx.types import LinkStats

ONE = Forward(0, 0, (0,), ((5,),), (1,), sample=True)
WAIT_S = 2.0  # of every frame, on the clock of these tests


class Receiver:
    """Has every frame after `WAIT_S`."""

    def __init__(self) -> None:
        self.now = 0.0

    def take(self) -> bytearray:
        self.now += WAIT_S
        return bytearray(4 * 8)

    def stats(self, waited_s: float) -> LinkStats:
        return LinkStats(peer=1, carries="hidden states", frames=3, waited_s=waited_s)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> StagedRunner:
    receiver: Any = Receiver()
    monkeypatch.setattr(stages.time, "perf_counter", lambda: receiver.now)
    runner: Any = SimpleNamespace(
        begin=lambda step: None,
        forward=lambda forward, kv_len, hidden: None,
        stage=SimpleNamespace(width=8, has_hidden_output=False, first=0, last=2),
        dtype=mx.float32,
        reducer=SimpleNamespace(checked=False),
        uncounted_bytes=0,
    )
    return StagedRunner(runner, 1, StageConnections(receiver, ()), "float32")


def test_time_waited_is_that_of_all_steps_without_the_self_test(staged: StagedRunner) -> None:
    waited = []
    for step in (0, 1, 2, 2):
        if step != staged._step or not step:
            staged.begin(step)
        staged.forward(ONE, [0])
        waited.append(staged.links()[0].waited_s)
    assert waited == [0.0, WAIT_S, 2 * WAIT_S, 3 * WAIT_S]
    assert staged.waited_s == 2 * WAIT_S, "of this step only"


def test_a_rank_reports_its_control_connections_and_those_of_its_stage(staged: StagedRunner) -> None:
    link: Any = SimpleNamespace(rank=0, host="a", links=lambda: [LinkStats(peer=1, carries="plans", resent=2)])
    found = rank_stats(link, Mirror(), staged).links
    assert [(one.carries, one.resent, one.frames) for one in found] == [("plans", 2, None), ("hidden states", None, 3)]
