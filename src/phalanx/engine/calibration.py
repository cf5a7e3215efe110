"""Measures the time of a model's layers on this machine without loading the whole model: with few layers, then more.

A leader in this process runs real steps (scheduler, model, sampler, commit) on some of the model's layers with their
real weights; the other layers return their input. The time per layer is the slope, everything else the intercept.

`python -m phalanx.engine.calibration` takes a line of JSON with a `CalibrationRequest` and prints `Ready`; for each
further line, `decode` or `prompt`, it prints one line of measurements. So several processes can measure at the same
time, like the ranks of one machine.
"""

from __future__ import annotations

import phalanx.kernels.preload  # noqa: F401  (before anything loads MLX)

# isort: split
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import mlx.core as mx
import msgspec
from msgspec import Struct

from phalanx.dist.stage_link import StageConnections
from phalanx.engine.leader import Leader
from phalanx.engine.link import SingleRank
from phalanx.engine.model_shape_reader import ShardReducer, lazy_model, prepare_kernels
from phalanx.engine.server_socket import ServerSocket
from phalanx.engine.stages import StagedRunner
from phalanx.engine.step_deadline import StepDeadline
from phalanx.errors import EngineError, PhalanxError
from phalanx.model import registry
from phalanx.model.loading import load
from phalanx.model.loading.layer_trace import trace
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner
from phalanx.model.stage import Stage, hollow
from phalanx.planning.fit import Chunk, Decode, Measured
from phalanx.sched.admission import KvLimits
from phalanx.sched.prefill_budget import prefill_bounds
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.spec.running_grammars import Grammars
from phalanx.text.grammar import GrammarCompiler
from phalanx.types import Cancel, FromEngine, Sampling, SequenceRequest, StopRule, Submit

FEW = 2  # layers of the first measurement
MORE_BYTES = 128 << 20  # of further weights in the second one: more than fits in processor caches
ROWS = (1, 4, 16)
SHORT, LONG = 32, 1024  # context of decoding rows, in tokens
READ = 2560  # tokens of the timed prompt, of several chunks: only over these the cost of context shows
STEPS = 16  # timed decode steps at least
MAX_STEPS = 128  # at most
TIMED_S = 0.1  # of timed steps, unless they are MAX_STEPS: steps of a tiny model are shorter than the clock's noise
SKIPPED = 8  # untimed steps after the first token, in which graphs are captured
TURNS = 2  # of each bench for the same figure: what else the machine does then meets both


class CalibrationRequest(Struct, frozen=True, kw_only=True):
    """The model and the rank to measure."""

    path: str
    degree: int = 1
    """Ranks that share each layer."""
    ranks_here: int = 1
    """Ranks on this machine, which share its processors."""
    threads: int | None = None


class _Passing(Stage):
    """Makes layers that are left out return their input."""

    def hand_on(self, layer: int, incoming: mx.array) -> mx.array:
        """The layer's input."""
        return incoming


class _NoServer:
    """Replaces the server's socket; discards events."""

    def send(self, message: FromEngine) -> None:
        """Does nothing."""


class Bench:
    """Some layers of a model, and a leader that runs steps on them."""

    def __init__(self, request: CalibrationRequest, count: int) -> None:
        path = Path(request.path)
        reducer = ShardReducer(request.degree)
        found = trace(lazy_model(path), path.name)
        prepared = load.prepare(path, dtype="auto", trust_remote_code=False, reducer=reducer)
        kept = chosen_layers(len(found.places), count)
        facts = registry.inspect(prepared.model, prepared.config)
        reducer.discard()
        passing = _Passing(path.name, 0, len(found.places), len(found.places), found.width, facts)
        for number, layer in enumerate(prepared.model.layers):
            if number not in kept:
                hollow(layer, passing, number, found.places[number])
        plan = [entry for entry in prepared.plan if found.layer_of.get(entry.name, kept[0]) in kept]
        loaded = replace(prepared, plan=plan).materialise(0, lambda *_: None)
        absorb_short_queries(loaded.model)
        self.weights = loaded.weights_bytes
        self.count = len(kept)
        self._leader = _leader(loaded, reducer, stages=request.ranks_here // request.degree)
        self._number = 0

    def decode(self, rows: int, context: int) -> list[float]:
        """Seconds of steps that decode `rows` rows, each after a prompt of `context` tokens."""
        names = self._submit(rows, context, MAX_STEPS + SKIPPED + 1)
        while self._leader.scheduler.counters.generated_tokens < self._started + rows * SKIPPED:
            self._leader.step()
        seconds: list[float] = []
        while len(seconds) < STEPS or (sum(seconds) < TIMED_S and len(seconds) < MAX_STEPS):
            before = time.perf_counter()
            self._leader.step()
            seconds.append(time.perf_counter() - before)
        for name in names:
            self._leader.handle(Cancel(name))
        while self._leader.scheduler.by_id:
            self._leader.step()
        return seconds

    def prompt(self, tokens: int) -> list[Chunk]:
        """The chunks of one prompt, except the last one, which also samples."""
        self._submit(1, tokens, 1)
        chunks: list[Chunk] = []
        done = 0
        while self._leader.scheduler.by_id:
            before = self._leader.scheduler.counters.prefill_tokens
            started = time.perf_counter()
            self._leader.step()
            seconds = time.perf_counter() - started
            n = self._leader.scheduler.counters.prefill_tokens - before
            chunks.append(Chunk(layers=self.count, tokens=n, context=done, seconds=seconds))
            done += n
        return chunks[:-1]

    def _submit(self, rows: int, context: int, n: int) -> list[str]:
        """Submit prompts; returns their ids."""
        self._started = self._leader.scheduler.counters.generated_tokens
        names = []
        for _ in range(rows):
            self._number += 1
            prompt = [(7919 * (i + self._number)) % 250 for i in range(context)]
            name = f"calibration/{self._number}"
            request = SequenceRequest(
                id=name, group=name, prompt=prompt, sampling=Sampling(temperature=0.0), stop=StopRule(max_tokens=n)
            )
            self._leader.handle(Submit(request))
            names.append(name)
        return names


def chosen_layers(n_layers: int, count: int) -> list[int]:
    """The layers to keep: the first two, which models use to choose masks, and others evenly spread."""
    count = min(count, n_layers)
    first = list(range(min(FEW, count)))
    rest = count - len(first)
    others = range(len(first), n_layers)
    return [*first, *(others[i * len(others) // rest] for i in range(rest))]


def counts_of(layer_bytes: Sequence[int]) -> tuple[int, int]:
    """Numbers of layers of the two measurements."""
    n = len(layer_bytes)
    if sum(layer_bytes) <= 2 * MORE_BYTES:
        return max(1, n // 2), n
    mean = max(1, sum(layer_bytes) // n)
    few = min(FEW, n - 1)
    return few, min(n, few + max(2, -(-MORE_BYTES // mean)))


def _leader(loaded: load.Loaded, reducer: ShardReducer, stages: int) -> Leader:
    facts = registry.inspect(loaded.model, loaded.config)
    reducer.discard()
    runner = Runner(loaded.model, facts, loaded.dtype, reducer)
    most = READ + 256
    limits = KvLimits(
        max_num_seqs=max(ROWS), max_model_len=most,
        kv_budget=(max(ROWS) * 2 * most) * max(1, facts.bytes_per_token) + 32 * facts.bytes_per_row,
        bytes_per_token=facts.bytes_per_token, bytes_per_row=facts.bytes_per_row,
    )  # fmt: skip
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    bounds = prefill_bounds(on_gpu=on_gpu, stages=stages, max_tokens=None, rows=max(ROWS))
    config = SchedulerConfig(
        limits=limits,
        prefill=bounds._replace(first=bounds.max_tokens),
        target_step_s=0.25,
        decode_share=0.0,
        prefix_budget=0,
        recurrent=facts.recurrent,
    )
    return Leader(
        Scheduler(config),
        StagedRunner(runner, 0, StageConnections(None, ()), str(loaded.dtype)),
        cast(ServerSocket, _NoServer()),
        link=SingleRank(),
        deadline=StepDeadline(600.0),
        grammars=Grammars(_no_grammars, lambda: None),
    )


def _no_grammars() -> GrammarCompiler:
    raise EngineError("A calibration has no grammars.")


class Calibration:
    """The two benches of one rank."""

    def __init__(self, request: CalibrationRequest, counts: tuple[int, int]) -> None:
        self._benches = [Bench(request, count) for count in dict.fromkeys(counts)]

    def decode(self) -> Measured:
        """Steps with different numbers of rows, and one row with a long context. The benches take turns."""
        found: list[Decode] = []
        for rows, context in (*((rows, SHORT) for rows in ROWS), (1, LONG)):
            timed: dict[Bench, list[float]] = {bench: [] for bench in self._benches}
            for bench in self._benches * TURNS:
                timed[bench] += bench.decode(rows, context)
            for bench, steps in timed.items():
                seconds = sorted(steps)
                quarter = len(seconds) // 4
                found.append(
                    Decode(
                        layers=bench.count, rows=rows, context=context, seconds=statistics.median(seconds),
                        spread=(seconds[-1 - quarter] - seconds[quarter]) / 2 / statistics.median(seconds),
                    )
                )  # fmt: skip
        return Measured(decode=found)

    def prompt(self) -> Measured:
        """The chunks of a long prompt."""
        chunks = [chunk for bench in self._benches for chunk in bench.prompt(READ)]
        return Measured(chunks=chunks)


def main() -> None:
    """Answer the lines on stdin."""
    try:
        request = msgspec.json.decode(sys.stdin.readline(), type=CalibrationRequest)
        prepare_kernels(request.threads, request.ranks_here)
        calibration = Calibration(request, _counts(Path(request.path)))
        print("Ready", flush=True)
        for line in sys.stdin:
            found = calibration.decode() if line.strip() == "decode" else calibration.prompt()
            print(msgspec.json.encode(found).decode(), flush=True)
    except PhalanxError as error:
        sys.exit(str(error))


def _counts(path: Path) -> tuple[int, int]:
    prepared = load.prepare(path, dtype="auto", trust_remote_code=False)
    found = trace(lazy_model(path), path.name)
    sizes = [0] * len(found.places)
    for entry in prepared.plan:
        if entry.name in found.layer_of:
            sizes[found.layer_of[entry.name]] += entry.nbytes
    return counts_of(sizes)


if __name__ == "__main__":
    main()
