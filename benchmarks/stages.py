"""How much faster two stages read a prompt than one process does, with one thread each and default settings.

A prompt's chunks follow each other through the stages, so two of them can take half the time where each has a processor
and memory of its own. Requests take turns; a rank's busy share is its processor time over the wall time.

    python benchmarks/stages.py path/to/model --tokens 512 2000 6000 --runs 10

Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
from servers import MODEL_NAME, phalanx

WARM_UP = 700  # tokens of a request of each server that is not counted


def main() -> None:
    options = _options()
    split = ("--pp-split", options.pp_split) if options.pp_split else ()
    settings: dict[str, tuple[str, ...]] = {"one process": (), "two stages": ("--pp", "2", *split)}
    common = ("--threads", "1", "--prefix-cache-gb", "0", "--max-num-seqs", "1")
    ratios = {}
    with ExitStack() as servers:
        urls = {name: servers.enter_context(phalanx(options.model, *common, *own)) for name, own in settings.items()}
        for url in urls.values():
            first_token(url, _prompt(0, WARM_UP))
        for tokens in options.tokens:
            turns = [
                {name: first_token(url, _prompt(run, tokens)) for name, url in urls.items()}
                for run in range(options.runs)
            ]
            medians = {name: statistics.median(turn[name][0] for turn in turns) for name in urls}
            ratios[tokens] = round(medians["one process"] / medians["two stages"], 2)
            for name, median in medians.items():
                busy = [
                    round(statistics.mean(each), 2) for each in zip(*(turn[name][1] for turn in turns), strict=True)
                ]
                print(f"{tokens} tokens, {name}: median {median:.2f} s, {tokens / median:.0f} tokens/s, busy {busy}")
    print(json.dumps({"benchmark": "stages", "ratios": ratios}))


def first_token(base_url: str, prompt: list[int]) -> tuple[float, list[float]]:
    """Seconds until the answer to a prompt of these tokens, and the busy share of each rank meanwhile."""
    origin = base_url.removesuffix("/v1")
    ranks = httpx.get(f"{origin}/health", trust_env=False).json()["ranks"]
    processes = [psutil.Process(rank["pid"]) for rank in ranks]
    before, began = [_busy_s(process) for process in processes], time.perf_counter()
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    httpx.post(f"{base_url}/completions", json=body, timeout=600, trust_env=False).raise_for_status()
    took = time.perf_counter() - began
    return took, [(_busy_s(p) - b) / took for p, b in zip(processes, before, strict=True)]


def _prompt(run: int, tokens: int) -> list[int]:
    return [3 + (run * 7 + i * 31) % 1000 for i in range(tokens)]


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="of two layers at least")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2000, 6000], help="of the prompts")
    parser.add_argument("--pp-split", help="as of `phalanx serve`")
    parser.add_argument("--runs", type=int, default=10, help="turns of both servers for each length")
    return parser.parse_args()


if __name__ == "__main__":
    main()
