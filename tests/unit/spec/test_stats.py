"""What speculation came to, counted and said (A8)."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.comparison import Comparison
from phalanx.spec.stats import SpecMeter, log_line, report

DRAFT = st.integers(1, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


def test_the_report():
    meter = SpecMeter("ngram", window=2)
    meter.count()
    meter.count([(4, 4), (2, 0)])
    meter.count([(4, 1)])
    assert report(meter.stats()) == {
        "method": "ngram",
        "steps": 3,
        "drafts": 3,
        "draft_tokens": 10,
        "accepted_tokens": 5,
        "alpha": 0.5,
        "mean_accepted": 5 / 3,
        "mean_k": 10 / 3,
        "accepted_at": [2 / 3, 1 / 3, 1 / 2, 1 / 2],
        "recent_alpha": 1 / 6,
        "window": 2,
        "speedup": None,
    }
    assert log_line(meter.stats()) == (
        "speculation (ngram): 3 steps, 3 drafts, alpha 0.500, accepted 1.67 / 3.33, at 0.67 0.33 0.50 0.50, "
        "last 2 drafts 0.167"
    )


def test_nothing_drafted_is_said():
    meter = SpecMeter("suffix")
    meter.count()
    assert log_line(meter.stats()) == "speculation (suffix): 1 steps, no draft was worth verifying"
    assert report(meter.stats())["alpha"] is None


def test_what_drafts_bring_is_said_where_it_is_compared():
    comparison = Comparison(4)
    meter = SpecMeter("random", comparison=comparison)
    assert report(meter.stats())["speedup"] is None  # nothing measured yet
    comparison.totals[True] = 300, 2.0
    assert report(meter.stats())["speedup"] is None
    comparison.totals[False] = 200, 2.5
    assert report(meter.stats())["speedup"] == 1.875
    assert log_line(meter.stats()).endswith("worth verifying, 1.875 times as fast as without")
    meter.count([(2, 1)])
    assert log_line(meter.stats()).endswith("last 1 drafts 0.500, 1.875 times as fast as without")


@given(st.lists(st.lists(DRAFT, max_size=5), max_size=30), st.integers(1, 20))
def test_figures_are_those_of_the_drafts(steps, window):
    meter = SpecMeter("ngram", window)
    for drafts in steps:
        meter.count(drafts)
    stats, drafts = meter.stats(), [draft for step in steps for draft in step]
    assert (stats.steps, stats.drafts) == (len(steps), len(drafts))
    assert stats.drafted == sum(drafted for drafted, _ in drafts)
    assert stats.accepted == sum(accepted for _, accepted in drafts)
    assert stats.recent_drafted == sum(drafted for drafted, _ in drafts[-window:])
    assert stats.recent_accepted == sum(accepted for _, accepted in drafts[-window:])
    for at, (long_enough, right) in enumerate(zip(stats.drafted_at, stats.accepted_at, strict=True)):
        assert long_enough == sum(drafted > at for drafted, _ in drafts)
        assert right == sum(accepted > at for _, accepted in drafts)
    assert json.loads(json.dumps(report(stats)))["draft_tokens"] == stats.drafted
    assert log_line(stats)
