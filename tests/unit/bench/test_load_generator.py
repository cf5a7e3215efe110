"""Percentiles against the standard library, and the closed loop against a real HTTP server."""

from __future__ import annotations

import asyncio
import math
import statistics
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.web import chunk, events, usage, web_server

from phalanx.bench import load_generator
from phalanx.bench.http_client import TimedExchange, open_client
from phalanx.bench.load_generator import OfferedLoad, closed_loop, distribution, percentile, ttft

SAMPLES = st.lists(st.floats(0, 1e6), min_size=2, max_size=60).map(sorted)


@given(SAMPLES)
def test_percentiles_are_the_standard_librarys(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for q in (1, 50, 95, 99):
        assert percentile(values, q) == pytest.approx(cuts[q - 1])


@given(SAMPLES)
def test_percentiles_end_at_the_extremes(values: list[float]) -> None:
    assert (percentile(values, 0), percentile(values, 100)) == (values[0], values[-1])


def test_percentiles_of_little() -> None:
    assert percentile([7.0], 95) == 7.0
    assert math.isnan(percentile([], 50))
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_distribution_is_in_milliseconds() -> None:
    result = distribution([0.003, 0.001, 0.002])
    assert (result.n, result.mean, result.std) == (3, *map(pytest.approx, (2.0, (2 / 3) ** 0.5)))
    assert result.median == result.percentiles[50] == pytest.approx(2.0)
    names = ("mean", "median", "std", "p50", "p95", "p99")
    assert set(result.json("ttft")) == {f"{name}_ttft_ms" for name in names}


def exchange(sent: float, *arrivals: float) -> TimedExchange:
    return TimedExchange(
        text="x" * len(arrivals),
        finish_reason="length",
        prompt_tokens=1,
        completion_tokens=len(arrivals),
        sent=sent,
        arrivals=arrivals,
        ended=arrivals[-1],
    )


def test_figures_of_a_load() -> None:
    load = OfferedLoad((exchange(0.0, 1.0, 2.0, 3.0), exchange(0.5, 2.0, 4.0)), (), 5.0)
    assert load.output_tokens == 5
    assert load.tokens_per_s == 1.0
    assert load.decode_tokens_per_s == pytest.approx(1 / 1.0)  # both decode in (2.0, 3.0]: one token of the first
    assert ttft(load).mean == pytest.approx(1250)


def test_an_empty_load_divides_by_nothing() -> None:
    load = OfferedLoad((), (), 0.0)
    assert (load.tokens_per_s, load.decode_tokens_per_s, load.output_tokens) == (0.0, 0.0, 0)


def test_the_loop_keeps_so_many_in_flight_and_no_more() -> None:
    together = threading.Barrier(3, timeout=120)  # a round only goes on when three requests are in flight
    lock = threading.Lock()
    now, most = 0, 0

    def answer(path: str, body: Any) -> tuple[int, str]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait()
        with lock:
            now -= 1
        return 200, events(chunk("a"), chunk("b", "stop"), usage(1, 2))

    async def run(url: str) -> OfferedLoad:
        async with open_client(url) as client:
            return await closed_loop(client, [{"prompt": str(i)} for i in range(9)], 3, path="/completions")

    with web_server(answer) as url:
        load = asyncio.run(run(url))
    assert (len(load.exchanges), load.failures, most) == (9, (), 3)
    assert load.output_tokens == 18


def test_failures_are_counted_and_the_rest_goes_on() -> None:
    def answer(path: str, body: Any) -> tuple[int, str]:
        if body["prompt"] == "1":
            return 429, '{"error": {"message": "full"}}'
        return 200, events(chunk("a", "stop"), usage(1, 1))

    async def run(url: str) -> OfferedLoad:
        async with open_client(url) as client:
            return await closed_loop(client, [{"prompt": str(i)} for i in range(4)], 2)

    with web_server(answer) as url:
        load = asyncio.run(run(url))
    assert len(load.exchanges) == 3
    assert len(load.failures) == 1
    assert "full" in load.failures[0]


def test_a_request_waits_until_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sent: list[Any] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def answered(client: Any, body: Any, **_: Any) -> TimedExchange:
        sent.append(body["n"])
        return exchange(0.0, 1.0)

    monkeypatch.setattr(load_generator, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(load_generator, "stream_chat", answered)
    outcomes: dict[int, Any] = {}
    client = httpx.AsyncClient(timeout=60)
    asyncio.run(load_generator.offer(client, [{"n": 0}, {"n": 1}], [0.0, 2.5], None, outcomes.__setitem__))
    assert waits == [0.0, 2.5] and sent == [0, 1]
    assert sorted(outcomes) == [0, 1]
