"""How much faster a long prompt is computed when its chunks follow each other through two stages.

The baseline is the same pipeline with the whole prompt in one chunk: then one stage waits for the other. A single rank
shows what the size of a chunk changes by itself. Requests take turns; a stage's busy share is the processor time of its
rank over the wall time, with one thread each.

    python benchmarks/stages.py path/to/model --tokens 4000 --chunk 512 --runs 5

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

WARM_UP = 1  # request of each server that is not counted


def main() -> None:
    options = _options()
    whole = options.tokens + 64
    stages = ("--pp", "2", *(("--pp-split", options.pp_split) if options.pp_split else ()))
    settings = {
        "stages, chunks": (*stages, "--max-num-batched-tokens", str(options.chunk)),
        "stages, whole": (*stages, "--max-num-batched-tokens", str(whole)),
        "one rank, chunks": ("--max-num-batched-tokens", str(options.chunk)),
        "one rank, whole": ("--max-num-batched-tokens", str(whole)),
    }
    common = ("--threads", "1", "--prefix-cache-gb", "0", "--max-num-seqs", "1", "--target-step-ms", "10000")
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    shares: dict[str, list[list[float]]] = {name: [] for name in settings}
    with ExitStack() as servers:
        urls = {name: servers.enter_context(phalanx(options.model, *common, *own)) for name, own in settings.items()}
        for run in range(WARM_UP + options.runs):
            for name, url in urls.items():
                took, busy = first_token(url, [3 + (run * 7 + i * 31) % 1000 for i in range(options.tokens)])
                if run >= WARM_UP:
                    seconds[name].append(took)
                    shares[name].append(busy)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        busy = [round(statistics.mean(each), 2) for each in zip(*shares[name], strict=True)]
        print(f"{name}: {' '.join(f'{value:.2f}' for value in values)} s, median {medians[name]:.2f} s, busy {busy}")
    ratio = medians["stages, whole"] / medians["stages, chunks"]
    alone = medians["one rank, whole"] / medians["one rank, chunks"]
    print(json.dumps({"benchmark": "stages", "tokens": options.tokens, "chunk": options.chunk,
                      "ratio": round(ratio, 2), "of_chunks_alone": round(alone, 2)}))  # fmt: skip


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


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="of two layers at least")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--pp-split", help="as of `phalanx serve`: the default counts what decoding reads")
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
