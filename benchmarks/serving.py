"""phalanx's HTTP server against mlx_lm.server: the same models, requests and client, in one run, taking turns.

What to expect. Decoding reads every weight once per step, so one stream cannot be faster than bytes of weights over
memory bandwidth, and rows computed together share that read. Stock MLX's CPU kernels are far from that limit: they
cost about the same per row however many rows there are, so on a CPU tokens/s hardly grow with concurrency and both
servers, which call the same kernels, have the same ceiling. They differ in everything around the model call: batching,
caches, sampling, transport. Three measurements show it:

1. Concurrency 1, 4 and 16: decode tokens/s (while all streams decode), output tokens/s (from the first request to the
   last token, so with prefill), time to first token. Greedy, equal token counts, prompts that
   are in no prefix cache. Rounds alternate A B, B A, ...; ratios are taken within a round, then their median.
2. Time to first token of a short prompt that arrives while a long one is being prefilled. A server that prefills the
   long prompt in one piece makes the short one wait for all of it; chunks make it wait for one chunk.
3. phalanx's own time per step outside the model call, from its metrics: scheduling, plans, bookkeeping, messages.

A point that takes too long on a slow machine stops after two rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from cpu_models import SMALL, write_mlx
from rich.console import Console
from rich.table import Table
from servers import MODEL_NAME, endless_demo, mlx_lm, phalanx

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import OfferedLoad, closed_loop, ttft

RAMP_S = 0.03  # mlx_lm.server listens with a backlog of 5: of 16 connections made at once it resets a few
ROUNDS = 3
MIN_ROUNDS = 2
WORDS = "river stone light seven garden letter winter bread engine silver morning paper window road music cloud".split()


@dataclass(frozen=True)
class Point:
    """One load: `concurrency` streams at once; each prompt is a unique number and a given count of words."""

    concurrency: int
    words: int
    output: int  # tokens


@dataclass(frozen=True)
class Subject:
    """A model and its loads."""

    name: str
    write: Callable[[Path], Path]
    points: tuple[Point, ...]
    long_prompt: int  # words
    seconds: float  # per point; after that, MIN_ROUNDS are enough


SUBJECTS = (
    Subject(
        "demo",
        endless_demo,
        (Point(1, 24, 128), Point(4, 24, 96), Point(16, 24, 64)),
        long_prompt=1200,
        seconds=45,
    ),
    Subject(
        "random 100M",
        lambda folder: write_mlx(SMALL, folder),
        (Point(1, 0, 32), Point(4, 0, 24), Point(16, 0, 16)),  # few words: prefill is as slow as decoding here
        long_prompt=60,
        seconds=60,
    ),
)


@dataclass
class Pairs:
    """A figure of both servers: one value per server and round."""

    title: str
    higher_is_better: bool
    values: dict[str, list[float]] = field(default_factory=lambda: {"phalanx": [], "mlx_lm": []})

    @property
    def ratio(self) -> float:
        """Median over rounds of the ratio by which phalanx is better."""
        pairs = zip(self.values["phalanx"], self.values["mlx_lm"], strict=True)
        return statistics.median(a / b if self.higher_is_better else b / a for a, b in pairs)

    def json(self) -> dict[str, Any]:
        return {**self.values, "ratio": self.ratio}

    def add_to(self, table: Table) -> None:
        """The figure as a line of the table."""
        table.add_row(self.title, *(spread(values) for values in self.values.values()), f"{self.ratio:.2f}x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds per point, at most")
    parser.add_argument("--only", choices=[subject.name for subject in SUBJECTS], help="one model only")
    options = parser.parse_args()
    console = Console(width=110, highlight=False)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        for subject in SUBJECTS:
            if options.only in (None, subject.name):
                results[subject.name] = asyncio.run(compare(subject, Path(directory), options.rounds, console))
    about = {
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("phalanx", "mlx", "mlx-lm")},
    }
    print(json.dumps({"benchmark": "serving", **about, "results": results}))
    return 0


async def compare(subject: Subject, directory: Path, rounds: int, console: Console) -> dict[str, Any]:
    """All measurements on one model."""
    model = subject.write(directory)
    with phalanx(model) as our_url, mlx_lm(model, directory / "mlx_lm.log") as their_url:
        async with open_client(our_url) as ours, open_client(their_url) as theirs:
            clients = {"phalanx": ours, "mlx_lm": theirs}
            for client in clients.values():
                await stream_chat(client, request("warm up", 4))
            table = Table("", "phalanx", "mlx_lm.server", "ratio", title=f"{subject.name}: median (min .. max)")
            result: dict[str, Any] = {}
            for point in subject.points:
                before, since = await own_counters(ours), time.monotonic()
                figures = await measure(clients, point, rounds, subject.seconds)
                own = own_time(before, await own_counters(ours))
                key = f"concurrency {point.concurrency}"
                for pairs in figures.values():
                    pairs.add_to(table)
                step = f"{own['own_ms']:.2f} ms of {own['step_ms']:.1f} ({own['share']:.1%})"
                table.add_row(f"{key}: own time per step", step, "", "", end_section=True)
                result[key] = {**{name: pairs.json() for name, pairs in figures.items()}, "own": own}
                progress(f"{subject.name}, {key}: {time.monotonic() - since:.0f} s")
            beside = await measure_beside(clients, subject, rounds)
            beside.add_to(table)
            result["short_beside_long_ttft_ms"] = beside.json()
    console.print(table)
    return result


async def measure(
    clients: Mapping[str, httpx.AsyncClient], point: Point, rounds: int, seconds: float
) -> dict[str, Pairs]:
    """Measure tokens/s and mean TTFT (ms) of both servers, one pair per round."""
    at = f"concurrency {point.concurrency}"
    decode = Pairs(f"{at}: decode tokens/s", True)
    output = Pairs(f"{at}: output tokens/s", True)
    first = Pairs(f"{at}: TTFT ms", False)
    start = time.monotonic()
    for turn in range(rounds):
        if turn >= MIN_ROUNDS and time.monotonic() - start > seconds:
            break
        bodies = [request(prompt(point.words, turn, i), point.output) for i in range(point.concurrency)]
        for name in order(turn):
            load = await closed_loop(clients[name], bodies, point.concurrency, ramp_s=RAMP_S)
            check(name, load, point)
            decode.values[name].append(load.decode_tokens_per_s)
            output.values[name].append(load.tokens_per_s)
            first.values[name].append(ttft(load).mean)
    return {"decode_tokens_per_s": decode, "output_tokens_per_s": output, "ttft_ms": first}


async def measure_beside(clients: Mapping[str, httpx.AsyncClient], subject: Subject, rounds: int) -> Pairs:
    """TTFT (ms) of a short prompt sent just after a long one."""
    result = Pairs("short beside long: TTFT ms", False)
    start = time.monotonic()
    for turn in range(rounds):
        if turn >= MIN_ROUNDS and time.monotonic() - start > subject.seconds:
            break
        for name in order(turn):
            client = clients[name]
            long = asyncio.create_task(stream_chat(client, request(prompt(subject.long_prompt, turn, 99), 1)))
            await asyncio.sleep(0.3)  # the long one is being prefilled
            if long.done():
                raise RuntimeError(f"{name} prefilled the long prompt before the short one came; make it longer")
            short = await stream_chat(client, request(prompt(0, turn, 98), 4))
            await long
            assert short.ttft_s is not None
            result.values[name].append(1000 * short.ttft_s)
    return result


def order(turn: int) -> tuple[str, str]:
    """The order A B, B A, A B, ...: slow drifts of the machine affect both servers."""
    return ("phalanx", "mlx_lm") if turn % 2 == 0 else ("mlx_lm", "phalanx")


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


def check(name: str, load: OfferedLoad, point: Point) -> None:
    """Check that no request failed and that every answer has the requested length."""
    if load.failures:
        raise RuntimeError(f"{name} failed {len(load.failures)} requests, the first: {load.failures[0]}")
    counts = {exchange.completion_tokens for exchange in load.exchanges}
    if counts != {point.output}:
        raise RuntimeError(f"{name} answered with {counts} tokens instead of {point.output}")


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


def own_time(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Per step: total ms, ms outside the model call, and their share."""

    def gained(name: str) -> float:
        return after[name] - before[name]

    steps, step_s = gained("steps_total"), gained("step_seconds_total")
    own_s = step_s - gained("model_seconds_total")
    return {"steps": steps, "step_ms": 1000 * step_s / steps, "own_ms": 1000 * own_s / steps, "share": own_s / step_s}


def spread(values: list[float]) -> str:
    """Median and extremes, as text."""
    digits = 1 if statistics.median(values) < 1000 else 0
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def progress(text: str) -> None:
    """Print to stderr: stdout has the table and the JSON line."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
