"""When an engine starts again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ExitCode
from phalanx.supervision.restarts import FIRST_STARTS, LONGEST_PAUSE_S, SHORT_S, Restarts

CRASHES = [code for code in ExitCode if code.restart_helps]
FINAL = [code for code in ExitCode if not code.restart_helps]


@given(st.lists(st.tuples(st.none() | st.floats(0, 1e6), st.sampled_from(CRASHES)), min_size=1, max_size=40))
def test_an_engine_that_has_served_always_starts_again(ends):
    restarts = Restarts()
    assert restarts.pause_s(1e3, ExitCode.CRASH) is not None
    for served_s, code in ends:
        pause_s = restarts.pause_s(served_s, code)
        assert pause_s is not None and 0 < pause_s <= LONGEST_PAUSE_S


def test_a_pause_grows_only_after_starts_that_failed():
    restarts = Restarts()
    assert [restarts.pause_s(60.0, ExitCode.CRASH) for _ in range(50)] == [0.1] * 50
    grown = [restarts.pause_s(served_s, ExitCode.PEER_LOST) for served_s in (None, SHORT_S - 1, None, 0.0, None, None)]
    assert grown == [0.1, 0.4, 1.6, 6.4, 10.0, 10.0]
    assert restarts.pause_s(SHORT_S, ExitCode.CRASH) == 0.1


def test_first_starts_that_fail_are_counted():
    restarts = Restarts()
    tries = [restarts.pause_s(None, ExitCode.CRASH) for _ in range(FIRST_STARTS)]
    assert None not in tries[:-1] and tries[-1] is None


@pytest.mark.parametrize("code", FINAL)
def test_a_cause_that_cannot_change_ends_it(code):
    assert Restarts().pause_s(None, code) is None
    served = Restarts()
    served.pause_s(60.0, ExitCode.CRASH)
    assert (served.pause_s(None, code) is None) == (code != ExitCode.MEMORY)  # another program may give memory back
