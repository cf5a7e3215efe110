"""What `phalanx plan` predicts for this machine or for two hosts of the rig, beside what the plans then do.

What to expect. The prediction adds up layers and a small model's server that were measured minutes before, on the same
machine, so 80 % of the figures should be within a quarter of what is measured. Processes that share processors cost
most of the difference. The recommended plan should be the best measured one, or within 10 % of it.

Each plan is served as a user would start it. TTFT is that of a prompt that is in no cache; tokens/s are those while all
streams decode, behind short prompts. With --rates the hosts are namespaces with one processor each, joined by a link
that `tc tbf` limits; they and their links measure themselves. The last line is one JSON object; --to appends it to a
file, of which --table makes the tables of docs/planning.md.

    python benchmarks/planning.py demo "$(phalanx pull smollm2)" qwen3-moe --ranks 2 --to planning.jsonl
    python benchmarks/planning.py demo --rates 1gbit 100mbit --to planning.jsonl
    python benchmarks/planning.py --table planning.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from planning_table import table
from servers import phalanx

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import closed_loop
from phalanx.cluster.hostfile_parser import parse
from phalanx.cluster.planner import Planned, PlanRequest, make_plans
from phalanx.memory import MIB
from phalanx.planning.predictor import Speed
from phalanx.planning.recommendation import GroupPlan, recommend

PROMPT = 8  # tokens before those that are counted: all streams have to decode at the same time
LONGEST = 4000  # tokens of a prompt that is timed; longer ones take minutes on a CPU
LONGEST_S = 12.0  # of a prediction that is put to the test
OUTPUT = 64
SHORTEST_S = 0.25  # of streams that are measured: those of a tiny model write more tokens
QUIET = 0.04  # of the processors' time that other programs may take; a figure with more is measured again
TRIES = 3
CONTEXT = 160  # tokens of a decoding row, for which rates are predicted
GUARD = ("--memory-guard-gb", "0.5")
SERVE = ("--prefix-cache-gb", "0", "--kv-cache-gb", "1", *GUARD)
ROOT = Path(__file__).resolve().parent.parent


def body(tokens: int, n: int, seed: int, name: str) -> dict[str, Any]:
    """A completion of so many random tokens."""
    source = random.Random(seed)
    prompt = [source.randrange(300, 2000) for _ in range(tokens)]
    return {
        "model": name, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True,
        "skip_special_tokens": False,  # each token has a text, so that it shows when it comes
    }  # fmt: skip


async def measure(url: str, plan: GroupPlan, given: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """The same figures as the prediction has, each with the share of other programs: unknown of a rig's hosts."""
    name, rounds = "default_model", given.rounds
    found = {}
    seeds = iter(range(1, 10_000))
    async with open_client(url) as client:
        await stream_chat(client, body(2 * PROMPT, 32, next(seeds), name), path="/completions")
        for figure in predicted(plan):
            tries: list[tuple[float, float]] = []
            while len(tries) < TRIES and (not tries or tries[-1][0] > QUIET):
                others = OtherPrograms()
                values = [await measure_once(client, plan, figure, name, seeds) for _ in range(rounds)]
                share = others.share() if given.hostfile is None else 0.0
                tries.append((share, statistics.median(values)))
            share, value = min(tries)
            found[figure] = (value, share)
    return found


async def measure_once(
    client: httpx.AsyncClient, plan: GroupPlan, figure: str, name: str, seeds: Iterator[int]
) -> float:
    """One value of a figure."""
    assert plan.speed is not None
    kind, _, number = figure.rpartition(" ")
    if kind == "first of":
        exchange = await stream_chat(client, body(int(number), 2, next(seeds), name), path="/completions")
        return exchange.ttft_s or 0.0
    streams = int(number.removeprefix("x"))
    bodies = [body(PROMPT, output_of(streams, plan.speed), next(seeds), name) for _ in range(streams)]
    return (await closed_loop(client, bodies, streams, path="/completions")).decode_tokens_per_s


def output_of(streams: int, speed: Speed) -> int:
    """Tokens of each of so many streams: what the first writes until the last has begun, and those that are timed."""
    begun_s = streams * PROMPT * speed.ttft_s[512] / 512
    timed = SHORTEST_S * speed.tokens_per_s[streams] / streams
    return int(max(OUTPUT, timed) + 2 * begun_s * speed.tokens_per_s[1])


class OtherPrograms:
    """The share of the processors' time that programs take that this one has not started."""

    def __init__(self) -> None:
        self._at, self._busy, self._own = time.perf_counter(), *self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float]:
        every = psutil.cpu_times()
        own = 0.0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                own += sum(process.cpu_times()[:4])  # with those of children that have ended
        return sum(every) - every.idle - getattr(every, "iowait", 0.0), own

    @property
    def seconds(self) -> float:
        """Since this object was made."""
        return time.perf_counter() - self._at

    def share(self) -> float:
        """Since this object was made."""
        busy, own = self._seconds()
        wall = self.seconds * (psutil.cpu_count() or 1)
        return max(0.0, (busy - self._busy) - (own - self._own)) / wall


def predicted(plan: GroupPlan) -> dict[str, float]:
    """The prediction by figure, without those that would take long to measure."""
    assert plan.speed is not None
    rates = {
        f"tokens/s x{streams}": rate
        for streams, rate in plan.speed.tokens_per_s.items()
        if streams * output_of(streams, plan.speed) < LONGEST_S * rate
    }
    firsts = {f"first of {tokens}": s for tokens, s in plan.speed.ttft_s.items() if tokens <= LONGEST and s < LONGEST_S}
    return rates | firsts


def rank_memory() -> int:
    """Bytes that the ranks of the server that this process started hold, shared pages counted by parts."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        if "rank" in process.cmdline()[:6]:
            info = process.memory_full_info()
            total += getattr(info, "pss", info.rss)
    return total


@contextmanager
def served(model: str, plan: GroupPlan, hostfile: Path | None) -> Iterator[str]:
    """The URL of the plan's server: on this machine, or on the hosts of the plan."""
    shape = ("--tp", str(plan.candidate.width), "--pp", str(plan.candidate.stages))
    if hostfile is None:
        with phalanx(Path(model), *shape, *SERVE) as url:
            yield url
        return
    count = str(len(plan.candidate.hosts))
    words = ("--", model, *shape, *SERVE, "--host", "0.0.0.0", "--served-model-name", "default_model")
    up = [sys.executable, "-m", "phalanx", "up", str(hostfile), "-n", count, *words]
    said = subprocess.run(up, check=True, capture_output=True, text=True).stdout
    try:
        yield said.partition("phalanx is up: ")[2].split()[0]
    finally:
        subprocess.run([sys.executable, "-m", "phalanx", "down", str(hostfile)], check=True, capture_output=True)


def wanted(model: str, given: argparse.Namespace) -> PlanRequest:
    """The plans to test."""
    file = None if given.hostfile is None else parse(given.hostfile.read_text(), str(given.hostfile))
    return PlanRequest(
        model=model, hostfile=file, ranks_here=given.ranks, context=CONTEXT, replicas=False, guard_gb=0.5
    )


def compare(model: str, planned: Planned, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table: one figure of one plan each."""
    for plan in planned.plans:
        if plan.fit.problem or (given.only and plan.candidate.name not in given.only):
            continue
        if given.hostfile is not None and len(plan.candidate.hosts) == 1:
            continue  # as on this machine, with one processor
        with served(model, plan, given.hostfile) as url:
            idle = rank_memory()
            found = asyncio.run(measure(url, plan, given))
        if given.hostfile is None:
            ranks = sum(rank.process + rank.weights for rank in plan.fit.ranks)
            print(f"{plan.candidate.name}: ranks hold {idle / MIB:.0f} MiB, {ranks / MIB:.0f} MiB with the server")
        for figure, value in predicted(plan).items():
            measured, share = found[figure]
            ratio = measured / value
            print(
                f"  {figure:16} predicted {value:8.2f}  measured {measured:8.2f}  ratio {ratio:.2f}  "
                f"others {share:.0%}", flush=True,
            )  # fmt: skip
            yield {
                "model": Path(model).name, "link": given.link, "plan": plan.candidate.name, "figure": figure,
                "predicted": value, "measured": measured, "ratio": ratio, "others": share,
            }  # fmt: skip


def on_hosts(given: argparse.Namespace, rates: list[str]) -> None:
    """Run this script at the desk of a rig of two hosts, once for each rate of their link."""
    sys.path.insert(0, str(ROOT / "tests" / "e2e" / "hosts"))
    from rig import CHECKOUT, HOME, SYSTEM_PATH, rig  # type: ignore[import-not-found]  # noqa: PLC0415 - of the tests

    variables = {
        "PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT / 'benchmarks'}",
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with rig(["desk", "a", "b"], variables) as hosts:
        for number, name in enumerate("ab"):
            subprocess.run(["taskset", "-apc", str(number), str(hosts[name].pid)], check=True, capture_output=True)
        entries = [{"ssh": name, "ips": [hosts[name].address]} for name in "ab"]
        (hosts["desk"].home / "2.json").write_text(json.dumps({"hosts": entries}))
        results = hosts["desk"].home / "out.jsonl"
        for rate in rates:
            for name in "ab":
                shape = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate]
                hosts[name].run([*shape, "burst", "256k", "latency", "50ms"])
            words = [*given.models, "--hostfile", str(HOME / "2.json"), "--link", rate, "--to", str(HOME / "out.jsonl")]
            script = ["python", str(CHECKOUT / "benchmarks" / "planning.py"), *words, "--rounds", str(given.rounds)]
            print(hosts["desk"].run([*script, *(["--only", *given.only] if given.only else [])]).stdout, flush=True)
        if given.to is not None:
            with given.to.open("a") as file:
                file.write(results.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names or directories")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of plans")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rates", nargs="*", default=[], help="of the link between two hosts of the rig, as for tc")
    parser.add_argument("--hostfile", type=Path, help="measure these hosts")
    parser.add_argument("--link", default="", help="name of their link, for the table")
    parser.add_argument("--to", type=Path, help="append the results to this file")
    parser.add_argument("--table", type=Path, help="print the tables of such a file, and measure nothing")
    given = parser.parse_args()
    if given.table is not None:
        print(table([json.loads(line) for line in given.table.read_text().splitlines()]))
        return
    if given.rates:
        on_hosts(given, given.rates)
        return
    for model in given.models:
        others = OtherPrograms()
        planned = asyncio.run(make_plans(wanted(model, given)))
        print(f"{Path(model).name}: measured itself in {others.seconds:.0f} s, other programs {others.share():.0%}")
        rows = list(compare(model, planned, given))
        best = {wish: recommend(planned.plans, wish) for wish in ("latency", "throughput")}
        result = {
            "rows": rows, "recommended": {wish: one.plan.candidate.name for wish, one in best.items() if one},
            "within 25 %": sum(0.75 <= row["ratio"] <= 1.25 for row in rows), "of": len(rows),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
        if given.to is not None:
            with given.to.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("PHALANX_MEMORY_GUARD_GB", "0.5")
    main()
