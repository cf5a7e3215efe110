"""The circuit breaker: its rules one by one, and any order of events against the plainest model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import run_machine

from phalanx.gateway.dispatch.breaker import Breaker, BreakerRules

RULES = BreakerRules(failures=3, successes=2, open_s=10.0, window_s=60.0)


def failed(n: int, now: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    for _ in range(n):
        breaker.fail(breaker.begin(), now)
    return breaker


def test_failures_in_a_row_open_it_and_time_lets_one_trial_pass():
    assert failed(2).allows(0.0)
    breaker = failed(3)
    assert not breaker.allows(9.9) and "another 1 s" in breaker.reason(9.4)
    assert breaker.allows(10.0)
    trial = breaker.begin()
    assert trial and not breaker.allows(10.0) and "on trial" in breaker.reason(10.0)


def test_a_success_in_between_begins_the_count_anew():
    breaker = failed(2)
    breaker.succeed(breaker.begin())
    breaker.fail(breaker.begin(), 0.0)
    breaker.fail(breaker.begin(), 0.0)
    assert breaker.allows(0.0)


def test_old_failures_do_not_count():
    breaker = failed(2, now=0.0)
    breaker.fail(breaker.begin(), 61.0)
    assert breaker.allows(61.0)


def test_trials_close_it_or_open_it_again():
    breaker = failed(3)
    breaker.succeed(_trial(breaker, 10.0))
    breaker.fail(_trial(breaker, 11.0), 11.0)
    assert not breaker.allows(20.9)
    for _ in range(2):
        breaker.succeed(_trial(breaker, 21.0))
    assert breaker.is_closed


def test_what_began_before_it_opened_decides_nothing():
    breaker = Breaker(RULES)
    old = [breaker.begin() for _ in range(3)]
    for _ in range(3):
        breaker.fail(breaker.begin(), 0.0)
    trial = _trial(breaker, 10.0)
    breaker.succeed(old[0])
    breaker.cancel(old[1])
    breaker.fail(old[2], 10.0)
    assert not breaker.allows(10.0) and not breaker.is_closed
    breaker.cancel(trial)
    assert breaker.allows(10.0)


def test_a_replica_that_begins_anew_has_failed_nothing():
    breaker = failed(3)
    breaker.reset()
    assert breaker.is_closed and breaker.allows(0.0)
    breaker.fail(breaker.begin(), 0.0)
    breaker.fail(breaker.begin(), 0.0)
    assert breaker.is_closed


def _trial(breaker: Breaker, now: float) -> bool:
    assert breaker.allows(now)
    trial = breaker.begin()
    assert trial
    return trial


class AnyOrder(RuleBasedStateMachine):
    """Requests begin, end and overlap in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(RULES)
        self.now = 0.0
        self.under_way: list[bool] = []
        self.opened_at: float | None = None

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 10.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.allows(self.now))
    @rule()
    def begin(self) -> None:
        self.under_way.append(self.breaker.begin())

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), how=st.sampled_from(["succeed", "fail", "cancel"]))
    def end(self, data: st.DataObject, how: str) -> None:
        trial = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        was_open = not self.breaker.is_closed
        if how == "fail":
            self.breaker.fail(trial, self.now)
            if not self.breaker.is_closed and (trial or not was_open):
                self.opened_at = self.now
                assert not self.breaker.allows(self.now)
        else:
            getattr(self.breaker, how)(trial)

    @invariant()
    def at_most_one_trial(self) -> None:
        if not self.breaker.is_closed:
            assert sum(self.under_way) <= 1

    @invariant()
    def open_as_long_as_it_should(self) -> None:
        assert self.breaker.allows(self.now) == (self.breaker.reason(self.now) == "")
        if not self.breaker.is_closed:
            assert self.opened_at is not None
            waited = self.now - self.opened_at >= RULES.open_s
            assert self.breaker.allows(self.now) == (waited and not any(self.under_way))


@pytest.mark.grows
def test_any_order_of_requests():
    run_machine(AnyOrder, usual=60, soak=2000)
