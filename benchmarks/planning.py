"""What `phalanx plan` predicts for this machine, beside what its plans then do.

What to expect. The prediction adds up layers that were measured a few minutes before, on the same machine, so it should
be within a quarter of what is measured. It does not know HTTP and tokenising, and adds groups up from parts: those cost
most of the difference. Memory is compared as well: predicted weights and KV against what the ranks hold (Pss on Linux).

Each plan is served as a user would start it. TTFT is that of a prompt that is in no cache; tokens/s are those while all
streams decode, behind short prompts. The last line is one JSON object.

    python benchmarks/planning.py "$(phalanx pull smollm2)" --ranks 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from pathlib import Path
from typing import Any

import psutil
from servers import phalanx

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import closed_loop
from phalanx.cluster.planner import PlanRequest, make_plans
from phalanx.memory import MIB
from phalanx.planning.recommendation import GroupPlan

PROMPT = 64  # tokens before those that are counted: all streams have to decode at the same time
LONGEST = 4000  # tokens of a prompt that is timed; longer ones take minutes on a CPU
OUTPUT = 160


def body(tokens: int, n: int, seed: int) -> dict[str, Any]:
    """A completion of so many random tokens."""
    source = random.Random(seed)
    prompt = [source.randrange(100, 2000) for _ in range(tokens)]
    return {
        "model": "default_model", "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def measure(url: str, plan: GroupPlan, rounds: int) -> dict[str, float]:
    """The same figures as the prediction has."""
    assert plan.speed is not None
    found = {}
    seeds = iter(range(1, 10_000))
    async with open_client(url) as client:
        await stream_chat(client, body(PROMPT, 16, next(seeds)), path="/completions")
        for streams in plan.speed.tokens_per_s:
            rates = []
            for _ in range(rounds):
                bodies = [body(PROMPT, OUTPUT + 16 * streams, next(seeds)) for _ in range(streams)]
                load = await closed_loop(client, bodies, streams, path="/completions")
                rates.append(load.decode_tokens_per_s)
            found[f"tokens/s x{streams}"] = statistics.median(rates)
        for tokens in plan.speed.ttft_s:
            if tokens <= LONGEST:
                exchange = await stream_chat(client, body(tokens, 2, next(seeds)), path="/completions")
                found[f"first of {tokens}"] = exchange.ttft_s or 0.0
    return found


def rank_memory() -> int:
    """Bytes that the ranks of the server that this process started hold, shared pages counted by parts."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        if "rank" in process.cmdline()[:6]:
            info = process.memory_full_info()
            total += getattr(info, "pss", info.rss)
    return total


def predicted(plan: GroupPlan) -> dict[str, float]:
    """The prediction, under the same names."""
    assert plan.speed is not None
    rates = {f"tokens/s x{streams}": rate for streams, rate in plan.speed.tokens_per_s.items()}
    return rates | {f"first of {tokens}": s for tokens, s in plan.speed.ttft_s.items() if tokens <= LONGEST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of plans")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure the machine even if it is known")
    given = parser.parse_args()
    wanted = PlanRequest(model=str(given.model), ranks_here=given.ranks, again=given.again, context=PROMPT + OUTPUT)
    planned = asyncio.run(make_plans(wanted))
    rows: list[dict[str, Any]] = []
    for plan in planned.plans:
        name = plan.candidate.name
        if plan.fit.problem or (given.only and name not in given.only):
            continue
        shape = ["--tp", str(plan.candidate.width), "--pp", str(plan.candidate.stages)]
        with phalanx(given.model, *shape, "--prefix-cache-gb", "0", "--kv-cache-gb", "1") as url:
            idle = rank_memory()
            found = asyncio.run(measure(url, plan, given.rounds))
        weights = sum(rank.weights for rank in plan.fit.ranks)
        print(f"{name}: ranks hold {idle / MIB:.0f} MiB, weights {weights / MIB:.0f} MiB")
        for figure, value in predicted(plan).items():
            ratio = found[figure] / value
            rows.append({"plan": name, "figure": figure, "predicted": value, "measured": found[figure], "ratio": ratio})
            print(f"  {figure:16} predicted {value:8.2f}  measured {found[figure]:8.2f}  ratio {ratio:.2f}", flush=True)
    near = sum(0.75 <= row["ratio"] <= 1.25 for row in rows)
    print(json.dumps({"within 25 %": near, "of": len(rows), "rows": rows}))


if __name__ == "__main__":
    main()
