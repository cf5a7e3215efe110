"""What a step costs, and how far drafts were right, as the control sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.cost import FRESH, HOLDS, PER_TOKEN, SETTLED, UNSURE, CostCurve, tokens_per_row

ENOUGH = 3


def curve(*measured: tuple[int, int, float], base: float = 2.0, rows: int = 1) -> CostCurve:
    """After enough non-speculative steps and these others: (rows, width, seconds)."""
    known = CostCurve()
    for _ in range(ENOUGH):
        known.observe(rows, 1, base)
    for there, wide, seconds in measured:
        known.observe(there, wide, seconds)
    return known


class TestBase:
    """The step that all others are compared with."""

    def test_it_takes_some_steps_to_know_it(self):
        known = CostCurve()
        for _ in range(ENOUGH - 1):
            known.observe(4, 1, 2.0)
        assert known.base(4) is None
        known.observe(4, 1, 2.0)
        assert known.base(4) == 2.0
        assert known.base(5) is None

    def test_one_disturbed_step_means_nothing(self):
        assert curve((1, 1, 50.0)).base(1) == 2.0

    def test_it_does_not_hold_for_ever(self):
        known = curve(*[(1, 2, 3.0)] * FRESH)
        assert known.base(1) == 2.0
        known.observe(1, 2, 3.0)
        assert known.base(1) is None
        known.observe(1, 1, 2.0)
        assert known.base(1) == 2.0

    def test_other_sequences_have_other_contexts(self):
        known = curve(*[(1, 2, 3.0)] * (SETTLED + 1))
        known.begin(0.5)
        assert known.base(1) == 2.0
        known.begin(0.5)
        assert known.base(1) is None
        known.observe(1, 1, 2.1)
        assert known.base(1) == 2.0
        known.begin(0.5)
        assert known.base(1) == 2.0

    def test_short_texts_do_not_have_them_measured_each_time(self):
        known = curve()
        for _ in range(SETTLED):
            known.begin(1.0)
            known.observe(1, 2, 3.0)
            assert known.base(1) == 2.0
        known.observe(1, 2, 3.0)
        assert known.base(1) is None

    @pytest.mark.parametrize("seconds", [1.0, 3.0])
    @pytest.mark.parametrize("change", [lambda known: known.begin(1.0), lambda known: known.observe(1, 2, 3.0)])
    def test_what_takes_another_time_after_a_change_or_a_pause_begins_anew(self, change, seconds):
        known = curve(*[(1, 2, 3.0)] * FRESH)
        change(known)
        for _ in range(ENOUGH):
            assert known.base(1) is None
            known.observe(1, 1, seconds)
        assert known.base(1) == seconds


class TestRatios:
    """Wider steps, in non-speculative ones."""

    def test_before_anything_is_measured_a_token_costs_little(self):
        wanted = [1.0, 1 + PER_TOKEN, 1 + 2 * PER_TOKEN, 1 + 3 * PER_TOKEN]
        assert curve().ratios(1, range(1, 5)) == pytest.approx(wanted)

    def test_between_and_beyond_what_was_measured(self):
        known = curve((1, 3, 4.0), (1, 5, 8.0))
        assert known.ratios(1, range(1, 8)) == pytest.approx([1, 1.5, 2, 3, 4, 4.75, 5.5])

    def test_half_widths(self):
        known = curve((16, 2.5, 5.0), rows=16)
        assert known.ratios(16, [1, 1.5, 2, 2.5, 3]) == pytest.approx([1, 1.5, 2, 2.5, 3])
        assert [tokens_per_row(16, tokens) for tokens in (16, 17, 24, 25, 64)] == [1.0, 1.5, 1.5, 2.0, 4.0]
        assert [tokens_per_row(1, tokens) for tokens in (1, 2, 9)] == [1.0, 2.0, 9.0]

    def test_a_stair_that_may_be_hoped_for(self):
        known = curve((1, 3, 4.0), (1, 5, 8.0))
        step = PER_TOKEN
        wanted = [1, 1.5, 2, 3, 4, 4 + step, 4 + 2 * step]
        assert known.ratios(1, range(1, 8), optimistic=True) == pytest.approx(wanted)

    def test_a_wider_step_that_cost_less(self):
        assert curve((1, 2, 6.0), (1, 4, 4.0)).ratios(1, range(1, 5)) == pytest.approx([1.0, 3.0, 2.5, 2.0])

    def test_never_less_than_a_base_step(self):
        assert curve((1, 2, 1.0)).ratios(1, range(1, 3)) == [1.0, 1.0]

    def test_a_disturbed_first_try_is_repeated_and_forgotten(self):
        known = curve((1, 2, 60.0))
        assert known.ratios(1, [2])[0] == 30.0
        known.observe(1, 2, 3.0)
        assert known.ratios(1, [2])[0] == 1.5  # of two the cheaper
        known.observe(1, 2, 3.2)
        assert known.ratios(1, [2])[0] == 1.6  # of three the median

    def test_fewer_rows_stand_in_for_more_but_not_more_for_fewer(self):
        known = curve((4, 2, 3.0), rows=4)
        assert known.ratios(8, [2])[0] == 1.5
        assert known.ratios(2, [2])[0] == pytest.approx(1 + PER_TOKEN)

    def test_they_are_measured_again_after_a_while(self):
        known = curve((1, 2, 6.0), (1, 2, 6.0), *[(1, 1, 2.0)] * HOLDS)
        assert known.ratios(1, [2])[0] == 3.0
        known.observe(1, 1, 2.0)
        assert known.ratios(1, [2])[0] == pytest.approx(1 + PER_TOKEN)
        known.observe(1, 2, 4.0)
        assert known.ratios(1, [2])[0] == 2.0

    def test_a_single_one_is_measured_again_soon_and_the_smaller_counts(self):
        known = curve((1, 2, 60.0), *[(1, 1, 2.0)] * UNSURE)
        assert known.ratios(1, [2])[0] == 30.0
        known.observe(1, 1, 2.0)
        assert known.ratios(1, [2])[0] == pytest.approx(1 + PER_TOKEN)
        known.observe(1, 2, 3.0)
        assert known.ratios(1, [2])[0] == 1.5

    def test_without_a_base_step_there_is_nothing_to_compare_with(self):
        known = CostCurve()
        known.observe(1, 2, 3.0)
        assert known.reach(1) == 2
        assert known.ratios(1, [2])[0] == pytest.approx(1 + PER_TOKEN)

    def test_first_tries_are_small_and_double(self):
        assert curve().reach(1) == 2
        assert curve((1, 2, 3.0)).reach(1) == 4
        assert curve((1, 3, 3.0)).reach(1) == 6
        assert curve((1, 5, 3.0)).reach(1) == 10

    @given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.floats(0.01, 10)), max_size=60))
    def test_there_is_always_an_answer(self, measured):
        known = curve(*measured)
        for rows in range(1, 5):
            ratios = known.ratios(rows, range(1, 10))
            assert len(ratios) == 9
            assert ratios[0] == 1.0
            assert all(ratio >= 1.0 for ratio in ratios)
