"""Accounts: nothing is made or lost in them, and what they may owe is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.purses import ASKING, FORWARDS, INHERITED, SAVINGS, SHARE, WINNINGS, Purses

calls = st.one_of(
    st.tuples(st.just("earn"), st.floats(0, 4), st.floats(-2, 8)),
    st.tuples(st.just("pay_asking"), st.floats(0, 1)),
    st.tuples(st.just("save"), st.floats(-4, 4)),
    st.tuples(st.just("leave"), st.floats(0, 1)),
)


def total(purses: Purses) -> float:
    return purses.forwards + purses.asking + purses.savings


@given(st.lists(calls, max_size=60), st.floats(0, 0.1))
def test_they_stay_within_limits_and_give_no_more_than_was_put_in(made, share):
    purses = Purses(share)
    for name, *amounts in made:
        before = total(purses)
        owed = purses.asking
        getattr(purses, name)(*amounts)
        gained = total(purses) - before
        match name:
            case "earn":
                assert gained <= share * amounts[0] + amounts[1] + 1e-9
            case "pay_asking":
                assert -amounts[0] - 1e-9 <= gained <= 0
                assert purses.asking >= -ASKING or purses.asking == owed
            case "leave":
                assert gained <= 1e-9
        assert -ASKING <= purses.asking <= ASKING
        assert purses.forwards <= WINNINGS and purses.savings <= SAVINGS


def test_what_was_won_is_left_to_the_next_text_and_what_was_lost_is_made_good():
    purses = Purses()
    purses.earn(0.0, gained=4.0)
    won, before = purses.forwards - INHERITED, purses.savings
    purses.leave(1.0)
    assert purses.forwards == INHERITED and purses.savings == pytest.approx(before + won)
    purses.earn(0.0, gained=-INHERITED)
    purses.leave(1.0)
    assert purses.forwards == INHERITED and purses.savings == pytest.approx(before + won - INHERITED)


def test_without_savings_nothing_is_made_good():
    purses = Purses()
    purses.save(-purses.savings)
    purses.earn(0.0, gained=-purses.forwards)
    purses.leave(1.0)
    assert purses.forwards == purses.savings == 0


@given(st.floats(0, 2 * ASKING))
def test_after_so_many_steps_there_is_something_for_asking(price):
    purses = Purses()
    purses.pay_asking(price)
    steps = purses.to_ask_again(10**6)
    purses.earn(float(steps))
    assert purses.may_ask and 1 <= steps <= 2 + ASKING / (SHARE / 2)
    assert Purses(0.0).to_ask_again(64) == 64


def test_asking_is_paid_from_winnings_beyond_its_own_purse():
    purses = Purses()
    purses.pay_asking(ASKING)
    assert not purses.may_ask
    purses.earn(0.0, gained=WINNINGS)
    assert purses.may_ask
    before = purses.forwards
    purses.pay_asking(0.5)
    assert purses.forwards == pytest.approx(before - 0.5) and purses.asking == 0


def test_what_is_owed_beyond_the_purse_for_asking_the_other_one_pays():
    """As much again at most: a disturbed step may seem to have cost anything."""
    purses = Purses()
    purses.pay_asking(ASKING)
    purses.pay_asking(ASKING + 0.2)
    assert (purses.asking, purses.forwards) == (-ASKING, pytest.approx(FORWARDS - 0.2))
    purses.pay_asking(50.0)
    assert (purses.asking, purses.forwards) == (-ASKING, pytest.approx(FORWARDS - 0.2 - ASKING))


def asked(purses: Purses, steps: int, price: float) -> int:
    """Of so many plain steps, those in which the drafter is asked."""
    count = 0
    for _ in range(steps):
        purses.earn(1.0)
        if purses.may_ask:
            purses.pay_asking(price)
            count += 1
    return count


def test_a_drafter_that_never_helped_is_asked_half_as_often():
    """Half of the share is for asking; the rest pays for it as well only while there are gains to speak of."""
    price = 4 * SHARE
    purses = Purses()
    asked(purses, 5000, price)
    assert purses.record == 0.0
    seldom = asked(purses, 2000, price)
    assert seldom == pytest.approx(2000 * SHARE / 2 / price, rel=0.02)
    purses.earn(0.0, gained=6.0)
    assert purses.may_ask
    assert asked(purses, 200, price) == 200
