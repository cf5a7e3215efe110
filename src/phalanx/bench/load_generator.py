"""Generates load on an OpenAI-compatible server with a closed loop of streaming clients, and measures latencies.

In a closed loop, each of `concurrency` clients sends its next request when its last one has ended, so the load follows
the server's speed. Percentiles interpolate linearly between order statistics (numpy's default, Hyndman and Fan's type
7).
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from msgspec import Struct

from phalanx.bench.http_client import RequestFailed, TimedExchange, stream_chat

PERCENTILES = (50, 95, 99)


class OfferedLoad(Struct, frozen=True):
    """The result of one run of the loop, in the order of the requests."""

    exchanges: tuple[TimedExchange, ...]
    failures: tuple[str, ...]
    wall_s: float  # from sending the first request to the end of the last answer

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers, as the server counted them."""
        return sum(exchange.completion_tokens or 0 for exchange in self.exchanges)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all clients together, prefill time included."""
        return self.output_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Total rate while all streams decode: from the last stream's first token to the earliest end.

        For loads with as many requests as clients. Excludes the time in which the server prefills some streams while it
        decodes others; `tokens_per_s` includes everything. 0 if the streams never all decoded at the same time.
        """
        answered = [exchange for exchange in self.exchanges if exchange.arrivals]
        if not answered:
            return 0.0
        start = max(exchange.arrivals[0] for exchange in answered)
        end = min(exchange.arrivals[-1] for exchange in answered)
        tokens = 0.0
        for exchange in answered:
            per_arrival = (exchange.completion_tokens or len(exchange.arrivals)) / len(exchange.arrivals)
            tokens += per_arrival * sum(start < arrival <= end for arrival in exchange.arrivals)
        return tokens / (end - start) if end > start else 0.0


class Distribution(Struct, frozen=True, kw_only=True):
    """Milliseconds. `percentiles` by number, e.g. {50: .., 95: .., 99: ..}."""

    n: int
    mean: float
    std: float
    percentiles: dict[int, float]

    def json(self, name: str) -> dict[str, float]:
        """`vllm bench serve`'s keys: mean_ttft_ms, std_ttft_ms, median_ttft_ms, p95_ttft_ms, ..."""
        keys = {f"p{q}_{name}_ms": value for q, value in self.percentiles.items()}
        return {f"mean_{name}_ms": self.mean, f"std_{name}_ms": self.std, **keys}


async def closed_loop(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, Any]],
    concurrency: int,
    *,
    path: str = "/chat/completions",
    ramp_s: float = 0.0,
) -> OfferedLoad:
    """Send every body once, `concurrency` at a time. A failed request is counted, not raised.

    Args:
        ramp_s: seconds between the starts of two clients.
    """
    exchanges: dict[int, TimedExchange] = {}
    failures: list[str] = []
    remaining = iter(list(enumerate(bodies)))

    async def client_loop(delay: float) -> None:
        await asyncio.sleep(delay)
        for index, body in remaining:  # all clients share the iterator
            try:
                exchanges[index] = await stream_chat(client, body, path=path)
            except RequestFailed as error:
                failures.append(str(error))

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for i in range(min(concurrency, len(bodies))):
            group.create_task(client_loop(i * ramp_s))
    ordered = tuple(exchanges[index] for index in sorted(exchanges))
    return OfferedLoad(ordered, tuple(failures), time.monotonic() - start)


def ttft(load: OfferedLoad) -> Distribution:
    """From sending a request to its first text."""
    return distribution([e.ttft_s for e in load.exchanges if e.ttft_s is not None])


def tpot(load: OfferedLoad) -> Distribution:
    """Mean time per token after the first, one value per answer."""
    return distribution([e.tpot_s for e in load.exchanges if e.tpot_s is not None])


def distribution(seconds: Sequence[float], percentiles: Sequence[int] = PERCENTILES) -> Distribution:
    """The distribution of a sample in seconds; all values are nan for an empty one."""
    values = sorted(1000.0 * value for value in seconds)
    return Distribution(
        n=len(values),
        mean=statistics.fmean(values) if values else math.nan,
        std=statistics.stdev(values) if len(values) > 1 else 0.0,
        percentiles={q: percentile(values, q) for q in percentiles},
    )


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) of an ascending sample; nan for an empty one.

    Raises:
        ValueError: q is outside [0, 100].
    """
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q} is outside 0..100")
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * q / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
