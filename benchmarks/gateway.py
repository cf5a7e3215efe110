"""What the gateway costs, before a replica that streams 100 events per request and computes nothing.

    latency    at half the rate that the load generator reaches without it: how much later bytes come
    held       1,000 streams at once: each whole, and how late
    memory     over 20,000 requests
    routers    beside nginx, SMG, vLLM's router and LiteLLM's proxy: requests per second of processor time

Processor time per request is the steady figure; times depend on how busy the machine is, so that runs with and without
the gateway take turns. Other routers lie in a folder with a virtual environment for each (`make clients` makes one).
`gateway_report.py` runs the parts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from routers import OURS, Router, Target, installed, running
from sleeping_replica import MODEL, replica
from stream_load import at_once, at_rate, figures, streams

from phalanx.bench.load_generator import percentile

PARTS = ("latency", "held", "memory", "routers")
EVENTS = 100
ROUNDS = 3  # of latency: without, with, and again
SAMPLES = 20  # of memory
WARM_REQUESTS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that `measure` reads."""
    parser.add_argument("--routers", type=Path, help="folder of other routers' environments")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--at-once", type=int, default=8, help="requests under way, where there is no rate")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two events of latency and routers")
    parser.add_argument("--streams", type=int, default=1000, help="held at once")
    parser.add_argument("--held-pause", type=float, default=0.5, help="seconds between two events of those")
    parser.add_argument("--requests", type=int, default=20_000, help="of memory")


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part's figures."""
    if part == "latency":
        return asyncio.run(latency(options.seconds, options.at_once, options.pause))
    if part == "held":
        return asyncio.run(held(options.streams, options.held_pause))
    if part == "memory":
        return asyncio.run(memory(options.requests, options.at_once))
    return beside_others(options.routers, options.seconds, options.at_once, options.pause)


@contextmanager
def gateway(url: str) -> Iterator[Router]:
    """Ours before one replica."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        with running(OURS, None, Target(replicas=(url,), model=MODEL), Path(directory)) as router:
            yield router


async def latency(seconds: float, n: int, pause_s: float) -> dict[str, Any]:
    """Times without and with the gateway, at half the rate that is reached without it."""
    with replica(events=EVENTS, pause_s=pause_s) as url, gateway(url) as router:
        async with streams(url, MODEL) as direct, streams(router.url, MODEL) as through:
            for one in (direct, through):
                await asyncio.gather(*(one.once() for _ in range(WARM_REQUESTS)))
            most, wall_s = await at_once(direct, n, seconds)
            rate = len(most) / wall_s / 2
            rounds = []
            for turn in range(ROUNDS):
                pair = {
                    name: figures(await at_rate(one, rate, seconds, turn))
                    for name, one in (("direct", direct), ("gateway", through))
                }
                rounds.append(pair)
    keys = [f"{what}_ms_p{q}" for what in ("first", "whole") for q in (50, 95, 99)]
    added = {key: [round(pair["gateway"][key] - pair["direct"][key], 2) for pair in rounds] for key in keys}
    return {
        "pause_s": pause_s,
        "direct_requests_per_s": round(len(most) / wall_s, 1),
        "rate_per_s": round(rate, 1),
        "rounds": rounds,
        "added_ms": {key: statistics.median(values) for key, values in added.items()},
    }


async def held(n: int, pause_s: float) -> dict[str, Any]:
    """So many streams begun together: what each needs longer than its pauses."""
    with replica(events=EVENTS, pause_s=pause_s) as url, gateway(url) as router:
        found: dict[str, Any] = {"streams": n, "pause_s": pause_s}
        for name, at in (("direct", url), ("gateway", router.url)):
            before_s = router.cpu_s()
            async with streams(at, MODEL) as stream:
                samples = await asyncio.gather(*(stream.once() for _ in range(n)))
            late = sorted(one.whole - EVENTS * pause_s * 1e3 for one in samples)
            found[name] = {
                "whole": len(samples),
                "late_ms_p50": round(percentile(late, 50), 1),
                "late_ms_p99": round(percentile(late, 99), 1),
            }
            if name == "gateway":
                found[name]["cpu_s"] = round(router.cpu_s() - before_s, 2)
                found[name]["rss_mb"] = round(router.rss_mb(), 1)
    return found


async def memory(n_requests: int, n: int) -> dict[str, Any]:
    """The gateway's memory while it passes so many requests on."""
    with replica(events=EVENTS) as url, gateway(url) as router:
        rss = []
        done = 0
        places = asyncio.Semaphore(n)
        async with streams(router.url, MODEL) as stream:

            async def one() -> None:
                nonlocal done
                async with places:
                    await stream.once()
                done += 1

            for step in range(SAMPLES + 1):
                rss.append({"requests": done, "rss_mb": round(router.rss_mb(), 2)})
                if step < SAMPLES:
                    await asyncio.gather(*(one() for _ in range(n_requests // SAMPLES)))
    half = rss[SAMPLES // 2 :]
    grown = half[-1]["rss_mb"] - half[0]["rss_mb"]
    return {"samples": rss, "grown_mb_in_second_half": round(grown, 2)}


def beside_others(folder: Path | None, seconds: float, n: int, pause_s: float) -> dict[str, Any]:
    """The same load on every router that is there."""
    found, absent = installed(folder)
    results: dict[str, Any] = {}
    with replica(events=EVENTS, pause_s=pause_s) as url:
        for name, path in found.items():
            with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
                target = Target(replicas=(url,), model=MODEL)
                with running(name, path, target, Path(directory)) as router:
                    results[name] = asyncio.run(one_router(router, seconds, n))
        results["none"] = asyncio.run(without(url, seconds, n))
    return {"pause_s": pause_s, "at_once": n, "absent": absent, "results": results}


async def one_router(router: Router, seconds: float, n: int) -> dict[str, float]:
    """Requests per second, of the clock and of processor time."""
    async with streams(router.url, MODEL) as stream:
        await asyncio.gather(*(stream.once() for _ in range(WARM_REQUESTS)))
        before_s = router.cpu_s()
        samples, wall_s = await at_once(stream, n, seconds)
        spent_s = router.cpu_s() - before_s
    return {
        "requests_per_s": round(len(samples) / wall_s, 1),
        "cpu_ms_per_request": round(spent_s / len(samples) * 1e3, 3),
        "requests_per_cpu_s": round(len(samples) / spent_s, 1) if spent_s else float("inf"),
        "rss_mb": round(router.rss_mb(), 1),
        **figures(samples),
    }


async def without(url: str, seconds: float, n: int) -> dict[str, float]:
    """The same load with no router."""
    async with streams(url, MODEL) as stream:
        samples, wall_s = await at_once(stream, n, seconds)
    return {"requests_per_s": round(len(samples) / wall_s, 1), **figures(samples)}
