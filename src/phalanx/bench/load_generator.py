"""Generates load on an OpenAI-compatible server with streaming clients, and measures latencies.

Requests are due at given times, or as soon as one of a number of clients is free: in a closed loop each client sends
its next request when its last one has ended, so the load follows the server's speed; but no client sends a second one
before all have sent a first. Percentiles interpolate linearly between order statistics (numpy's default, Hyndman and
Fan's type 7).
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import httpx
from msgspec import Struct

from phalanx.bench.http_client import RequestFailed, TimedExchange, stream_chat

PERCENTILES = (50, 95, 99)

Outcome = TimedExchange | RequestFailed


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
    median: float
    std: float  # of the sample as a whole, as numpy's
    percentiles: dict[float, float]

    def json(self, name: str) -> dict[str, float]:
        """`vllm bench serve`'s keys: mean_ttft_ms, median_ttft_ms, std_ttft_ms, p95_ttft_ms, p99.9_ttft_ms, ..."""
        keys = {f"p{q:g}_{name}_ms": value for q, value in self.percentiles.items()}
        return {f"mean_{name}_ms": self.mean, f"median_{name}_ms": self.median, f"std_{name}_ms": self.std, **keys}


async def offer(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, Any]],
    due: Sequence[float],
    max_concurrency: int | None,
    on_end: Callable[[int, Outcome], None],
    *,
    path: str = "/chat/completions",
) -> None:
    """Send every body once. A failed request is an outcome, and is not raised.

    Cancelled, it closes the streams under way, which have no outcome then.

    Args:
        due: seconds from now at which each is sent, or later.
        max_concurrency: requests under way; None is no limit.
        on_end: called with a request's number and its outcome.
    """
    free_clients = asyncio.Semaphore(max_concurrency or max(1, len(bodies)))  # in the order in which requests came
    begun = time.monotonic()

    async def send(number: int, body: Mapping[str, Any], due_s: float) -> None:
        await asyncio.sleep(begun + due_s - time.monotonic())
        async with free_clients:
            try:
                outcome: Outcome = await stream_chat(client, body, path=path)
            except RequestFailed as error:
                outcome = error
        on_end(number, outcome)

    async with asyncio.TaskGroup() as group:
        for number, (body, due_s) in enumerate(zip(bodies, due, strict=True)):
            group.create_task(send(number, body, due_s))


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
    outcomes: dict[int, Outcome] = {}
    due = [ramp_s * min(number, concurrency - 1) for number in range(len(bodies))]
    start = time.monotonic()
    await offer(client, bodies, due, concurrency, outcomes.__setitem__, path=path)
    return offered(outcomes, time.monotonic() - start)


def offered(outcomes: Mapping[int, Outcome], wall_s: float) -> OfferedLoad:
    """Collects the outcomes of a load's requests."""
    ordered = [outcomes[number] for number in sorted(outcomes)]
    exchanges = tuple(outcome for outcome in ordered if isinstance(outcome, TimedExchange))
    failures = tuple(str(outcome) for outcome in ordered if isinstance(outcome, RequestFailed))
    return OfferedLoad(exchanges, failures, wall_s)


def arrival_times(n: int, per_s: float, burstiness: float, seed: int) -> list[float]:
    """When n requests are due, in seconds, as in `vllm bench serve`.

    Intervals follow a gamma distribution of this shape: 1 is a Poisson process, below 1 is bursty, infinity is
    evenly spaced. All are scaled so that the last request is due after n / per_s.

    Args:
        per_s: mean rate; infinity: all are due at once.
    """
    if math.isinf(per_s):
        return [0.0] * n
    draw = random.Random(seed)
    regular = math.isinf(burstiness)
    gaps = [1.0 if regular else draw.gammavariate(burstiness, 1 / burstiness) for _ in range(n)]
    times = list(accumulate(gaps))
    scale = n / per_s / times[-1] if times[-1] > 0 else 0.0  # very bursty: all gaps may be too small to tell from 0
    return [scale * at for at in times]


def ttft(load: OfferedLoad) -> Distribution:
    """From sending a request to its first text."""
    return distribution([e.ttft_s for e in load.exchanges if e.ttft_s is not None])


def distribution(seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> Distribution:
    """The distribution of a sample in seconds; all values are nan for an empty one."""
    values = sorted(1000.0 * value for value in seconds)
    return Distribution(
        n=len(values),
        mean=statistics.fmean(values) if values else math.nan,
        median=percentile(values, 50),
        std=statistics.pstdev(values) if values else math.nan,
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
