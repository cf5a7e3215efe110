"""The cost of checked sums over ranks (A6): decode steps with checked sums against steps without.

The limit is 2 % of a step, and two servers differ by more. The same two processes therefore run both kinds of steps on
the same weights, in alternating blocks. The ranks use mpi and one thread each. A step is the model call with all sums
and their check; a server does a little more per step, so the share of the sums is smaller there.

    python benchmarks/checked_sums.py [--model llama-1b] [--blocks 60]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import phalanx.kernels.preload  # noqa: F401  # isort: skip  (before MLX, as in every rank)
import mlx.core as mx
from cpu_models import SHAPES, write_mlx

from phalanx import memory
from phalanx.dist.collective_backend import environment_of, mpirun_command
from phalanx.dist.group import join
from phalanx.dist.reduce import Reducer
from phalanx.kernels import install
from phalanx.kernels.native_checksum import NativeChecksum
from phalanx.model import registry
from phalanx.model.loading import load
from phalanx.model.runner import Runner
from phalanx.sched.plan import Admit, Forward, Resize

RANKS = 2
BLOCK = 8  # steps
WARM = 8  # blocks before measuring, in which the graph cache captures the steps
CONTEXT = 128
ROWS = (1, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="llama-1b")
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
    parser.add_argument("--folder", type=Path, help="where models are kept; else they are written anew")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.blocks)
        return 0
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        model = write_mlx(SHAPES[options.model], options.folder or Path(directory))
        command = [sys.executable, __file__, "--rank", str(model), "--blocks", str(options.blocks)]
        environment = {**os.environ, **environment_of("mpi", None, None)}
        ranks = mpirun_command(RANKS, "auto", command)
        done = subprocess.run(ranks, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(done.stdout.splitlines()[-1])
    for rows, figures in results.items():
        print(
            f"{rows} row{'s' if rows != '1' else ''}: {figures['checked_ms']:.2f} ms checked, "
            f"{figures['unchecked_ms']:.2f} without; {100 * figures['share']:+.1f} % "
            f"({100 * figures['quartiles'][0]:+.1f} .. {100 * figures['quartiles'][1]:+.1f})"
        )
    print(json.dumps({"benchmark": "checked sums", "model": options.model, "blocks": options.blocks, "rows": results}))
    return 0


def run_rank(path: Path, blocks: int) -> None:
    """One rank; rank 0 prints its figures as JSON."""
    logging.disable(logging.INFO)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    mx.disable_compile()
    install.install("fast", 1, async_dispatch=False)
    reducer = Reducer(join("mpi", rank, RANKS, 5, where="", deadline_s=60), checksum=NativeChecksum())
    prepared = load.prepare(path, dtype="auto", trust_remote_code=False, reducer=reducer)
    loaded = prepared.materialise(
        memory.guard_bytes(memory.read_machine()), lambda *_: None, ranks_here=RANKS, sharing=RANKS
    )
    facts = registry.inspect(loaded.model, loaded.config)
    reducer.discard()  # `inspect` only builds
    results = {rows: compare(loaded, facts, reducer, rows, blocks) for rows in ROWS}
    if rank == 0:
        print(json.dumps(results))


def compare(loaded: load.Loaded, facts: Any, reducer: Reducer, rows: int, blocks: int) -> dict[str, Any]:
    """Seconds per step of both kinds in alternating blocks, with `rows` rows."""
    kinds = {
        checked: Steps(Runner(loaded.model, facts, loaded.dtype, reducer), rows, blocks) for checked in (True, False)
    }
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(WARM + blocks):
        for checked in (True, False) if turn % 2 else (False, True):
            reducer.checked = checked
            seconds = kinds[checked].block()
            if turn >= WARM:
                times[checked].append(seconds)
    shares = [mine / without - 1.0 for mine, without in zip(times[True], times[False], strict=True)]
    low, _, high = statistics.quantiles(shares, n=4)
    return {
        "checked_ms": 1e3 * statistics.median(times[True]),
        "unchecked_ms": 1e3 * statistics.median(times[False]),
        "share": statistics.median(shares),
        "quartiles": [low, high],
    }


class Steps:
    """Decode steps of some rows, on a separate runner."""

    def __init__(self, runner: Runner, rows: int, blocks: int) -> None:
        self._runner = runner
        self._rows = rows
        self._length = 0
        runner.samples = runner.reducer.rank == 0
        runner.apply(
            [Resize(0, rows, CONTEXT + BLOCK * (WARM + blocks + 1)), *(Admit(0, slot, slot) for slot in range(rows))]
        )
        self._feed(CONTEXT, sample=False)

    def block(self) -> float:
        """Run a block of steps. Returns the median seconds per step."""
        times = []
        for _ in range(BLOCK):
            started = time.perf_counter()
            self._feed(1, sample=True)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def _feed(self, tokens: int, *, sample: bool) -> None:
        fed = tuple((7,) * tokens for _ in range(self._rows))
        forward = Forward(0, 0, tuple(range(self._rows)), fed, (tokens,) * self._rows, sample)
        logits = self._runner.forward(forward, [self._length] * self._rows)
        if logits is not None:
            mx.eval(logits, self._runner.written_caches())
        self._length += tokens


if __name__ == "__main__":
    sys.exit(main())
