"""One rank against two, over mpi and over a ring, beside mlx_lm.server on two ranks.

What to expect. Two ranks on one machine of two cores read the same weights through the same memory, so at best the
compute part of a step halves; each sum over ranks costs its latency (13 to 60 us over mpi, measured by the self-test in
the same run), and there are two per layer. A ring spins a core while it waits. The time of a step is split into:

    compute      the model call, less the sums
    collectives  sums per forward x their measured latency at the size of one row
    control      sending the plan to the other ranks
    own          the rest: scheduling, bookkeeping, messages to the server

Servers take turns, and each is started for its turn: an idle mlx_lm group spins and would slow the others down.
`--model llama-1b` uses a model of that shape (`cpu_models.py`), whose weights exceed every cache, and leaves out
mlx_lm.server, which would take minutes per token. One rank has two threads, each of two ranks has one. Ratios are taken
within a round, then their median. What checked sums cost, `checked_sums.py` measures: two servers differ by more. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cpu_models import SHAPES, SMALL, write_mlx
from rich.console import Console
from rich.table import Table
from servers import mlx_lm, phalanx
from short_chats import own_counters, progress, prompt, request, spread

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import closed_loop

ROUNDS = 3
TOKENS = {1: 32, 4: 24}  # by concurrency
BASE = "phalanx, 1 rank"
THEIRS = "mlx_lm.server, 2 ranks (ring)"


def subjects(model: Path, theirs: Path | None) -> dict[str, Callable[[], AbstractContextManager[str]]]:
    """Name -> server; mlx_lm's only with a path for its log."""
    two = ("--tp", "2", "--backend")
    servers: dict[str, Callable[[], AbstractContextManager[str]]] = {
        BASE: lambda: phalanx(model),
        "phalanx, 2 ranks (mpi)": lambda: phalanx(model, *two, "mpi"),
        "phalanx, 2 ranks (ring)": lambda: phalanx(model, *two, "ring"),
    }
    if theirs is not None:
        servers[THEIRS] = lambda: mlx_lm(model, theirs, ranks=2)
    return servers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", choices=["random", *SHAPES], default="random")
    options = parser.parse_args()
    speeds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    splits: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        usual = options.model == "random"
        model = write_mlx(SMALL if usual else SHAPES[options.model], Path(directory))
        config = json.loads((model / "config.json").read_text())
        latency = {backend: sum_latency_us(model, config, backend) for backend in ("mpi", "ring")}
        servers = list(subjects(model, Path(directory) / "mlx_lm.log" if usual else None).items())
        for turn in range(options.rounds):
            for name, start in servers if turn % 2 == 0 else servers[::-1]:
                progress(f"round {turn + 1}: {name}")
                with start() as url:
                    asyncio.run(measure(name, url, turn, speeds[name], splits[name]))
    steps = {name: split(found, latency_for(name, latency), config) for name, found in splits.items() if found}
    show(speeds, steps, latency)
    about = {
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("phalanx", "mlx", "mlx-lm")},
    }
    results = {
        name: {
            "decode_tokens_per_s": dict(speeds[name]),
            "ratio_to_one_rank": {c: ratio(speeds, name, c) for c in TOKENS},
            "step": steps.get(name),
        }
        for name in speeds
    }
    print(json.dumps({"benchmark": "ranks", **about, "sum_latency_us": latency, "results": results}))
    return 0


async def measure(
    name: str, url: str, turn: int, speeds: dict[int, list[float]], splits: list[dict[str, float]]
) -> None:
    """Decode tokens/s at each concurrency; for phalanx also its counters per step of one row."""
    async with open_client(url) as client:
        await stream_chat(client, request("warm up", 4))
        for concurrency, tokens in TOKENS.items():
            before = await own_counters(client) if name != THEIRS else {}
            bodies = [request(prompt(0, turn, i), tokens) for i in range(concurrency)]
            load = await closed_loop(client, bodies, concurrency, ramp_s=0.03)
            if load.failures:
                raise RuntimeError(f"{name}: {load.failures[0]}")
            speeds[concurrency].append(load.decode_tokens_per_s)
            if name != THEIRS and concurrency == 1:
                after = await own_counters(client)
                splits.append({key: after[key] - before[key] for key in after})


def split(counters: list[dict[str, float]], sum_us: float, config: dict[str, Any]) -> dict[str, float]:
    """Milliseconds per step of one row: medians over rounds."""

    def per_step(key: str) -> float:
        return statistics.median(1000 * c[f"{key}_seconds_total"] / c["steps_total"] for c in counters)

    step, model, control = per_step("step"), per_step("model"), per_step("control")
    collectives = 2 * config["num_hidden_layers"] * sum_us / 1000
    return {
        "step_ms": step,
        "compute_ms": model - collectives,
        "collectives_ms": collectives,
        "control_ms": control,
        "own_ms": step - model - control,
        "control_and_own_share": (step - model) / step,
    }


def sum_latency_us(model: Path, config: dict[str, Any], backend: str) -> float:
    """Microseconds of one row's sum, measured by the self-test of a group."""
    command = [sys.executable, "-m", "phalanx", "selftest", str(model), "--tp", "2", "--backend", backend, "--json"]
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    wanted = 4 * config["hidden_size"]
    figures = answer["info"]["self_test"]["all_reduce"]
    return float(min(figures, key=lambda figure: abs(figure["bytes"] - wanted))["median_us"])


def latency_for(name: str, latency: dict[str, float]) -> float:
    return next((us for backend, us in latency.items() if backend in name), 0.0)


def ratio(speeds: dict[str, dict[int, list[float]]], name: str, concurrency: int) -> float:
    """Median ratio within rounds to one rank of phalanx."""
    pairs = zip(speeds[name][concurrency], speeds[BASE][concurrency], strict=True)
    return statistics.median(a / b for a, b in pairs)


def show(
    speeds: dict[str, dict[int, list[float]]], steps: dict[str, dict[str, float]], latency: dict[str, float]
) -> None:
    table = Table("", *(f"tokens/s at {c}" for c in TOKENS), "to 1 rank", "step, ms: compute + sums + control + own")
    for name, values in speeds.items():
        row = [spread(values[c]) for c in TOKENS]
        ratios = " / ".join(f"{ratio(speeds, name, c):.2f}x" for c in TOKENS)
        parts = ""
        if (s := steps.get(name)) is not None:
            parts = (
                f"{s['step_ms']:.1f}: {s['compute_ms']:.1f} + {s['collectives_ms']:.2f} + {s['control_ms']:.2f} + "
                f"{s['own_ms']:.2f}"
            )
        table.add_row(name, *row, ratios, parts)
    Console(width=150, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
