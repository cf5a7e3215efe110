"""Predicted speed: sums of measured parts, and what they must never do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.planning import group, host, shape, timings

from phalanx.planning.candidates import Candidate, fit_memory
from phalanx.planning.predictor import CONTEXT, decode_point, predict
from phalanx.planning.timings import GroupTimings, Learned, ServingCost

seconds = st.floats(1e-6, 1e-2)


def speed(candidate: Candidate, per_rank, link: GroupTimings | None = None, model=None):
    model = model or shape()
    fit = fit_memory(model, candidate, {name: host(name) for name in candidate.hosts})
    return predict(model, fit, dict.fromkeys(candidate.hosts, per_rank), link)


ONE = Candidate(hosts=("a",))
TP = Candidate(width=2, hosts=("a", "b"))
PP = Candidate(stages=2, hosts=("a", "b"))
REPLICAS = Candidate(replicas=2, hosts=("a", "b"))


def test_a_token_takes_its_layers_and_everything_else():
    found = speed(ONE, timings(layer_s=0.001, ends_s=0.002))
    assert 1 / found.tokens_per_s[1] == pytest.approx(8 * 0.001 + 0.002 + 8 * CONTEXT * 1e-9)
    assert sum(found.parts_s.values()) == pytest.approx(1 / found.tokens_per_s[1])


def test_a_prompt_takes_its_tokens_and_those_before_each():
    found = speed(ONE, replace(timings(token_s=1e-5), token_context_s=0.0))
    token = 1 / found.tokens_per_s[1]
    assert found.ttft_s[512] == pytest.approx(8 * 511 * 1e-5 + token)
    assert found.ttft_s[4000] == pytest.approx(8 * 3999 * 1e-5 + token)


def test_a_chunk_does_not_compute_what_it_does_not_need_of_the_last_layer():
    own = replace(timings(token_s=1e-5), token_context_s=0.0)
    less = replace(own, chunk_layers=-0.5)
    one, skipping = speed(ONE, own), speed(ONE, less)
    assert one.ttft_s[512] - skipping.ttft_s[512] == pytest.approx(0.5 * 511 * 1e-5)
    stages = [speed(PP, each, group((1, 1), step_s=0.0)).ttft_s[512] for each in (own, less)]
    assert stages[0] - stages[1] == pytest.approx(0.5 * 128 * 1e-5)  # the first stage is the slower one for the rest


def test_a_prompt_longer_than_the_context_has_no_time():
    model = replace(shape(), max_len=4096)
    assert speed(ONE, timings(), model=model).ttft_s.keys() == {512, 4000}


def test_stages_take_as_long_for_a_token_as_one_rank_and_half_for_a_prompt():
    own = timings(token_s=1e-4)
    link = group((1, 1), step_s=0.0)
    one, two = speed(ONE, own), speed(PP, own, link)
    assert two.tokens_per_s[1] == pytest.approx(one.tokens_per_s[1], rel=0.01)
    assert 0.45 * one.ttft_s[4000] < two.ttft_s[4000] < 0.65 * one.ttft_s[4000]


def test_chunks_are_those_of_the_scheduler():
    own = replace(timings(token_s=1e-5), token_context_s=0.0)
    two = speed(PP, own, group((1, 1), step_s=0.0))
    stage_s = 4 * 1e-5  # of a token in one of the two stages
    assert two.ttft_s[4000] == pytest.approx((3999 + 128) * stage_s + 1 / two.tokens_per_s[1])
    gpu = speed(PP, own, group((1, 1), step_s=0.0), replace(shape(), on_gpu=True))
    assert gpu.ttft_s[4000] == pytest.approx((3999 + 2048) * stage_s + 1 / two.tokens_per_s[1])
    slow = replace(timings(token_s=1e-2), token_context_s=0.0)  # a second is the time of 25 tokens of the last stage
    found = speed(PP, slow, group((1, 1), step_s=0.0))
    assert found.ttft_s[512] == pytest.approx((511 + 25) * 4 * 1e-2 + 1 / found.tokens_per_s[1])


def test_small_sums_over_a_slow_link_make_two_machines_slower():
    link = group(step_s=0.001, sum_s=0.001)
    one, two = speed(ONE, timings()), speed(TP, timings(2), link)
    assert two.tokens_per_s[1] < one.tokens_per_s[1]
    assert two.limit == "link latency"
    fast = speed(TP, timings(2), group(step_s=0.0, sum_s=1e-6))
    assert fast.tokens_per_s[1] > one.tokens_per_s[1]


def test_large_sums_cost_bandwidth():
    slow = group(sum_s=1e-6)
    wide = replace(shape(), width=1 << 20)
    assert speed(TP, timings(2, layer_s=1e-6, ends_s=1e-6), slow, wide).limit in ("link bandwidth", "link latency")
    assert speed(TP, timings(2), slow, wide).parts_s["link bandwidth"] > 0


def test_replicas_answer_twice_as_many_streams_and_one_as_fast():
    one, two = speed(ONE, timings()), speed(REPLICAS, timings())
    assert two.tokens_per_s[1] == pytest.approx(one.tokens_per_s[1])
    assert two.tokens_per_s[16] > 1.2 * one.tokens_per_s[16]
    assert two.ttft_s == one.ttft_s


def test_serving_costs_every_step_every_row_and_every_request():
    cost = ServingCost(step_s=0.01, row_s=0.001, first_s=0.5)
    fit = fit_memory(shape(), ONE, {"a": host("a")})
    plain, served = (predict(shape(), fit, {"a": timings()}, None, serving=one) for one in (None, cost))
    for rows in (1, 4, 16):
        assert rows / served.tokens_per_s[rows] == pytest.approx(rows / plain.tokens_per_s[rows] + 0.01 + rows * 0.001)
    assert served.ttft_s[512] == pytest.approx(plain.ttft_s[512] + 0.5)
    assert served.parts_s["Python"] == pytest.approx(plain.parts_s["Python"] + 0.011)


def test_a_group_costs_each_of_its_rows():
    few, many = (speed(TP, timings(2), replace(group(), row_s=row_s)) for row_s in (0.0, 0.001))
    assert 16 / many.tokens_per_s[16] == pytest.approx(16 / few.tokens_per_s[16] + 0.016)


def test_what_earlier_starts_measured_counts():
    fit = fit_memory(shape(), ONE, {"a": host("a")})
    plain = predict(shape(), fit, {"a": timings()}, None)
    learned = predict(shape(), fit, {"a": timings()}, None, learned=Learned(rate=0.8, ttft=1.5))
    assert learned.tokens_per_s[4] == pytest.approx(0.8 * plain.tokens_per_s[4])
    assert learned.ttft_s[512] == pytest.approx(1.5 * plain.ttft_s[512])
    assert learned.learned == Learned(rate=0.8, ttft=1.5)


def test_what_limits_a_token():
    assert speed(ONE, timings(per_row=0.01)).limit == "memory reads"
    assert speed(ONE, timings(per_row=1.0)).limit == "arithmetic"
    tiny = shape(ends=1 << 10)
    assert speed(ONE, timings(layer_s=1e-5, ends_s=0.01), model=tiny).limit == "Python"


def test_an_error_is_wider_for_groups_and_widest_for_links_alone():
    errors = [
        speed(ONE, timings()).error,
        speed(TP, timings(2), group()).error,
        speed(TP, timings(2), replace(group(), measured=False)).error,
    ]
    assert errors == sorted(errors) and len(set(errors)) == 3
    assert speed(ONE, replace(timings(), spread=0.5)).error > 0.5


def test_the_slowest_host_counts():
    model = shape()
    fit = fit_memory(model, TP, {name: host(name) for name in "ab"})
    slow, fast = timings(2, layer_s=0.01), timings(2)
    mixed = predict(model, fit, {"a": fast, "b": slow}, group())
    assert mixed.tokens_per_s == predict(model, fit, {"a": slow, "b": slow}, group()).tokens_per_s


@given(seconds, seconds, st.floats(0.0, 2.0), st.integers(1, 64), st.integers(1, 64))
def test_more_rows_never_make_a_step_shorter(layer: float, ends: float, per_row: float, a: int, b: int):
    own = timings(layer_s=layer, ends_s=ends, per_row=per_row)
    few, many = sorted((a, b))
    for less, more in zip(decode_point(own, few), decode_point(own, many), strict=True):
        assert less <= more * (1 + 1e-9)


@given(seconds, seconds, seconds, st.floats(0.0, 0.01), st.floats(0.0, 0.01))
def test_slower_parts_make_no_plan_faster(layer: float, ends: float, token: float, step: float, sums: float):
    for candidate, degree, link in ((ONE, 1, None), (TP, 2, group(step_s=step, sum_s=sums)), (PP, 1, group((1, 1)))):
        base = speed(candidate, timings(degree, layer_s=layer, ends_s=ends, token_s=token), link)
        slower = speed(candidate, timings(degree, layer_s=2 * layer, ends_s=ends, token_s=2 * token), link)
        assert all(slower.tokens_per_s[n] <= base.tokens_per_s[n] for n in base.tokens_per_s)
        assert all(slower.ttft_s[n] >= base.ttft_s[n] for n in base.ttft_s)
        assert sorted(base.ttft_s.values()) == list(base.ttft_s.values())
