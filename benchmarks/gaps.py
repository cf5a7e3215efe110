"""How evenly streams come: the gaps between tokens beside a long prompt, and while many streams grow together.

What to expect. A step computes a chunk of the prompt and a token of every stream, one after the other, so the longest
gap is a chunk and a step. Where decoding has its share of the time, streams keep about that share of their speed, and
the prompt takes longer by what they keep.

Four streams run alone for a while; then one prompt is read beside them. Gaps count in medians of the same streams
alone, shortly before, so that a busy machine counts in both; their speed behind the prompt shows what else than the
prompt's chunks slows them. Then the prompt's like is read alone. With `--before`,
another checkout's source (its folder `src`) takes turns with this one. The last line is one JSON object.

With `--scene growing`, streams of a few tokens grow together and nothing else happens, so that a long gap is the
engine's own: what a row's memory costs as it grows.

    python benchmarks/gaps.py "$(phalanx pull smollm2)" --before ../main/src
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from servers import MODEL_NAME, phalanx

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import percentile

STREAMS = 4
WARM_S = 2.0  # before anything counts
ALONE_S = 4.0
AFTER_S = 3.0
MAX_TOKENS = 7500  # of a stream, which none should reach
EDGES = (1.5, 2.0, 3.0, 4.0, 6.0)  # of the histogram, in medians alone
FIGURES = {
    "beside": ("p50", "p99", "longest", "speed", "speed_after", "prompt"),
    "growing": ("median_ms", "p99", "longest", "longest_ms", "tokens_s"),
}
GROWING = 16  # streams


def main() -> None:
    options = _options()
    sources = {"now": None} if options.before is None else {"before": options.before.resolve(), "now": None}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for turn in range(options.rounds):
        for name, source in list(sources.items())[:: 1 if turn % 2 == 0 else -1]:
            figures = asyncio.run(_serve(options, source, turn))
            runs[name].append(figures)
            print(f"{name}: {json.dumps(figures)}", flush=True)
    medians = {
        name: {figure: round(statistics.median(run[figure] for run in each), 2) for figure in FIGURES[options.scene]}
        for name, each in runs.items()
    }
    streams = STREAMS if options.scene == "beside" else GROWING
    print(
        json.dumps(
            {"benchmark": "gaps", "scene": options.scene, "streams": streams, "tokens": options.tokens, **medians}
        )
    )


async def _serve(options: argparse.Namespace, source: Path | None, turn: int) -> dict[str, Any]:
    """One server's figures."""
    if source is not None:
        os.environ["PYTHONPATH"] = str(source)
    try:
        with phalanx(options.model, "--no-prefix-caching", *options.flags) as url:
            async with open_client(url) as client:
                if options.scene == "growing":
                    return await _grow(client, options.tokens)
                await _read(client, options.tokens // 10, turn - 1000)  # an earlier request, from which speed is known
                return await _measure(client, options.tokens, turn)
    finally:
        os.environ.pop("PYTHONPATH", None)


async def _measure(client: httpx.AsyncClient, tokens: int, turn: int) -> dict[str, Any]:
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    streams = [asyncio.create_task(_stream(client, i, arrivals[i])) for i in range(STREAMS)]
    await asyncio.sleep(WARM_S)
    begun = time.perf_counter()
    await asyncio.sleep(ALONE_S)
    sent = time.perf_counter()
    await _read(client, tokens, turn)
    read = time.perf_counter()
    await asyncio.sleep(AFTER_S)
    ended = time.perf_counter()
    for stream in streams:
        if stream.done():
            raise RuntimeError(f"a stream ended before the prompt was read: {stream.result()}")
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await asyncio.sleep(0.5)
    again = time.perf_counter()
    await _read(client, tokens, turn + 1000)
    alone, beside, after = (_gaps(arrivals, *times) for times in ((begun, sent), (sent, read), (read, ended)))
    median = statistics.median(alone)
    ratios = [gap / median for gap in beside]
    return {
        "median_ms": round(median * 1e3, 1),
        "p50": round(percentile(ratios, 50), 2),
        "p99": round(percentile(ratios, 99), 2),
        "longest": round(ratios[-1], 2),
        "p99_alone": round(percentile(alone, 99) / median, 2),
        "longest_alone": round(alone[-1] / median, 2),
        "speed": round(len(beside) / (read - sent) / (len(alone) / (sent - begun)), 2),
        "speed_after": round(len(after) / (ended - read) / (len(alone) / (sent - begun)), 2),
        "prompt": round((read - sent) / (time.perf_counter() - again), 2),
        "histogram": _histogram(ratios),
    }


async def _grow(client: httpx.AsyncClient, tokens: int) -> dict[str, Any]:
    """Streams from their first token to one of so many, all of them at once."""
    arrivals: list[list[float]] = [[] for _ in range(GROWING)]
    await asyncio.gather(*(_stream(client, i, arrivals[i], tokens) for i in range(GROWING)))
    begun, ended = max(each[0] for each in arrivals), min(each[-1] for each in arrivals)
    gaps = _gaps(arrivals, begun, ended)
    median = statistics.median(gaps)
    ratios = [gap / median for gap in gaps]
    return {
        "median_ms": round(median * 1e3, 1),
        "p99": round(percentile(ratios, 99), 2),
        "longest": round(ratios[-1], 2),
        "longest_ms": round(gaps[-1] * 1e3, 1),
        "tokens_s": round(len(gaps) / (ended - begun), 1),
        "histogram": _histogram(ratios),
    }


async def _stream(client: httpx.AsyncClient, number: int, arrivals: list[float], tokens: int = MAX_TOKENS) -> None:
    """Notes when each piece of a text comes, by default of one without end."""
    body = {**_body(f"Story {number}. Once upon a time there was a"), "max_tokens": tokens}
    await stream_chat(client, body, on_text=lambda _: arrivals.append(time.perf_counter()), path="/completions")


async def _read(client: httpx.AsyncClient, tokens: int, seed: int) -> None:
    """Read a prompt of so many tokens that no other one begins like."""
    draw = random.Random(seed)
    body = {**_body([draw.randrange(300, 1000) for _ in range(tokens)]), "max_tokens": 1}
    (await client.post("completions", json=body)).raise_for_status()


def _body(prompt: str | list[int]) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True}


def _gaps(arrivals: list[list[float]], begin: float, end: float) -> list[float]:
    """All streams' gaps that end in this time, in order of their length."""
    return sorted(
        after - before for each in arrivals for before, after in itertools.pairwise(each) if begin < after <= end
    )


def _histogram(ratios: list[float]) -> dict[str, int]:
    """Gaps up to so many medians."""
    bounds = (0.0, *EDGES, float("inf"))
    return {f"<= {high:g}": sum(low < ratio <= high for ratio in ratios)
            for low, high in itertools.pairwise(bounds)}  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--scene", choices=FIGURES, default="beside")
    parser.add_argument("--tokens", type=int, default=6000, help="of the prompt, or that streams grow to")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--before", type=Path, metavar="SRC", help="folder `src` of another checkout")
    parser.add_argument("flags", nargs="*", help="of `phalanx serve`, behind --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
