"""One rank of a group that decodes as the engine does, with and without joined waits; prints rank 0's tokens as JSON.

`mpirun -np N python tests/ranks/joined_waits.py MODEL FAULT_STEP`: rank 0 samples, the others execute. It decodes
without joined waits, with both kinds of them, and with these while at FAULT_STEP the last rank's backend delivers
garbage.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from phalanx.dist.corrupt_buffer import CorruptBuffer
from phalanx.dist.fault_injection import Injection
from phalanx.dist.group import join
from phalanx.dist.reduce import Reducer
from phalanx.errors import CollectiveFault
from phalanx.model import registry
from phalanx.model.loading.load import load
from phalanx.model.overlap import Overlap
from phalanx.model.runner import Runner
from phalanx.model.sampling.sampler import SamplingMetadata, TokenCounts, sample
from phalanx.sched.plan import Admit, Forward, Resize
from phalanx.types import Sampling

PROMPTS = [[5, 9, 11, 60, 7], [8, 3, 21, 40, 2]]
STEPS = 24


def main() -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    model, fault_step = Path(sys.argv[1]), int(sys.argv[2])
    group = join("mpi", rank, size, 6, where="", deadline_s=60)
    plays = [(Overlap.NONE, 0), (Overlap.BUILD, 0), (Overlap.REPLAY, 0)]
    plays += [(Overlap.BUILD, fault_step), (Overlap.REPLAY, fault_step)]
    said = [play(model, group, rank, size, overlap, step) for overlap, step in plays]
    if rank == 0:
        print(json.dumps(said))


def play(
    model: Path, group: mx.distributed.Group, rank: int, size: int, overlap: Overlap, fault_step: int
) -> dict[str, Any]:
    """What this rank saw: tokens, why they ended, and the number of forwards; a `fault_step` of 0 never comes."""
    injection = Injection(kind="garbage", rank=size - 1, step=fault_step, layer=1)
    reducer = Reducer(group, fault=CorruptBuffer(injection) if fault_step and rank == size - 1 else None)
    loaded = load(
        model, dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None, reducer=reducer
    )
    runner = Runner(loaded.model, registry.inspect(loaded.model, loaded.config), mx.float32, reducer, overlap)
    runner.samples = rank == 0
    tokens: list[list[int]] = []
    said = ""
    try:
        for step, drawn in enumerate(decode(runner, group), 1):
            tokens.append(drawn)
            assert step <= STEPS
    except CollectiveFault as fault:
        said = str(fault)
    return {"tokens": tokens, "said": said, "forwards": reducer.tally.forwards}


def decode(runner: Runner, group: mx.distributed.Group):
    """The tokens of each step: rank 0 draws them, and all ranks feed them in the next."""
    runner.begin(0)
    runner.apply([Resize(0, 2, 64), Admit(0, 0, 0), Admit(0, 1, 1)])
    runner.forward(Forward(0, 0, (0, 1), tuple(tuple(p[:-1]) for p in PROMPTS), (4, 4), sample=False), [0, 0])
    fed = [prompt[-1] for prompt in PROMPTS]
    for step in range(1, STEPS + 1):
        runner.begin(step)
        length = 3 + step
        logits = runner.forward(Forward(0, 0, (0, 1), tuple((t,) for t in fed), (1, 1), sample=True), [length, length])
        fed = [0, 0]
        if logits is not None:
            where = [SamplingMetadata(Sampling(seed=row, temperature=0.8), step, TokenCounts([], [])) for row in (0, 1)]
            drawn = sample(logits[:, -1], where, runner.written_caches())
            runner.check_sums()
            fed = drawn.tokens
        fed = mx.distributed.all_sum(mx.array(fed), group=group).tolist()
        yield fed


if __name__ == "__main__":
    main()
