"""How evenly streams come: gaps between tokens while other things happen beside them.

What to expect. A step computes a chunk of a prompt and a token of every stream, one after the other, so the longest gap
is a chunk and a step. Where decoding has its share of the time, streams keep about that share of their speed. All else
that makes a step long (memory that is touched, copied or given back, Python's collector) is the engine's own fault.

Gaps count in medians of the same streams alone, shortly before, so that a busy machine counts in both. Each step that
takes over three of these medians is listed with what it did, and the last line has them by cause. With `--before`,
another checkout's source (its folder `src`) takes turns with this one. The last line is one JSON object.

    python benchmarks/gaps.py beside-4 --model "$(phalanx pull smollm2)" --before ../main/src
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cpu_models import CONFIG, Shape, write_mlx
from servers import MODEL_NAME, phalanx

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import percentile

WARM_S = 2.0  # before anything counts
ALONE_S = 4.0
IDLE_S = 2.5  # then the engine has freed what it kept for reuse
ENDLESS = 7500  # tokens of a stream that none should reach
ANSWER = 16  # tokens of a turn of a conversation
LONG_STEP = 3.0  # medians
EDGES = (1.5, 2.0, 3.0, 4.0, 6.0)  # of the histogram, in medians
MIN_FAULTS = 1000  # pages of a step: 4 MB
TINY = Shape(  # random weights; its context takes a prompt of 30,000 tokens
    "tiny-llama",
    {
        **CONFIG,
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "intermediate_size": 1536,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
    },
)

Arrivals = list[list[float]]  # by stream, when its pieces came
Span = tuple[float, float]


class Played(NamedTuple):
    """What a scene brought: the streams' arrivals, times in which they were alone, and the time that counts.

    Beside an event of a minute, streams grow, and their steps take longer for that: they are alone before and after.
    """

    arrivals: Arrivals
    alone: list[Span]
    beside: Span
    more: dict[str, float]


Event = Callable[[httpx.AsyncClient, int, int], Awaitable[None]]
"""(client, tokens, seed): what happens beside the streams."""


class Scene(NamedTuple):
    """What is measured. With an event, endless streams run beside it; else they end after `tokens`."""

    streams: int
    tokens: int  # of the prompt beside the streams, or that streams grow to
    event: Event | None = None
    flags: tuple[str, ...] = ("--no-prefix-caching",)
    idles: bool = False  # streams run, the server is idle, streams run again
    again: bool = False  # the event is timed alone, too


async def read_prompt(client: httpx.AsyncClient, tokens: int, seed: int) -> None:
    """Read a prompt that no other one begins like."""
    await _complete(client, _random_prompt(tokens, seed), 1)


async def converse(client: httpx.AsyncClient, tokens: int, seed: int) -> None:
    """Three turns of a conversation of so many tokens, each of which begins with what the one before left."""
    prompt = _random_prompt(tokens, 0)
    for turn in range(3):
        await _complete(client, prompt + _random_prompt(20 * (turn + 1), seed), ANSWER)
        await asyncio.sleep(1.0)


async def come_and_go(client: httpx.AsyncClient, tokens: int, seed: int) -> None:
    """Streams that begin one after the other; every second one is cancelled, the others end."""
    others = []
    for i in range(12):
        others.append(asyncio.create_task(_stream(client, 100 + i, [], ENDLESS if i % 2 else tokens)))
        await asyncio.sleep(0.5)
        if i % 2:
            others[-1].cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def crowd(client: httpx.AsyncClient, tokens: int, seed: int) -> None:
    """More rows than there is memory for beside the streams, so that the youngest are preempted.

    The scene's memory is that of 40,000 tokens of the tiny model; another one needs `--serve '--kv-cache-gb ..'`.
    """
    await asyncio.gather(*(_complete(client, _random_prompt(tokens, seed + i), 60) for i in range(8)))


SCENES = {
    "growing": Scene(16, 1000),
    "beside-4": Scene(4, 6000, read_prompt, again=True),
    "beside-16": Scene(16, 6000, read_prompt, again=True),
    "restored": Scene(4, 6000, converse, flags=()),
    "ending": Scene(4, 60, come_and_go, flags=()),
    "preempted": Scene(4, 4000, crowd, flags=("--kv-cache-gb", "0.082", "--max-model-len", "8192")),
    "idle": Scene(4, 100, idles=True),
}


def main() -> None:
    options = _options()
    scene = SCENES[options.scene]
    scene = scene._replace(tokens=options.tokens or scene.tokens)
    sources = {"now": None} if options.before is None else {"before": options.before.resolve(), "now": None}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or write_mlx(TINY, Path(scratch))
        for turn in range(options.rounds):
            for name, source in list(sources.items())[:: 1 if turn % 2 == 0 else -1]:
                trace = Path(scratch) / f"{name}-{turn}"
                command = [*scene.flags, "--trace", str(trace), *options.serve]
                played = asyncio.run(_serve(scene, model, command, source, turn))
                figures = _figures(played, trace)
                runs[name].append(figures)
                print(f"{name}: {json.dumps(figures)}", flush=True)
    medians = {
        name: {key: round(statistics.median(run[key] for run in each), 2)
               for key, value in each[0].items() if isinstance(value, float)}
        for name, each in runs.items()
    }  # fmt: skip
    print(json.dumps({"benchmark": "gaps", "scene": options.scene, "streams": scene.streams, "tokens": scene.tokens,
                      **medians}))  # fmt: skip


async def _serve(scene: Scene, model: Path, flags: list[str], source: Path | None, turn: int) -> Played:
    """One server's scene."""
    if source is not None:
        os.environ["PYTHONPATH"] = str(source)
    try:
        with phalanx(model, *flags) as url:
            async with open_client(url) as client:
                return await (_beside(client, scene, turn) if scene.event else _alone(client, scene))
    finally:
        os.environ.pop("PYTHONPATH", None)


async def _beside(client: httpx.AsyncClient, scene: Scene, turn: int) -> Played:
    """Endless streams, alone and then beside the event."""
    assert scene.event is not None
    await read_prompt(client, scene.tokens // 10, turn - 1000)  # an earlier request, from which speed is known
    if scene.event is converse:
        await converse(client, scene.tokens, turn - 2000)
    arrivals: Arrivals = [[] for _ in range(scene.streams)]
    streams = [asyncio.create_task(_stream(client, i, arrivals[i], ENDLESS)) for i in range(scene.streams)]
    await asyncio.sleep(WARM_S)
    begun = time.monotonic()
    await asyncio.sleep(ALONE_S)
    sent = time.monotonic()
    await scene.event(client, scene.tokens, turn)
    ended = time.monotonic()
    await asyncio.sleep(ALONE_S)
    last = time.monotonic()
    for stream in streams:
        if stream.done():
            raise RuntimeError(f"a stream ended before the event: {stream.result()}")
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    more = {}
    if scene.again:
        await asyncio.sleep(0.5)
        again = time.monotonic()
        await scene.event(client, scene.tokens, turn + 1000)
        more = {"event_beside_to_alone": round((ended - sent) / (time.monotonic() - again), 2)}
    return Played(arrivals, [(begun, sent), (ended, last)], (sent, ended), more)


async def _alone(client: httpx.AsyncClient, scene: Scene) -> Played:
    """Streams of so many tokens, all of them at once; if the scene idles, once more after the server was idle."""
    await _together(client, scene._replace(tokens=20))  # the first model calls of a process are slower
    arrivals, span, first_ms = await _together(client, scene)
    if not scene.idles:
        return Played(arrivals, [span], span, {"tokens_s": _speed(arrivals, span)})
    await asyncio.sleep(IDLE_S)
    after, span_after, first_after_ms = await _together(client, scene)
    joined = [a + b for a, b in zip(arrivals, after, strict=True)]
    return Played(joined, [span], span_after, {"first_ms": first_ms, "first_ms_after": first_after_ms})


async def _together(client: httpx.AsyncClient, scene: Scene) -> tuple[Arrivals, Span, float]:
    """The streams' arrivals, the time in which all run, and milliseconds until the last of them begins."""
    arrivals: Arrivals = [[] for _ in range(scene.streams)]
    sent = time.monotonic()
    await asyncio.gather(*(_stream(client, i, arrivals[i], scene.tokens) for i in range(scene.streams)))
    begun = max(each[0] for each in arrivals)
    return arrivals, (begun, min(each[-1] for each in arrivals)), round((begun - sent) * 1e3, 1)


async def _stream(client: httpx.AsyncClient, number: int, arrivals: list[float], tokens: int) -> None:
    """Notes when each piece of a text comes."""
    body = {**_body(f"Story {number}. Once upon a time there was a"), "max_tokens": tokens}
    await stream_chat(client, body, on_text=lambda _: arrivals.append(time.monotonic()), path="/completions")


async def _complete(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> None:
    (await client.post("completions", json={**_body(prompt), "max_tokens": tokens})).raise_for_status()


def _random_prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 1000) for _ in range(tokens)]


def _body(prompt: str | list[int]) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True}


# -- figures ---------------------------------------------------------------------------------------------------------


def _figures(played: Played, trace: Path) -> dict[str, Any]:
    alone = [_gaps(played.arrivals, span) for span in played.alone]
    medians, beside = [statistics.median(each) for each in alone], _gaps(played.arrivals, played.beside)
    median = statistics.mean(medians)
    speed = statistics.mean(_speed(played.arrivals, span) for span in played.alone)
    ratios = [gap / median for gap in beside]
    bounds = (0.0, *EDGES, float("inf"))
    return {
        "median_ms": round(median * 1e3, 1),
        "medians_ms": [round(each * 1e3, 1) for each in medians],
        "p50": round(percentile(ratios, 50), 2),
        "p99": round(percentile(ratios, 99), 2),
        "longest": round(ratios[-1], 2),
        "longest_alone": round(max(each[-1] for each in alone) / median, 2),
        "speed": round(_speed(played.arrivals, played.beside) / speed, 2),
        **played.more,
        "histogram": {f"<= {high:g}": sum(low < r <= high for r in ratios) for low, high in itertools.pairwise(bounds)},
        "long_steps": _long_steps(trace, played.beside, median),
    }


def _gaps(arrivals: Arrivals, span: Span) -> list[float]:
    """All streams' gaps that lie in this time, in order of their length."""
    return sorted(
        after - before for each in arrivals for before, after in itertools.pairwise(each)
        if span[0] <= before and after <= span[1]
    )  # fmt: skip


def _speed(arrivals: Arrivals, span: Span) -> float:
    return round(sum(span[0] < at <= span[1] for each in arrivals for at in each) / (span[1] - span[0]), 1)


def _long_steps(trace: Path, span: Span, median: float) -> dict[str, dict[str, Any]]:
    """By what they did: how many steps took over `LONG_STEP` medians, and all about the longest one."""
    causes: dict[str, dict[str, Any]] = {}
    plan: dict[str, Any] = {}
    last = 0.0  # end of the step before, if streams were waiting for their next token then
    for line in trace.read_bytes().splitlines():
        entry = json.loads(line)
        plan = entry.get("plan", plan)
        if (cost := entry.get("cost")) is None or cost["id"] != plan.get("id"):
            continue
        medians = (cost["at"] - last) / median
        if last and span[0] <= last and cost["at"] <= span[1] and medians > LONG_STEP:
            chunk = sum(sum(f["valid"]) for f in plan["forwards"] if not f["sample"])
            done = _cause(plan, chunk, cost)
            known = causes.setdefault(done, {"steps": 0, "medians": 0.0})
            known["steps"] += 1
            if medians > known["medians"]:
                times = {"total": cost["at"] - last, "prefill": cost["prefill_s"], **cost["phases_s"]}
                known.update(medians=round(medians, 1), chunk=chunk, faults=cost["page_faults"],
                             interruptions=cost["interruptions"],
                             ms={name: round(s * 1e3, 1) for name, s in times.items()})  # fmt: skip
        last = cost["at"] if any(f["sample"] for f in plan["forwards"]) else 0.0
    return causes


def _cause(plan: dict[str, Any], chunk: int, cost: dict[str, Any]) -> str:
    parts = sorted({op["type"] for op in plan["ops"]})
    parts += ["chunk"] if chunk else []
    parts += ["pages"] if cost["page_faults"] > MIN_FAULTS else []
    parts += ["collection"] if cost["collections"] else []
    return " + ".join(parts) or "decoding alone"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--model", type=Path, help="default: a tiny random one")
    parser.add_argument("--tokens", type=int, help="of the prompt, or that streams grow to")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path, metavar="SRC", help="folder `src` of another checkout")
    parser.add_argument("--serve", type=shlex.split, default=[], metavar="'FLAGS'", help="of `phalanx serve`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
