"""How far drafts were right, and what that promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.acceptance import MIN_CHANCE, Acceptance, AcceptanceTracker
from phalanx.spec.drafters import BUCKETS, EVEN, Draft, bucket

OBSERVED = st.lists(st.tuples(st.integers(0, BUCKETS - 1), st.booleans(), st.booleans()))


def test_buckets_rise_with_the_odds():
    assert bucket(1.0) == EVEN
    assert bucket(2.0) == EVEN + 2
    assert bucket(0.5) == EVEN - 2
    assert bucket(0.0) == 0
    assert bucket(1e12) == BUCKETS - 1


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_buckets_are_in_order(one, other):
    assert 0 <= bucket(min(one, other)) <= bucket(max(one, other)) < BUCKETS


class TestAcceptance:
    """Rates by bucket."""

    def test_nothing_known(self):
        assert [*Acceptance(0.9).rates] == [0.5] * BUCKETS
        pool = Acceptance(0.9)
        pool.observe(3, True)
        assert [*Acceptance(0.9, pool).rates] == pytest.approx(pool.rates)

    def test_rates_approach_what_is_seen(self):
        seen = Acceptance(0.9)
        for _ in range(50):
            seen.begin()
            seen.observe(0, True)
            seen.observe(1, False)
        assert seen.rates[0] > 0.9
        assert seen.rates[1] < 0.1

    def test_a_higher_bucket_is_as_good_as_the_one_below_until_tried(self):
        seen = Acceptance(0.9)
        seen.observe(1, True)
        lowest, first, *above = seen.rates
        assert lowest == 0.5
        assert first == pytest.approx((1 + 0.5) / 2)
        assert set(above) == {first}

    def test_what_is_not_tried_any_more_is_forgotten(self):
        seen = Acceptance(0.9)
        seen.observe(0, True)
        seen.observe(1, False)
        low = seen.rates[1]
        for _ in range(50):
            seen.begin()
            seen.observe(0, True)
        assert low < 0.6 < seen.rates[1]

    @given(OBSERVED, OBSERVED, st.floats(0.5, 1.0))
    def test_rates_are_probabilities(self, pool_observed, row_observed, fades):
        pool = Acceptance(fades)
        row = Acceptance(fades, pool)
        for observed, seen in ((pool_observed, pool), (row_observed, row)):
            for of_bucket, right, new in observed:
                if new:
                    seen.begin()
                seen.observe(of_bucket, right)
        assert all(0.0 <= rate <= 1.0 for rate in [*pool.rates, *row.rates])


class TestTracker:
    """Of several sequences."""

    def test_good_buckets_promise_more_than_bad_ones(self):
        """One drafter, one text: what it is sure of is right, what it guesses is not."""
        tracker = AcceptanceTracker()
        for turn in range(20):
            sure = turn % 2
            tracker.pending[0] = Draft([7], [12 if sure else 4]), 0
            assert tracker.observe(0, [7 if sure else 8]) == sure
        chances = tracker.chances({0: [12, 12, 4, 12]})[0]
        assert chances[1] > 0.8 and len(chances) == 2  # the third is not worth a try
        assert tracker.chances({0: [4]}) == {}

    def test_what_one_text_teaches_is_assumed_of_another(self):
        tracker = AcceptanceTracker()
        for _ in range(30):
            tracker.pending[0] = Draft([7], [9]), 0
            tracker.observe(0, [7])
        (assumed,) = tracker.chances({1: [9]})[1]
        assert assumed > 0.9
        for _ in range(8):
            tracker.pending[1] = Draft([7], [9]), 0
            tracker.observe(1, [8])
        assert tracker.chances({1: [9]})[1] < [0.3]
        tracker.end(1)
        assert tracker.chances({1: [9]})[1][0] > 0.5

    def test_a_pending_draft_tells_what_to_expect(self):
        tracker = AcceptanceTracker()
        for _ in range(30):
            tracker.pending[0] = Draft([1, 2, 3], [10, 11, 12]), 0
            tracker.observe(0, [1, 2, 3])
        assert 0 not in tracker.pending and tracker.ahead([0]) == {}
        tracker.pending[0] = Draft([1, 2, 3, 4], [10, 11, 12, 12]), 0
        likely, then = tracker.ahead([0, 1])[0]
        assert 1.0 > likely > then[0] > then[1] > then[2] > 0.7
        assert len(then) == 3
        assert tracker.observe(0, [1]) and tracker.observe(0, [2, 3])
        assert len(tracker.ahead([0])[0][1]) == 0
        assert 0 in tracker.pending
        assert tracker.observe(0, [5])  # the first tokens were right
        assert 0 not in tracker.pending

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.lists(st.integers(0, 3), max_size=20), st.data())
    def test_pieces_are_observed_as_a_whole(self, drafted, said, data):
        """However the tokens come, the same is learned."""
        buckets = data.draw(st.lists(st.integers(0, 15), min_size=len(drafted), max_size=len(drafted)))
        cuts = data.draw(st.lists(st.integers(0, len(said)), max_size=4).map(sorted))
        whole, pieces = AcceptanceTracker(), AcceptanceTracker()
        for tracker in (whole, pieces):
            tracker.pending[0] = Draft(drafted, buckets), 0
        whole.observe(0, said)
        for start, stop in zip([0, *cuts], [*cuts, len(said)], strict=True):
            if 0 in pieces.pending:
                pieces.observe(0, said[start:stop])
        assert whole.chances({0: buckets}) == pieces.chances({0: buckets})
        assert whole.ahead([0]) == pieces.ahead([0])

    def test_improbable_positions_are_not_counted(self):
        assert AcceptanceTracker().chances({0: [0] * 16})[0] == pytest.approx([0.5, 0.25, 0.125])
        assert 0.0625 < MIN_CHANCE < 0.125
