"""The timer of steps, with a clock that is turned by hand."""

from __future__ import annotations

import pytest

from phalanx.engine import step_timer
from phalanx.engine.step_timer import StepTimer


def test_phases_add_up_within_a_step_and_steps_without_a_plan_are_not_counted(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now)
    timer = StepTimer()
    for planned in (True, False, True):
        timer.start()
        for seconds in (1.0, 2.0):
            with timer.phase("model"):
                now += seconds
        now += 4.0
        assert (timer.phases_s["model"], timer.phases_s["draft"], timer.elapsed_s) == (3.0, 0.0, 7.0)
        timer.stop(planned=planned)
    assert (timer.steps_s, timer.totals_s["model"], timer.totals_s["control"]) == (14.0, 6.0, 0.0)
