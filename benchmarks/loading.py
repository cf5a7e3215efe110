"""Loading one rank's part of a model: memory, bytes and time, against mlx-lm's own way in the same run.

A rank of N needs 1/N of most tensors. mlx-lm's `sharded_load` builds lazy slices of whole tensors and evaluates them
all: every rank reads everything, and whole tensors are in memory beside their slices. Phalanx copies a rank's rows out
of the files, tensor by tensor. The figures are

- peak resident memory of a rank (sampled, above what the process had before): at most its part of the weights, the
  part of the largest tensor, and 300 MB;
- bytes copied from files: at most the part and 1 %;
- bytes that the disk reads when nothing is cached: a rank with columns of a matrix still touches every page of it if
  half a row is shorter than a page;
- time: at most 0.8 of mlx-lm's, for one rank with nothing cached, as on a machine of its own, and for both ranks at
  once with everything cached. (With nothing cached and both ranks on one disk, the disk reads everything either way:
  that ratio shows how well the disk is kept busy.)

A virtual machine may have returned free memory to its host; touching that memory again takes up to 3 s per GB. Every
run of either method therefore first touches as much memory as it will need, and frees it.

Two models of 2.1 GB in 4 bits are written to a temporary directory: a llama and a mixture of experts. Ranks are
processes without a group: loading needs none. Ends in one JSON line.

    python benchmarks/loading.py [--rounds 3] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import phalanx.kernels.preload  # noqa: F401  # isort: skip  (before MLX, as in every rank)
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from phalanx.kernels import install
from phalanx.model.loading.load import prepare

RANKS = 2
GROUP_SIZE, BITS = 64, 4
SPARE = 300_000_000  # bytes a rank may hold above its part and the part of the largest tensor
COMMON = {
    "rms_norm_eps": 1e-5, "vocab_size": 32_000, "max_position_embeddings": 4096, "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "head_dim": 128,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON, "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 20, "intermediate_size": 11_008,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "experts": {
        **COMMON, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 12, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
}  # fmt: skip
METHODS = ("phalanx", "mlx-lm")
STATES = {"alone, cold": (1, True), "both, cold": (2, True), "both, warm": (2, False)}
"""Number of ranks that load at once, and whether the page cache was dropped."""


def write_model(name: str, path: Path) -> None:
    """Random 4-bit weights with float16 scales, one file per four layers."""
    path.mkdir(parents=True)
    config = {**CONFIGS[name], "quantization": {"group_size": GROUP_SIZE, "bits": BITS}}
    (path / "config.json").write_text(json.dumps(config))
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    nn.quantize(model, group_size=GROUP_SIZE, bits=BITS)
    random = np.random.default_rng(0)
    shards: dict[int, dict[str, mx.array]] = {}
    for parameter, array in tree_flatten(model.parameters()):
        layer = next((int(part) for part in parameter.split(".") if part.isdigit()), -4)
        words = array.dtype == mx.uint32
        data = random.integers(0, 1 << 32 if words else 15_000, array.shape, np.uint32 if words else np.uint16)
        shards.setdefault(layer // 4, {})[parameter] = mx.array(data) if words else mx.array(data).view(mx.float16)
    for number, tensors in enumerate(shards.values(), 1):
        file = path / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # only clean pages can be dropped


# -- one rank, in a subprocess -------------------------------------------------------------------------------------


class Rank:
    """A rank of a simulated group, as mlx-lm's recipes and phalanx's loader use one."""

    group = None

    def __init__(self, number: int) -> None:
        self.number = number
        self.sites: list[str] = []

    rank = property(lambda self: self.number)
    size = RANKS

    def site(self, name: str, width: int) -> int:
        self.sites.append(name)
        return len(self.sites) - 1

    def all_sum(self, y: mx.array, site: int) -> mx.array:
        raise NotImplementedError("loading does not compute")


@dataclass(frozen=True)
class StubGroup:
    """The same rank for mlx-lm, which calls methods."""

    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return RANKS


class Watch(threading.Thread):
    """A thread that samples this process's resident memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = self.now()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.004):
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def back_memory(path: Path) -> None:
    """Touch as much memory as loading may take, the page cache included, and free it."""
    size = 2 * sum(file.stat().st_size for file in path.glob("*.safetensors"))
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        touched = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        touched[:] = 1
        del touched  # or the mapping cannot be closed


def disk_bytes() -> int:
    """Bytes that the disk read for this process."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"])


def run_rank(method: str, path: Path, number: int, together: int) -> dict[str, Any]:
    """Load one rank's part while `together` ranks load. Returns the figures."""
    mx.set_default_device(mx.cpu)
    mx.eval(mx.zeros(1))
    copied = None
    if method == "phalanx":
        install.install("exact", install.threads_for(RANKS))
    back_memory(path)
    watch = Watch()
    watch.start()
    disk, cpu, started = disk_bytes(), time.process_time(), time.perf_counter()
    if method == "phalanx":
        reducer: Any = Rank(number)
        prepared = prepare(path, dtype="float16", trust_remote_code=False, reducer=reducer)
        loaded = prepared.materialise(0, lambda *_: None, ranks_here=together)
        model, copied = loaded.model, loaded.copied_bytes
    else:
        model, _ = load_model(path, lazy=True, strict=False)
        model.shard(StubGroup(number))
        mx.eval(model.parameters())
    seconds = time.perf_counter() - started
    watch.ended.set()
    sizes = [array.nbytes for _, array in tree_flatten(model.parameters())]
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "disk": disk_bytes() - disk,
        "peak": max(watch.peak, watch.now()) - watch.before,
        "part": sum(sizes),
        "largest": max(sizes),
        "copied": copied,
    }


# -- all ranks -----------------------------------------------------------------------------------------------------


def drop_cache(path: Path) -> None:
    """Drop the model's files from the page cache."""
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_ranks(method: str, path: Path, ranks: int, cold: bool) -> list[dict[str, Any]]:
    """Load the first `ranks` ranks at once."""
    if cold:
        drop_cache(path)
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", method, str(path), str(ranks)]
    children = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(ranks)]
    answers = [child.communicate()[0] for child in children]
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Measure both methods in turn. Times are the slower rank's of the fastest round; sizes are the larger rank's."""
    runs: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for _ in range(rounds):
        for state, (ranks, cold) in STATES.items():
            for method in METHODS:
                runs.setdefault((method, state), []).append(run_ranks(method, path, ranks, cold))
    ours = [rank for (method, _), run in runs.items() for ranks in run for rank in ranks if method == "phalanx"]
    figures = {
        f"{method}, {state}": {
            "seconds": min(max(rank["seconds"] for rank in ranks) for ranks in run),
            "cpu_seconds": min(max(rank["cpu_seconds"] for rank in ranks) for ranks in run),
            "disk": statistics.median(sum(rank["disk"] for rank in ranks) for ranks in run),
            "peak": max(rank["peak"] for ranks in run for rank in ranks),
        }
        for (method, state), run in runs.items()
    }
    part, largest, copied = (max(rank[key] for rank in ours) for key in ("part", "largest", "copied"))
    ratios = {s: figures[f"phalanx, {s}"]["seconds"] / figures[f"mlx-lm, {s}"]["seconds"] for s in STATES}
    return {
        "model": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "part": part,
        "largest": largest,
        "copied": copied,
        "runs": figures,
        "time_ratio": ratios,
        "accepted": {
            "peak": max(rank["peak"] for rank in ours) <= part + largest + SPARE,
            "copied": copied <= 1.01 * part,
            "time": max(ratios["alone, cold"], ratios["both, warm"]) <= 0.8,
        },
    }


def show(name: str, result: dict[str, Any]) -> None:
    """A table of one model."""
    sizes = (f"{what} {result[what] / 1e6:,.0f} MB" for what in ("model", "part", "largest", "copied"))
    print(f"\n{name}: {', '.join(sizes)}")
    print(f"{'':>22} {'s':>7} {'CPU s':>7} {'peak MB':>8} {'disk MB':>8}")
    for run, figures in result["runs"].items():
        print(f"{run:>22} {figures['seconds']:7.2f} {figures['cpu_seconds']:7.2f} "
              f"{figures['peak'] / 1e6:8,.0f} {figures['disk'] / 1e6:8,.0f}")  # fmt: skip
    print(f"accepted: {result['accepted']}")


def main() -> None:
    """Write the models, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the models are written (and removed)")
    parser.add_argument("--rank", nargs=4, metavar=("METHOD", "MODEL", "RANKS", "NUMBER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        method, path, ranks, number = args.rank
        print(json.dumps(run_rank(method, Path(path), int(number), int(ranks))))
        return
    logging.disable(logging.INFO)
    results = {}
    for name in CONFIGS:
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            path = Path(folder) / name
            write_model(name, path)
            results[name] = measure(path, args.rounds)
        show(name, results[name])
    print(json.dumps({"benchmark": "loading", "ranks": RANKS, "rounds": args.rounds, "models": results}))


if __name__ == "__main__":
    main()
