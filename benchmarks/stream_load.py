"""Streams requests through whatever stands at an address, and measures when bytes come: as many at once, or at a rate.

Every answer is checked to be whole. Does not know what it measures.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from msgspec import Struct

from phalanx.bench.load_generator import percentile

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]"


class Sample(Struct):
    """One request. Milliseconds since it was to begin."""

    first: float
    whole: float


class Stream:
    """Sends one kind of request over a pool of connections."""

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str, key: str) -> None:
        self.url = url
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"}
        self._body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": True}

    async def once(self, begun: float | None = None) -> Sample:
        """One request.

        Args:
            begun: when it was to begin; None is now. perf_counter's seconds.

        Raises:
            RuntimeError: the answer is not whole.
        """
        begun = time.perf_counter() if begun is None else begun
        async with self._session.post(self.url + CHAT, json=self._body, headers=self._headers) as response:
            first = await response.content.readany()
            first_at = time.perf_counter()
            text = first + await response.content.read()
        if response.status != 200 or DONE not in text[-20:]:
            raise RuntimeError(f"{self.url}: a stream broke off: {response.status} {text[-200:]!r}")
        return Sample((first_at - begun) * 1e3, (time.perf_counter() - begun) * 1e3)


@asynccontextmanager
async def streams(url: str, model: str, key: str = "none") -> AsyncIterator[Stream]:
    """A sender."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Stream(url, session, model, key)


async def at_once(stream: Stream, n: int, seconds: float) -> tuple[list[Sample], float]:
    """Keep n requests under way for so long. Returns them, and the seconds until the last has ended."""
    found: list[Sample] = []
    begun = time.perf_counter()

    async def one() -> None:
        while time.perf_counter() - begun < seconds:
            found.append(await stream.once())

    async with asyncio.TaskGroup() as group:
        for _ in range(n):
            group.create_task(one())
    return found, time.perf_counter() - begun


async def at_rate(stream: Stream, per_s: float, seconds: float, seed: int) -> list[Sample]:
    """Begin requests at random times at this rate, whatever becomes of earlier ones: a late start counts as waiting."""
    draw = random.Random(seed)
    due = time.perf_counter()
    end = due + seconds
    tasks: list[asyncio.Task[Sample]] = []
    async with asyncio.TaskGroup() as group:
        while (due := due + draw.expovariate(per_s)) < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(group.create_task(stream.once(due)))
    return [task.result() for task in tasks]


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Percentiles, ms."""
    firsts, wholes = sorted(one.first for one in samples), sorted(one.whole for one in samples)
    return {
        "requests": len(samples),
        **{f"first_ms_p{q}": round(percentile(firsts, q), 2) for q in (50, 95, 99)},
        **{f"whole_ms_p{q}": round(percentile(wholes, q), 2) for q in (50, 95, 99)},
    }
