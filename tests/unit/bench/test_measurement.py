"""Figures of a load against a plain computation; ratios of two servers."""

from __future__ import annotations

import asyncio
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench import measurement
from phalanx.bench.http_client import TimedExchange
from phalanx.bench.load_generator import OfferedLoad
from phalanx.bench.measurement import METRICS, NO_TEXT, figures, settings_json
from phalanx.bench.server_comparison import RATIOS, ratios
from phalanx.bench.workload import LoadConfig


@st.composite
def exchanges(draw: st.DrawFn) -> TimedExchange:
    sent = draw(st.floats(0, 100))
    gaps = draw(st.lists(st.floats(0.001, 5), min_size=1, max_size=8))
    arrivals = tuple(float(at) for at in sent + np.cumsum(gaps))
    return TimedExchange(
        text="x", finish_reason="length", prompt_tokens=draw(st.integers(1, 99)),
        completion_tokens=draw(st.integers(1, 20)), sent=sent, arrivals=arrivals,
        ended=arrivals[-1] + draw(st.floats(0, 1)),
    )  # fmt: skip


@given(st.lists(exchanges(), min_size=1, max_size=8), st.sampled_from([(99,), (50, 99.9), (0, 100)]))
def test_figures_are_those_of_numpy(found: list[TimedExchange], percentiles: tuple[float, ...]) -> None:
    of_load = figures(OfferedLoad(tuple(found), (), 7.0), percentiles=percentiles)
    samples = {
        "ttft": [one.arrivals[0] - one.sent for one in found],
        "tpot": [
            (one.ended - one.arrivals[0]) / (one.completion_tokens - 1)
            for one in found
            if one.completion_tokens and one.completion_tokens > 1
        ],
        "itl": [gap for one in found for gap in np.diff(one.arrivals)],
        "e2el": [one.ended - one.sent for one in found],
    }
    for name, sample in samples.items():
        ms = 1000 * np.array(sample)
        expected = {
            f"mean_{name}_ms": np.mean, f"median_{name}_ms": np.median, f"std_{name}_ms": np.std,
            **{f"p{q:g}_{name}_ms": lambda values, q=q: np.percentile(values, q) for q in percentiles},
        }  # fmt: skip
        for key, compute in expected.items():
            assert of_load[key] == (pytest.approx(compute(ms), abs=1e-6) if len(ms) else None)
    written, read = sum(one.completion_tokens or 0 for one in found), sum(one.prompt_tokens or 0 for one in found)
    assert (of_load["total_input_tokens"], of_load["total_output_tokens"]) == (read, written)
    assert of_load["request_throughput"] == pytest.approx(len(found) / 7)
    assert of_load["output_throughput"] == pytest.approx(written / 7)
    assert of_load["total_token_throughput"] == pytest.approx((read + written) / 7)


def test_warm_ups_are_prompts_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be too long for the server."""
    sent: list[dict] = []

    async def stream_chat(client: object, body: dict, path: str) -> None:
        sent.append(body)

    async def offer(client: object, bodies: list[dict], *args: object, path: str) -> None:
        sent.extend(bodies)

    monkeypatch.setattr(measurement, "stream_chat", stream_chat)
    monkeypatch.setattr(measurement, "offer", offer)
    load = LoadConfig(
        dataset_name="prefix_repetition", prefix_repetition_prefix_len=5, prefix_repetition_suffix_len=2,
        prefix_repetition_num_prefixes=3, prefix_repetition_output_len=4, num_prompts=3, num_warmups=2,
    )  # fmt: skip
    asyncio.run(measurement.Measurement(load, "m", lambda failed: None).run(None))  # type: ignore[arg-type]
    assert [(len(body["prompt"]), body["max_tokens"]) for body in sent] == [(7, 4)] * 5
    warm_up, _, *others = [tuple(body["prompt"][:5]) for body in sent]
    assert warm_up not in others


def silent() -> TimedExchange:
    return TimedExchange(
        text="", finish_reason="stop", prompt_tokens=3, completion_tokens=0, sent=0.0, arrivals=(), ended=1.0
    )


def test_failures_and_answers_without_text_are_counted_and_named() -> None:
    found = figures(OfferedLoad((silent(), silent(), silent()), ("full", "broken", "full"), 2.0))
    assert found["failures"] == {NO_TEXT: 3, "full": 2, "broken": 1}
    assert (found["completed"], found["failed"], found["request_throughput"]) == (0, 6, 0)
    assert {found[f"mean_{metric}_ms"] for metric in METRICS} == {None}


def test_a_load_of_which_nothing_ended_has_figures_for_json() -> None:
    found = settings_json(LoadConfig(), "m", None) | figures(OfferedLoad((), (), 0.0))
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
    assert found["request_rate"] == "inf" and found["output_throughput"] == 0


def test_only_what_was_asked_for_is_reported() -> None:
    found = figures(OfferedLoad((), (), 0.0), ["itl"], [25.0, 99.5])
    assert {name for name in found if name.endswith("_ms")} == {
        "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p25_itl_ms", "p99.5_itl_ms"
    }  # fmt: skip


# Ratios --------------------------------------------------------------------------------------------------------------


def rounds(*values: float | None) -> list[dict[str, float | None]]:
    return [dict.fromkeys(RATIOS, value) for value in values]


def test_a_ratio_is_that_of_the_medians_with_the_spread_of_the_rounds() -> None:
    found = ratios(rounds(10, 30, 20), rounds(10, 10, 40))
    assert set(found) == set(RATIOS)
    assert found["median_ttft_ms"] == {"ratio": 2.0, "min": 0.5, "max": 3.0}


@pytest.mark.parametrize("bad", [None, 0.0])
def test_a_figure_without_a_value_in_some_round_has_no_ratio(bad: float | None) -> None:
    assert ratios(rounds(1, 2), rounds(1, bad)) == {}
    assert ratios([], []) == {}
    assert math.isclose(ratios(rounds(1, 2), rounds(1, 2))["output_throughput"]["ratio"], 1.0)
