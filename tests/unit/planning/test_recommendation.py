"""The plan that is recommended, and the sentence about the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from phalanx.planning.candidates import Candidate, Fit
from phalanx.planning.predictor import Speed
from phalanx.planning.recommendation import SAME, GroupPlan, recommend


def plan(rate: float | None, ranks: int = 1, *, many: float = 0.0, context: int = 4096, problem: str = "") -> GroupPlan:
    candidate = Candidate(width=ranks, hosts=tuple("abcdefgh"[:ranks]))
    parts = {"memory reads": 0.001, "link latency": 0.009 if ranks > 1 else 0.0, "link bandwidth": 0.0}
    speed = None
    if rate is not None:
        speed = Speed(
            ttft_s={512: 1.0}, tokens_per_s={1: rate, 4: rate, 16: many or rate}, error=0.1, limit="memory reads",
            parts_s=parts,
        )  # fmt: skip
    return GroupPlan(fit=Fit(candidate=candidate, context=context, problem=problem), speed=speed)


def chosen(plans, wish="latency"):
    found = recommend(plans, wish)
    assert found is not None
    return found


def test_a_plan_that_does_not_fit_is_never_recommended():
    assert chosen([plan(None, problem="too large"), plan(5.0, 2)]).plan.candidate.name == "tp 2"
    assert recommend([plan(None, problem="too large")], "latency") is None


def test_the_sentence_says_what_others_lose_and_to_what():
    found = chosen([plan(80.0), plan(48.0, 2)])
    assert found.plan.candidate.name == "one rank"
    assert found.why == ("80.0 tokens/s with 1 stream; tp 2 is 40 % slower; its links take 9.0 ms a token.")


def test_more_machines_for_nothing_are_not_recommended():
    assert chosen([plan(100.0), plan(104.0, 2)]).plan.candidate.size == 1
    assert "gains only 4 % with more ranks" in chosen([plan(100.0), plan(104.0, 2)]).why
    assert chosen([plan(100.0), plan(110.0, 2)]).plan.candidate.size == 2


def test_each_wish_has_its_own_plan():
    plans = [
        plan(100.0, many=200.0, context=1000),
        plan(80.0, 2, many=400.0, context=3000),
        plan(50.0, 4, context=9000),
    ]
    assert [chosen(plans, wish).plan.candidate.size for wish in ("latency", "throughput", "context")] == [1, 2, 4]


def test_without_speeds_the_smallest_plan_that_fits_is_recommended():
    plans = [plan(None, 1, problem="too large"), plan(None, 4), plan(None, 2)]
    assert chosen(plans).plan.candidate.size == 2


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.integers(1, 8)), min_size=1, max_size=8))
def test_never_more_machines_where_fewer_are_faster(found: list[tuple[float, int]]):
    plans = [plan(rate, ranks) for rate, ranks in found]
    best = chosen(plans).plan
    assert best.speed is not None
    for other in plans:
        assert other.speed is not None
        if len(other.candidate.hosts) < len(best.candidate.hosts):
            assert other.speed.tokens_per_s[1] < best.speed.tokens_per_s[1]
        assert best.speed.tokens_per_s[1] >= other.speed.tokens_per_s[1] * (1 - SAME) - 1e-9


def test_a_reason_names_the_only_plan():
    assert chosen([plan(3.0), replace(plan(9.0), fit=Fit(candidate=Candidate(hosts=("b",)), problem="no"))]).why == (
        "It is the only plan that fits: 3.0 tokens/s with 1 stream."
    )
