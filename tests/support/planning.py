"""Models and machines as plans see them, made of a few numbers."""

from __future__ import annotations

from phalanx.dist.topology import LayerCost, Parts
from phalanx.memory import GB, MachineMemory
from phalanx.planning.candidates import PlanHost
from phalanx.planning.model_shape import ModelShape, RankParts, WeightPart
from phalanx.planning.timings import AllReduce, DecodePoint, GroupTimings, RankTimings


def part(size: int) -> WeightPart:
    return WeightPart(kept=size, stored=size, largest=size)


def shape(layers: int = 8, layer: int = GB, *, degrees=(1, 2, 4), ends: int = GB // 4, kv: int = 1024) -> ModelShape:
    return ModelShape(
        name="some-model",
        shares=tuple(
            RankParts(
                degree=degree, before=part(ends), layers=(part(layer // degree),) * layers, behind=part(ends),
                both=part(2 * ends), everywhere=part(0), kv_token_bytes=(kv // degree,) * layers,
                kv_row_bytes=(0,) * layers, all_reduces=2 * layers * (degree > 1),
            )
            for degree in degrees
        ),
        width=1024, max_len=32768, key="k",
        parts=Parts(
            embedding=LayerCost(split=ends), head=LayerCost(split=ends, cost=ends),
            layers=(LayerCost(split=layer, cost=layer, chunk_cost=layer),) * layers,
        ),
    )  # fmt: skip


def host(name: str = "a", free_gb: float = 64.0, guard_gb: float = 4.0) -> PlanHost:
    free = int(free_gb * GB)
    return PlanHost(name=name, memory=MachineMemory(total=free, available=free), guard=int(guard_gb * GB))


def timings(
    degree: int = 1, *, layer_s: float = 0.001, ends_s: float = 0.002, per_row: float = 0.1, token_s: float = 1e-4
) -> RankTimings:
    """Further rows cost `per_row` of the first one's time each."""
    points = tuple(
        DecodePoint(
            rows=rows, layer_s=layer_s / degree * (1 + per_row * (rows - 1)), ends_s=ends_s * (1 + per_row * (rows - 1))
        )
        for rows in (1, 4, 16)
    )
    return RankTimings(
        degree=degree, decode=points, decode_context_s=1e-9, token_s=token_s / degree, token_context_s=1e-9,
        spread=0.02,
    )  # fmt: skip


def group(widths=(2,), *, step_s: float = 0.0005, sum_s: float = 1e-5, bytes_per_s: float = 0.0) -> GroupTimings:
    sums = (AllReduce(bytes=4096, seconds=sum_s), AllReduce(bytes=1 << 20, seconds=10 * sum_s))
    return GroupTimings(
        widths=widths, step_s=step_s, all_reduce=sums if max(widths) > 1 else (), bytes_per_s=bytes_per_s
    )
