"""How far drafts were right, and what that promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.acceptance import DOUBT, UNKNOWN, Acceptance
from phalanx.spec.drafters import EVEN, GRADES, Draft, grade
from phalanx.spec.judging import WORTH, Judging

JUDGED = st.lists(st.tuples(st.integers(0, GRADES - 1), st.booleans(), st.booleans()))


def test_grades_rise_with_the_odds():
    assert grade(1.0) == EVEN
    assert grade(2.0) == EVEN + 2
    assert grade(0.5) == EVEN - 2
    assert grade(0.0) == 0
    assert grade(1e12) == GRADES - 1


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_grades_are_in_order(one, other):
    assert 0 <= grade(min(one, other)) <= grade(max(one, other)) < GRADES


class TestAcceptance:
    """Rates by grade."""

    def test_nothing_known(self):
        assert [*Acceptance(0.9).rates] == [UNKNOWN] * GRADES
        pool = Acceptance(0.9)
        pool.judge(3, True)
        assert [*Acceptance(0.9, pool).rates] == pytest.approx(pool.rates)

    def test_rates_approach_what_is_seen(self):
        seen = Acceptance(0.9)
        for _ in range(50):
            seen.begin()
            seen.judge(0, True)
            seen.judge(1, False)
        assert seen.rates[0] > 0.9
        assert seen.rates[1] < 0.1

    def test_a_higher_grade_is_as_good_as_the_one_below_until_tried(self):
        seen = Acceptance(0.9)
        seen.judge(1, True)
        lowest, first, *above = seen.rates
        assert lowest == UNKNOWN
        assert first == pytest.approx((1 + DOUBT * UNKNOWN) / (1 + DOUBT))
        assert set(above) == {first}

    def test_what_is_not_tried_any_more_is_forgotten(self):
        seen = Acceptance(0.9)
        seen.judge(0, True)
        seen.judge(1, False)
        low = seen.rates[1]
        for _ in range(50):
            seen.begin()
            seen.judge(0, True)
        assert low < 0.6 < seen.rates[1]

    @given(JUDGED, JUDGED, st.floats(0.5, 1.0))
    def test_rates_are_probabilities(self, pool_judged, row_judged, fades):
        pool = Acceptance(fades)
        row = Acceptance(fades, pool)
        for judged, seen in ((pool_judged, pool), (row_judged, row)):
            for of_grade, right, new in judged:
                if new:
                    seen.begin()
                seen.judge(of_grade, right)
        assert all(0.0 <= rate <= 1.0 for rate in [*pool.rates, *row.rates])


class TestJudging:
    """Of several sequences."""

    def test_good_grades_promise_more_than_bad_ones(self):
        """One drafter, one text: what it is sure of is right, what it guesses is not."""
        judging = Judging()
        for turn in range(20):
            sure = turn % 2
            judging.open(0, Draft([7], [12 if sure else 4]))
            assert judging.judge(0, [7 if sure else 8])
        chances = judging.chances({0: [12, 12, 4, 12]})[0]
        assert chances[1] > 0.8 and len(chances) == 2  # the third is not worth a try
        assert judging.chances({0: [4]})[0] == []

    def test_what_one_text_teaches_is_assumed_of_another(self):
        judging = Judging()
        for _ in range(30):
            judging.open(0, Draft([7], [9]))
            judging.judge(0, [7])
        (assumed,) = judging.chances({1: [9]})[1]
        assert assumed > 0.9
        for _ in range(8):
            judging.open(1, Draft([7], [9]))
            judging.judge(1, [8])
        assert judging.chances({1: [9]})[1][:1] < [0.3]
        judging.end(1)
        assert judging.chances({1: [9]})[1][0] > 0.5
        judging.forget_drafter()
        assert judging.chances({1: [9]})[1] == [UNKNOWN]

    def test_an_open_draft_tells_what_to_expect(self):
        judging = Judging()
        for _ in range(30):
            judging.open(0, Draft([1, 2, 3], [10, 11, 12]))
            judging.judge(0, [1, 2, 3])
        assert not judging.is_open(0) and judging.ahead([0]) == {}
        judging.open(0, Draft([1, 2, 3, 4], [10, 11, 12, 12]))
        likely, then = judging.ahead([0, 1])[0]
        assert 1.0 > likely > then[0] > then[1] > then[2] > 0.7
        assert len(then) == 3
        assert judging.judge(0, [1]) and judging.judge(0, [2, 3])
        assert len(judging.ahead([0])[0][1]) == 0
        assert judging.is_open(0)
        judging.judge(0, [5])
        assert not judging.is_open(0) and not judging.judge(0, [6])

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.lists(st.integers(0, 3), max_size=20), st.data())
    def test_pieces_are_judged_as_a_whole(self, drafted, said, data):
        """However the tokens come, the same is learned."""
        grades = data.draw(st.lists(st.integers(0, 15), min_size=len(drafted), max_size=len(drafted)))
        cuts = data.draw(st.lists(st.integers(0, len(said)), max_size=4).map(sorted))
        whole, pieces = Judging(), Judging()
        for judging in (whole, pieces):
            judging.open(0, Draft(drafted, grades))
        whole.judge(0, said)
        for start, stop in zip([0, *cuts], [*cuts, len(said)], strict=True):
            pieces.judge(0, said[start:stop])
        assert whole.chances({0: grades}) == pieces.chances({0: grades})
        assert whole.ahead([0]) == pieces.ahead([0])

    def test_improbable_positions_are_not_counted(self):
        assert Judging().chances({0: [0] * 16})[0] == pytest.approx([0.5, 0.25, 0.125])
        assert 0.0625 < WORTH < 0.125
