"""One rank of a group that sums many vectors, well and spoiled; prints what was noticed as JSON (rank 0).

`mpirun -np N python tests/ranks/checked_sums.py ROUNDS composed native`: with each checksum that is named.
"""

from __future__ import annotations

import phalanx.kernels.preload  # noqa: F401  (before MLX)

# isort: split
import json
import os
import sys

import mlx.core as mx

from phalanx.dist.checksum import Checksum, ComposedChecksum
from phalanx.dist.corrupt_buffer import CorruptBuffer
from phalanx.dist.fault_injection import BUFFER_FAULTS, Injection
from phalanx.dist.group import join
from phalanx.dist.reduce import Reducer
from phalanx.errors import CollectiveFault
from phalanx.kernels.native_checksum import NativeChecksum

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
SITES = 3


def noticed(reducer: Reducer, width: int, dtype: mx.Dtype, rows: int, seed: int, spread: float, spoiled: int) -> bool:
    """A forward of some sums; whether the verdict was that something is wrong, on the rank where it is."""
    mx.random.seed(1000 * seed + reducer.rank)
    total = mx.zeros(())
    for site in range(SITES):
        own = mx.random.normal((1, rows, width)) * spread
        # Large parts that cancel each other: rounding is relative to the parts, not to their sum.
        shared = mx.random.normal((1, rows, width), key=mx.random.key(seed)) * 100 * spread
        sign = 1.0 if reducer.rank % 2 else -1.0
        part = (own + sign * shared).astype(dtype)
        total = reducer.all_sum(mx.depends(part, total), site)  # one after the other, as layers are
    evaluated = reducer.finish()
    mx.eval(*evaluated)
    try:
        reducer.judge(seed, evaluated)
    except CollectiveFault as fault:
        assert f"step {seed}" in str(fault)
        assert f"on rank {spoiled}." in str(fault), fault
        return True
    return False


def main() -> None:
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    group = join("mpi", rank, size, 5, where="", deadline_s=60)
    checksums = {"composed": ComposedChecksum, "native": NativeChecksum}
    found = {name: rates(group, rank, size, int(sys.argv[1]), checksums[name]()) for name in sys.argv[2:]}
    if rank == 0:
        print(json.dumps(found))


def rates(
    group: mx.distributed.Group, rank: int, size: int, rounds: int, checksum: Checksum
) -> dict[str, dict[str, float]]:
    """Type -> kind of fault, or "none" -> how often this rank noticed something."""
    result: dict[str, dict[str, float]] = {}
    for name, dtype in DTYPES.items():
        counts: dict[str, float] = {}
        for kind in (None, *BUFFER_FAULTS):
            hits = 0
            for i in range(rounds):
                mine = kind is not None and rank == i % size
                fault = CorruptBuffer(Injection(kind=kind, rank=rank, step=2, layer=i % SITES)) if mine else None
                reducer = Reducer(group, fault=fault, checksum=checksum)
                for site in range(SITES):
                    reducer.site(f"site {site}", (64, 256, 1024, 4096)[i % 4])
                width, rows = reducer.sites[0].width, (1, 5)[i % 2]
                spread = (1e-3, 1.0, 30.0)[i % 3]
                for step in (1, 2):  # the first is good, and what a stale buffer repeats
                    reducer.begin(step)
                    wrong = noticed(reducer, width, dtype, rows, 2 * i + step, spread, i % size)
                    hits += wrong if step == 2 or kind is None else 0
                    assert step == 2 or kind is None or not wrong, f"false alarm: {name} {width} {rows} {spread}"
            counts[kind or "none"] = hits / rounds
        result[name] = counts
    return result


if __name__ == "__main__":
    main()
