"""Speculation against non-speculative decoding: repetitive and free text, good and hostile drafters, one to sixteen
rows, one and two ranks. Both kinds of decoding take turns in one run.

What to expect. A step reads every weight once, whatever it computes. So k further tokens cost little where memory is
the limit and k times as much where arithmetic is; two cores with native kernels lie between. A text that repeats itself
or its prompt gains up to a factor of k + 1. Free text gains nothing, and the control must notice that soon: the hostile
drafters measure it, and `LEAST` is the least allowed ratio. With many rows arithmetic is the limit already, so the gain
is smaller. Hostile drafters are wrong on every text, so they are measured on free text only.

The model generates given documents (`scripted_model.py`), and acceptance is as on these documents: records as JSON,
code with a changed name, lines selected from a long list, prose. Every answer is generated more than once, so drafters
learn from a request's own tokens only. The exception is "seen before", which remembers earlier answers: its drafts are
right and free, so it is the upper limit. Every server must give the same answers, with and without speculation.

Two equal servers differ by up to 8 %, so each server is compared with itself. On repetitive text the same requests run
just before or after without drafts (`num_speculative_tokens`). On free text single per cents matter, and whole answers
of one server differ by 6 %, while neighbouring steps hardly differ. There drafts are switched on and off every few
steps within the same answers (`compare_steps`), which measures a round to 2 %. A point is measured again while it is
unclear on which side of `LEAST` its ratio lies. The variant "off" is a server without speculation. Servers run one at a
time and have all the memory; prompts stay in the prefix cache, so that a load consists of decoding.

mlx-lm's own speculation runs on the same two models with one row and its stock kernels, so the ratio to phalanx is one
of systems. Speeds are output tokens/s after the first token; ratios are taken within a round; the table has their mean
and its standard error. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from scripted_model import ANSWER, DRAFT, TARGETS, reciter, works
from servers import mlx_lm, phalanx
from short_chats import progress
from speculation_figures import FREE, OFF, Figures, Point, Results, body, said, show

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import OfferedLoad, closed_loop

ROUNDS = 3
MORE = 4
"""Largest multiple of the requested rounds, for points whose ratio may lie on either side of `LEAST`."""
TURN = 4
"""Steps with drafts, and then without. With 16 instead, the error of a round doubles."""
RAMP_S = 0.03
DRAFT_MODEL = "draft model"
HOSTILE = ("hostile model", "noise")
KNOWS = 0.85  # share of positions at which the good draft model is right
THEIR_TOKENS = 96  # fewer, because stock kernels are slow
THEIR_K = 4
SHARE_FOR_ROWS = 0.7
"""Share of the free memory for weights, keys and values."""
METRIC = "phalanx:spec_decode_"


def variants(friend: Path, enemy: Path) -> dict[str, dict[str, Any] | None]:
    """Name -> the setting of speculation; None is off."""
    return {
        OFF: None,
        "ngram": {"method": "ngram", "prompt_lookup_requests": 0},
        "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
        "seen before": {"method": "suffix"},
        DRAFT_MODEL: {"method": "draft_model", "model": str(friend)},
        HOSTILE[0]: {"method": "draft_model", "model": str(enemy)},
        HOSTILE[1]: {"method": "random"},
    }


def points(tokens: int) -> list[Point]:
    """Every work alone, then repetitive works together, and free ones together."""
    free, *repetitive = works()
    return [
        *(Point(work.name, (work,), 1, tokens) for work in (*repetitive, free)),
        *(Point("repetitive", tuple(repetitive), rows, tokens) for rows in (4, 16)),
        *(Point(FREE, (free,), rows, tokens) for rows in (4, 16)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="half as many with sixteen streams")
    parser.add_argument("--size", default="1b", choices=TARGETS, help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["exact"], choices=["exact", "fast"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--works", nargs="+", metavar="NAME", help="json, 'free text', ...; several at once: repetitive"
    )
    parser.add_argument("--tokens", type=int, default=ANSWER, help=f"of every answer, {ANSWER} at most")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="ngram, suffix, ... (and off)")
    parser.add_argument("--without-mlx-lm", action="store_true")
    options = parser.parse_args()
    console = Console(width=150, highlight=False)
    chosen = [
        point
        for point in points(options.tokens)
        if point.concurrency in options.concurrency and (options.works is None or point.name in options.works)
    ]
    if not chosen:
        parser.error(
            "--concurrency and --works leave nothing; what there is: "
            + ", ".join(f"{point.name} ({point.concurrency})" for point in points(options.tokens))
        )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        folder = Path(directory)
        model = reciter(folder, TARGETS[options.size])
        friend, enemy = reciter(folder, DRAFT, knows=KNOWS), reciter(folder, DRAFT, knows=0.0)
        configs = {
            name: config
            for name, config in variants(friend, enemy).items()
            if name == OFF or options.only is None or name in options.only
        }
        for ranks, precision in itertools.product(options.ranks, options.precisions):
            title = f"{ranks} rank{'s' if ranks > 1 else ''}, {precision}"
            group = (*(("--tp", str(ranks)) if ranks > 1 else ()), "--cpu-precision", precision)
            group += memory(model, ranks)
            compared = compare(model, configs, group, chosen, options.rounds, title)
            results[title] = show(asyncio.run(compared), title, console)
        theirs = {} if options.without_mlx_lm else asyncio.run(against(model, friend, folder, options.rounds, console))
    about = {
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("phalanx", "mlx", "mlx-lm")},
    }
    print(json.dumps({"benchmark": "speculation", "size": options.size, **about, "results": results, "mlx_lm": theirs}))
    return 0


def memory(model: Path, ranks: int) -> tuple[str, ...]:
    """The same for all servers."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / ranks
    each = (SHARE_FOR_ROWS * psutil.virtual_memory().available / ranks - weights) / 2**30
    return "--kv-cache-gb", f"{each * 2 / 3:.2f}", "--prefix-cache-gb", f"{each / 3:.2f}"


async def compare(
    model: Path,
    configs: Mapping[str, dict[str, Any] | None],
    group: Sequence[str],
    chosen: Sequence[Point],
    rounds: int,
    title: str,
) -> Results:
    """Measure all variants of `group`; the first of `configs` is "off". Each server first answers every load once, so
    that its prompts are cached and the cost of steps with many tokens is known."""
    figures = {point: {name: Figures() for name in configs} for point in chosen}
    answers: dict[str, str] = {}
    for name, config in configs.items():
        for compares_steps in (False, True):
            mine = [p for p in chosen if (p.compares_steps and config is not None) == compares_steps]
            mine = [point for point in mine if name not in HOSTILE or point.name == FREE]
            if not mine:
                continue
            turns = {"compare_steps": TURN} if compares_steps else {}
            with phalanx(model, *group, *flags(config and {**config, **turns})) as url:
                async with open_client(url) as client:
                    answers = answers or await reference(client, chosen)
                    for point in mine:
                        await fill(client, point, answers, figures[point][name], rounds, again=config is not None)
                        found = said(figures[point][name])
                        progress(f"{title}, {name}, {point.name}, {point.concurrency} at once: {found}")
    return figures


async def fill(
    client: httpx.AsyncClient,
    point: Point,
    answers: Mapping[str, str],
    figures: Figures,
    rounds: int,
    *,
    again: bool,
) -> None:
    """Measure one load on one server in the requested rounds; with `again`, until the result is clear."""
    check(await closed_loop(client, point.bodies(), point.concurrency), point.bodies(), answers)
    at_least = point.rounds(rounds)
    for turn in range(MORE * at_least):
        if turn >= at_least and (figures.is_clear or not again):
            break
        if again and point.compares_steps:
            await measure_steps(client, point, answers, figures)
        else:
            await measure(client, point, answers, figures, turn)


async def reference(client: httpx.AsyncClient, chosen: Sequence[Point]) -> dict[str, str]:
    """Prompt -> the answer without speculation; `client` belongs to the server that is "off"."""
    answers: dict[str, str] = {}
    for work in {work for point in chosen for work in point.works}:
        exchange = await stream_chat(client, body(work, chosen[0].tokens))
        if not work.answer.startswith(exchange.text[:80]):
            raise RuntimeError(f"{work.name}: the model does not recite, but says {exchange.text[:80]!r}")
        answers[work.prompt] = exchange.text
    return answers


async def measure(
    client: httpx.AsyncClient, point: Point, answers: Mapping[str, str], figures: Figures, turn: int
) -> None:
    """Measure one load on one server with and without drafts; the order alternates."""

    async def run(**fields: int) -> float:
        bodies = [{**body, **fields} for body in point.bodies()]
        load = await closed_loop(client, bodies, point.concurrency, ramp_s=RAMP_S)
        check(load, bodies, answers)
        return speed(load)

    if turn % 2:
        figures.undrafted.append(await run(num_speculative_tokens=0))
    before = await counters(client) if turn == 0 else {}
    figures.tokens_per_s.append(await run())
    if turn == 0:
        after = await counters(client)
        figures.note_drafts({name: value - before.get(name, 0.0) for name, value in after.items()})
    if turn % 2 == 0:
        figures.undrafted.append(await run(num_speculative_tokens=0))


async def measure_steps(client: httpx.AsyncClient, point: Point, answers: Mapping[str, str], figures: Figures) -> None:
    """Measure one load by the server's own counters of steps with and without drafts."""
    before = await counters(client)
    load = await closed_loop(client, point.bodies(), point.concurrency, ramp_s=RAMP_S)
    check(load, point.bodies(), answers)
    after = await counters(client)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    figures.note_drafts(gained)
    figures.tokens_per_s.append(gained["compared_tokens yes"] / gained["compared_seconds yes"])
    figures.undrafted.append(gained["compared_tokens no"] / gained["compared_seconds no"])


def speed(load: OfferedLoad) -> float:
    """Tokens/s of all streams together, each measured from its first token to its last."""
    streams = [(e.completion_tokens or 0, e.arrivals[-1] - e.arrivals[0]) for e in load.exchanges]
    return len(streams) * sum(n - 1 for n, _ in streams) / sum(seconds for _, seconds in streams)


def check(load: OfferedLoad, bodies: Sequence[Mapping[str, Any]], answers: Mapping[str, str]) -> None:
    """Check that speculation has not changed the text."""
    if load.failures:
        raise RuntimeError(f"{len(load.failures)} requests failed, the first: {load.failures[0]}")
    for sent, exchange in zip(bodies, load.exchanges, strict=True):
        if exchange.text != answers[sent["messages"][0]["content"]]:
            raise RuntimeError(f"another answer with speculation: {exchange.text[:200]!r}")


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's counters of drafts, by name after `METRIC` and by label. The server refreshes them once a second."""
    await asyncio.sleep(1.2)
    text = (await client.get(str(client.base_url.join("/metrics")))).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(METRIC) and sample.name.endswith("_total"):
                label = sample.labels.get("position") or sample.labels.get("drafts", "")
                name = f"{sample.name.removeprefix(METRIC).removesuffix('_total')} {label.rjust(2, '0')}"
                values[name if label else name.split()[0]] = sample.value
    return values


async def against(model: Path, friend: Path, folder: Path, rounds: int, console: Console) -> dict[str, Any]:
    """Compare phalanx's speculation with mlx-lm's: the same draft model, one row, the work with the shortest prompt."""
    config = flags({"method": "draft_model", "model": str(friend)})
    speeds: dict[str, list[float]] = {"phalanx": [], "mlx_lm": []}
    draft = ("--draft-model", str(friend), "--num-draft-tokens", str(THEIR_K))
    sent = body(works()[0], THEIR_TOKENS)
    with phalanx(model, *config) as our_url, mlx_lm(model, folder / "mlx_lm.log", *draft) as their_url:
        async with open_client(our_url) as ours, open_client(their_url) as theirs:
            clients = {"phalanx": ours, "mlx_lm": theirs}
            for turn in range(rounds):
                for name in shuffled(list(clients), turn):
                    load = await closed_loop(clients[name], [sent], 1)
                    if load.failures:
                        raise RuntimeError(f"{name}: {load.failures[0]}")
                    speeds[name].append(speed(load))
                    progress(f"against mlx-lm, round {turn + 1}: {name} {speeds[name][-1]:.1f}")
    pairs = zip(speeds["phalanx"], speeds["mlx_lm"], strict=True)
    better = statistics.median(a / b for a, b in pairs)
    medians = ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in speeds.items())
    console.print(f"draft model, one row, {THEIR_TOKENS} tokens: tokens/s of {medians}; ours is {better:.2f}x")
    return {**speeds, "ratio": better}


def flags(config: Mapping[str, Any] | None) -> tuple[str, ...]:
    return () if config is None else ("--speculative-config", json.dumps(config))


def shuffled(names: Sequence[str], turn: int) -> list[str]:
    """A different order for each round, the same in each run."""
    return random.Random(turn).sample(list(names), len(names))


if __name__ == "__main__":
    sys.exit(main())
