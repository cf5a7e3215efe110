"""Shared by benchmarks: requests without a cached prefix, phalanx's own counters, and figures as text."""

from __future__ import annotations

import asyncio
import statistics
import sys
from typing import Any

import httpx
from servers import MODEL_NAME

from phalanx.bench.workload import WORDS


def prompt(words: int, turn: int, index: int) -> str:
    """A text whose first word differs from that of every other (turn, index), so that no prefix is cached."""
    picks = [WORDS[(7 * turn + 3 * index + i * (index + 2)) % len(WORDS)] for i in range(words)]
    return f"{turn}.{index} " + " ".join(picks)


def request(text: str, tokens: int) -> dict[str, Any]:
    """A greedy chat request for exactly `tokens` tokens."""
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
    }


async def own_counters(client: httpx.AsyncClient) -> dict[str, float]:
    """phalanx's step counters. The server refreshes them about once a second."""
    await asyncio.sleep(1.2)
    text = (await client.get(str(client.base_url.join("/metrics")))).text
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("phalanx:engine_"):
            name, value = line.rsplit(" ", 1)
            values[name.partition("{")[0].removeprefix("phalanx:engine_")] = float(value)
    return values


def spread(values: list[float]) -> str:
    """Median and extremes, as text."""
    digits = 1 if statistics.median(values) < 1000 else 0
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def progress(text: str) -> None:
    """Print to stderr: stdout has the table and the JSON line."""
    print(text, file=sys.stderr, flush=True)
