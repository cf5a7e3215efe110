"""Places ranks in the pipeline, and splits the layers over its stages.

A stage is a tensor-parallel group with layers of its own; the stages may differ in width. Ranks are numbered from the
last stage to the first, so that rank 0, the leader, is on the first host and in the stage that has the logits, and
neighbouring stages are on neighbouring hosts. No other file knows this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from phalanx.errors import ConfigError, MemoryShortage
from phalanx.memory import GB


class PipelinePosition(NamedTuple):
    """Where a rank is in the pipeline."""

    stage: int  # 0 has the embedding, the last one the head
    tp_rank: int


class Topology(Struct, frozen=True):
    """The ranks of a pipeline.

    Args:
        widths: number of ranks of each stage; the stage with the embedding comes first.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(
                f"Stages of {', '.join(map(str, self.widths)) or 'no'} ranks cannot be formed.",
                remedy="Give every stage at least one rank.",
            )

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self.widths)

    @property
    def size(self) -> int:
        """The number of ranks of all stages."""
        return sum(self.widths)

    def ranks(self, stage: int) -> range:
        """The global ranks of a stage, in the order of their tensor-parallel ranks."""
        first = sum(self.widths[stage + 1 :])
        return range(first, first + self.widths[stage])

    def rank(self, place: PipelinePosition) -> int:
        """The global rank at a place."""
        return self.ranks(place.stage)[place.tp_rank]

    def place(self, rank: int) -> PipelinePosition:
        """The place of a global rank."""
        for stage in reversed(range(self.n_stages)):
            ranks = self.ranks(stage)
            if rank in ranks:
                return PipelinePosition(stage, ranks.index(rank))
        raise ValueError(f"rank {rank} is not one of {self.size}")

    def sender(self, rank: int) -> int | None:
        """The rank of the stage before that sends to this one; None in the first stage.

        All ranks of a stage have its whole output, so a rank needs one sender. If the stage before is narrower, a
        rank sends to several.
        """
        stage, tp_rank = self.place(rank)
        if stage == 0:
            return None
        before = self.ranks(stage - 1)
        return before[tp_rank % len(before)]

    def receivers(self, rank: int) -> tuple[int, ...]:
        """The ranks of the next stage that this one sends to; may be none if that stage is narrower."""
        stage = self.place(rank).stage
        if stage == self.n_stages - 1:
            return ()
        return tuple(other for other in self.ranks(stage + 1) if self.sender(other) == rank)


# Which layers a stage has ---------------------------------------------------------------------------------------


class LayerCost(Struct, frozen=True):
    """Memory and time of a layer, the embedding or the head."""

    split: int
    """Bytes that the ranks of a stage share equally."""
    whole: int = 0
    """Bytes that each rank of the stage has."""
    cost: float = 0.0
    """A token's time on one machine of speed 1, in any unit, such as the bytes that it reads."""
    chunk_cost: float = 0.0
    """The time of a prompt's chunk there, in any unit, such as its arithmetic."""

    def bytes_of(self, width: int) -> int:
        """Bytes on each rank of a stage of this width."""
        return -(-self.split // width) + self.whole


class Parts(Struct, frozen=True):
    """The parts of a model. Tied embedding and head both count: they are in different stages."""

    embedding: LayerCost
    layers: tuple[LayerCost, ...]
    head: LayerCost
    everywhere: LayerCost = LayerCost(split=0)
    """Weights that every stage has."""

    def between(self, start: int, stop: int) -> list[LayerCost]:
        """The parts of a stage that has the layers `[start, stop)`."""
        first = [self.embedding] if start == 0 else []
        last = [self.head] if stop == len(self.layers) else []
        return [self.everywhere, *first, *self.layers[start:stop], *last]


class Room(Struct, frozen=True):
    """One rank's memory and speed."""

    host: str
    bytes: int
    """Memory for this rank's weights."""
    speed: float = 1.0
    """Of its machine, relative to the others."""


class _Load(NamedTuple):
    """The cost of a choice of layers; smaller is better."""

    missing: int  # bytes, of all ranks
    chunk: float  # time of the slowest stage for a chunk of a prompt
    token: float  # time of all stages together for a token


def split_layers(
    topology: Topology, parts: Parts, rooms: Sequence[Room], chosen: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The layers of each stage, in order.

    Without a choice: of the splits that fit every machine, those whose slowest stage for a chunk is the fastest, since
    chunks of a prompt follow each other; of these, the one whose stages together are the fastest for a token, which
    goes through one after the other. A stage's time is the cost of its parts, shared equally by its ranks, on the
    slowest of its machines.

    Args:
        rooms: by global rank.
        chosen: the number of layers of each stage, if the user has set them.

    Raises:
        ConfigError: the numbers of layers and stages do not fit together.
        MemoryShortage: names each host that lacks memory, how much, and for which layers.
    """
    _check_numbers(topology, len(parts.layers), chosen)
    stages = [[rooms[rank] for rank in topology.ranks(stage)] for stage in range(topology.n_stages)]
    if chosen is None:
        ends = _best_ends(parts, stages)
    else:
        ends = [sum(chosen[: stage + 1]) for stage in range(len(chosen))]
    split = tuple(range(start, stop) for start, stop in pairwise([0, *ends]))
    _check_memory(parts, stages, split)
    return split


def check_layers(n_stages: int, n_layers: int) -> None:
    """Refuse more stages than the model has layers.

    Raises:
        ConfigError: gives both numbers.
    """
    if n_layers < n_stages:
        raise ConfigError(
            f"--pp {n_stages} needs a model of {n_stages} layers at least; this one has {n_layers}.",
            remedy=f"Use --pp {n_layers} or less.",
        )


def _check_numbers(topology: Topology, n_layers: int, chosen: Sequence[int] | None) -> None:
    check_layers(topology.n_stages, n_layers)
    if chosen is None:
        return
    shown = ",".join(map(str, chosen))
    if len(chosen) != topology.n_stages:
        raise ConfigError(
            f"--pp-split {shown} has {len(chosen)} numbers; there are {topology.n_stages} stages.",
            remedy="Give the number of layers of each stage.",
        )
    if min(chosen) < 1 or sum(chosen) != n_layers:
        raise ConfigError(
            f"--pp-split {shown} has {sum(chosen)} layers; the model has {n_layers}, and every stage needs one.",
            remedy=f"Give numbers from 1 that add up to {n_layers}.",
        )


def _best_ends(parts: Parts, stages: Sequence[Sequence[Room]]) -> list[int]:
    """Where each stage's layers end. Where nothing fits, the split that lacks the least memory.

    Layers left over by an equal division go to the first stages: the last one has the head as well.
    """

    @cache
    def load(stage: int, start: int, stop: int) -> _Load:
        return _load(parts.between(start, stop), stages[stage])

    def slower(a: _Load, b: _Load) -> _Load:
        return _Load(a.missing + b.missing, max(a.chunk, b.chunk), 0.0)

    def excess(stage: int, start: int, stop: int) -> _Load:
        own = load(stage, start, stop)
        return own._replace(chunk=max(0.0, own.chunk - slowest))

    def total(a: _Load, b: _Load) -> _Load:
        return _Load(a.missing + b.missing, a.chunk + b.chunk, a.token + b.token)

    slowest = _best(len(stages), len(parts.layers), load, slower)[0].chunk
    return [-end for end in _best(len(stages), len(parts.layers), excess, total)[1]]


def _best(
    stages: int, n: int, load: Callable[[int, int, int], _Load], join: Callable[[_Load, _Load], _Load]
) -> tuple[_Load, list[int]]:
    """The load of the best split of `n` layers, and where its stages end, as negative numbers.

    By dynamic programming over stages and layers. For each number of first layers only their best split is kept, so a
    better one must never make the whole worse: what `join` makes of each field is a sum or, in the last field that
    counts, a maximum.

    Args:
        load: of a stage with the layers `[start, stop)`.
        join: the load of some stages together with that of the next one.
    """
    best: dict[int, tuple[_Load, list[int]]] = {0: (_Load(0, 0.0, 0.0), [])}  # layers taken -> load and ends
    for stage in range(stages):
        left = stages - stage - 1
        stops = range(stage + 1, n - left + 1) if left else range(n, n + 1)
        best = {
            stop: min(
                (join(before, load(stage, start, stop)), [*ends, -stop])
                for start, (before, ends) in best.items()
                if start < stop
            )
            for stop in stops
        }
    return best[n]


def _load(parts: Sequence[LayerCost], rooms: Sequence[Room]) -> _Load:
    """The load of these parts on a stage's machines."""
    needed = _bytes_of(parts, rooms)
    missing = sum(max(0, needed - room.bytes) for room in rooms)
    speed = len(rooms) * min(room.speed for room in rooms)
    return _Load(missing, sum(part.chunk_cost for part in parts) / speed, sum(part.cost for part in parts) / speed)


def _bytes_of(parts: Sequence[LayerCost], rooms: Sequence[Room]) -> int:
    """Bytes on each rank of a stage."""
    return sum(part.bytes_of(len(rooms)) for part in parts)


def _check_memory(parts: Parts, stages: Sequence[Sequence[Room]], split: Sequence[range]) -> None:
    short = []
    for stage, (rooms, layers) in enumerate(zip(stages, split, strict=True)):
        needed = _bytes_of(parts.between(layers.start, layers.stop), rooms)
        what = f"stage {stage} (layers {layers.start} to {layers.stop - 1})"
        short += [
            f"{room.host} lacks {(needed - room.bytes) / GB:.2f} GiB of the {needed / GB:.2f} GiB for {what}, "
            f"which may have {room.bytes / GB:.2f} GiB there"
            for room in rooms
            if needed > room.bytes
        ]
    if short:
        raise MemoryShortage(
            f"The model does not fit: {'; '.join(short)}.",
            remedy="Free memory there (--memory-guard-gb is what must stay free), use more or wider stages, give that "
            "stage fewer layers (--pp-split), or choose a smaller or more strongly quantised model.",
        )
