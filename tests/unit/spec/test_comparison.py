"""Drafts and none in turns: what is counted, and for which side (A8)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.comparison import Comparison

ROWS = {3, 5}


def kinds(comparison: Comparison, n: int) -> list[bool]:
    """Of n steps of the same sequences."""
    return [comparison.begin(ROWS, 0.0) for _ in range(n)]


@given(st.integers(1, 20), st.integers(1, 10))
def test_runs_are_as_long_as_asked_and_as_many_of_one_kind_as_of_the_other(run, pairs):
    comparison = Comparison(run)
    kinds(comparison, 2 * run - 1)  # steps are counted from 1
    for _ in range(pairs):
        found = kinds(comparison, 2 * run)
        assert found == [found[0]] * run + [not found[0]] * run


def test_which_is_first_is_not_always_the_same():
    firsts = kinds(Comparison(1), 401)[1::2]
    assert 60 < sum(firsts) < 140


@given(st.integers(1, 5), st.integers(1, 40))
def test_the_next_kind_is_known_before(run, n):
    comparison = Comparison(run)
    for _ in range(n):
        expected = comparison.next_may_draft
        assert comparison.begin(ROWS, 0.0) == expected


def test_a_step_lasts_until_the_next_begins():
    comparison = Comparison(1)
    seconds = {True: 0.0, False: 0.0}
    tokens = {True: 0, False: 0}
    now = 7.0
    for step in range(20):
        kind = comparison.begin(set(ROWS), now)
        comparison.end(2 + step)
        seconds[kind] += 0.5 * step
        tokens[kind] += 2 + step
        now += 0.5 * step
    comparison.begin(ROWS, now)
    assert comparison.totals[True] == (tokens[True], pytest.approx(seconds[True]))
    assert comparison.totals[False] == (tokens[False], pytest.approx(seconds[False]))


def test_a_step_counts_for_its_own_kind():
    """One token in steps that may have drafts, three in the others, of which each is followed by one of the first."""
    comparison = Comparison(1)
    for now in range(100):
        comparison.end(1 if comparison.begin(ROWS, float(now)) else 3)
    tokens, seconds = comparison.totals[True]
    assert tokens == seconds > 40
    tokens, seconds = comparison.totals[False]
    assert tokens == 3 * seconds > 120


@pytest.mark.parametrize("others", [set(), {3}, {3, 5, 6}])
def test_what_others_took_is_not_counted(others):
    comparison = Comparison(2)
    comparison.begin(ROWS, 0.0)
    comparison.end(2)
    comparison.begin(others, 100.0)  # somebody came or went, perhaps much later
    comparison.begin(ROWS, 200.0)  # nothing was decoded in the step before
    assert comparison.totals[True] == comparison.totals[False] == (0, 0.0)


@given(st.integers(1, 5), st.integers(1, 30))
def test_a_step_that_decodes_nothing_is_of_neither_kind(run, n):
    """Requests for a single token never decode: were their steps plain, what they committed would wait for ever."""
    comparison = Comparison(run)
    kinds(comparison, n)
    expected = comparison.next_may_draft
    assert comparison.begin((), 0.0) and comparison.begin(set(), 0.0)
    assert comparison.begin(ROWS, 0.0) == expected
