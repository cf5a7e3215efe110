"""Candidate plans for some hosts, and the memory, context and rows of each.

Pure. A plan fits exactly if `serve` would start it: `memory.check_group` and `memory.serving_budget` decide both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from phalanx import memory
from phalanx.dist.topology import Room, Topology, split_layers
from phalanx.errors import ConfigError, MemoryShortage
from phalanx.memory import MachineMemory, MemoryBudget, Prediction
from phalanx.planning.model_shape import ModelShape, RankParts, total

READ_AHEAD = 128 << 20  # bytes that a loading rank holds besides its largest tensor
DEFAULT_CONTEXT = 8192  # if the model names none
GRANULE = 256  # tokens; the context is a multiple, and the start wants room for one row of so many
PROCESS = 80 << 20  # bytes of a rank besides weights and caches: Python, MLX, kernels; 76 MB of Pss with the demo model
SERVER = 104 << 20  # bytes of the server's processes, on rank 0's host, without the tokenizer
TOKENIZER = 22  # bytes of them for each one of tokenizer.json: two processes have it
ROW = 4096  # tokens per counted row


class PlanHost(Struct, frozen=True, kw_only=True):
    """A host as plans see it."""

    name: str
    memory: MachineMemory
    guard: int
    """Bytes that stay free."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A way to use hosts: equal groups, each of equally wide stages."""

    stages: int = 1
    width: int = 1
    replicas: int = 1
    hosts: tuple[str, ...]
    """By rank, replica after replica."""

    @property
    def size(self) -> int:
        """Ranks of one group."""
        return self.stages * self.width

    @property
    def ranks_here(self) -> int:
        """Ranks on the fullest host."""
        return max(self.hosts.count(host) for host in self.hosts)

    @property
    def name(self) -> str:
        """A short name."""
        kinds = [f"tp {self.width}"] * (self.width > 1) + [f"pp {self.stages}"] * (self.stages > 1)
        group = " x ".join(kinds) or "one rank"
        return group if self.replicas == 1 else f"{self.replicas} replicas of {group}"

    @property
    def key(self) -> str:
        """Name and hosts, under which the planner keeps what earlier starts measured."""
        return f"{self.name} on {', '.join(self.hosts)}"

    @property
    def flags(self) -> str:
        """The flags of `serve`, or of `up`."""
        shape = [f"--tp {self.width}"] * (self.width > 1) + [f"--pp {self.stages}"] * (self.stages > 1)
        return " ".join([*shape, *([f"--replicas {self.replicas}"] if self.replicas > 1 else [])]) or "--tp 1"


class RankMemory(Struct, frozen=True, kw_only=True):
    """One rank's memory, in bytes."""

    host: str
    rank: int
    layers: tuple[int, int]
    process: int
    """Of the process itself, and of the server beside rank 0."""
    weights: int
    loading: int
    """In addition, while loading."""
    kv: int
    """For running rows."""
    prefixes: int
    """For kept prefixes."""


class Fit(Struct, frozen=True, kw_only=True):
    """A candidate's memory, or why it does not fit."""

    candidate: Candidate
    ranks: tuple[RankMemory, ...] = ()
    split: tuple[int, ...] = ()
    """Layers of each stage."""
    context: int = 0
    """Tokens of the longest row."""
    rows: int = 0
    """Rows of 4,096 tokens, or of the context if shorter, over all replicas."""
    problem: str = ""
    """Why it does not fit; "" if it does."""


def candidates(shape: ModelShape, hosts: Sequence[str], *, ranks_here: int = 1) -> list[Candidate]:
    """All candidate plans that use hosts in the given order.

    Args:
        ranks_here: ranks that may share a single host.
    """
    found = [Candidate(hosts=(host,)) for host in hosts]
    slots = list(hosts) * (ranks_here if len(hosts) == 1 else 1)
    for size in range(2, len(slots) + 1):
        for stages, width in _grids(shape, size):
            found.append(Candidate(stages=stages, width=width, hosts=tuple(slots[:size])))
    if len(hosts) > 1:
        for size in range(1, len(hosts) // 2 + 1):
            replicas = len(hosts) // size
            for stages, width in [(1, 1)] if size == 1 else _grids(shape, size):
                ranks = tuple(hosts[: replicas * size])
                found.append(Candidate(stages=stages, width=width, replicas=replicas, hosts=ranks))
    return found


def _grids(shape: ModelShape, size: int) -> Iterator[tuple[int, int]]:
    """Numbers of stages and their width, for `size` ranks."""
    for stages in range(1, size + 1):
        width, rest = divmod(size, stages)
        can_cut = stages == 1 or (not shape.uncut and stages <= shape.n_layers)
        if not rest and width in shape.degrees and can_cut:
            yield stages, width


def fit_memory(
    shape: ModelShape,
    candidate: Candidate,
    hosts: Mapping[str, PlanHost],
    *,
    max_len: int | None = None,
    kv_gb: float | None = None,
) -> Fit:
    """A candidate's memory, or why it does not fit.

    Args:
        max_len: the requested context; None: as much as fits, up to the model's own.
        kv_gb: --kv-cache-gb.
    """
    fits = []
    for first in range(0, len(candidate.hosts), candidate.size):
        group = replace(candidate, replicas=1, hosts=candidate.hosts[first : first + candidate.size])
        one = _fit_group(shape, group, hosts, max_len, kv_gb)
        if one.problem:
            return replace(one, candidate=candidate)
        fits.append(one)
    return Fit(
        candidate=candidate,
        ranks=tuple(rank for one in fits for rank in one.ranks),
        split=fits[0].split,
        context=min(one.context for one in fits),
        rows=sum(one.rows for one in fits),
    )


def _fit_group(
    shape: ModelShape, group: Candidate, hosts: Mapping[str, PlanHost], max_len: int | None, kv_gb: float | None
) -> Fit:
    if max_len is not None and shape.max_len is not None and max_len > shape.max_len:
        return Fit(candidate=group, problem=f"the model's own context is {shape.max_len:,} tokens")
    parts = shape.share(group.width)
    hosts = {name: _started(hosts[name], group) for name in group.hosts}
    topology = Topology((group.width,) * group.stages)
    try:
        split = _split(shape, topology, [hosts[name] for name in group.hosts], group)
        predictions = [_prediction(parts, topology, split, group, rank, hosts) for rank in range(group.size)]
        memory.check_group(shape.name, predictions)
        serving = [_with_tokenizer(one, group, shape) for one in predictions]
        budgets = [_budget(prediction, serving, parts, split, topology, kv_gb) for prediction in serving]
    except (MemoryShortage, ConfigError) as error:
        return Fit(candidate=group, problem=error.message.partition("\n")[0])
    whole_token, whole_row = sum(parts.kv_token_bytes), sum(parts.kv_row_bytes)
    spaces = []
    for rank, budget in enumerate(budgets):
        own = split[topology.place(rank).stage]
        token, row = _kv(parts, own)
        spaces.append(
            int(budget.kv * min((w / m for m, w in ((token, whole_token), (row, whole_row)) if m), default=1))
        )
    kv = min(spaces)
    context = min(max_len or shape.max_len or DEFAULT_CONTEXT, _longest(kv, whole_token, whole_row))
    if max_len is not None and context < max_len:
        return Fit(candidate=group, problem=f"a row of {max_len:,} tokens does not fit; one of {context:,} does")
    length = min(ROW, context) if context else ROW
    return Fit(
        candidate=group,
        ranks=tuple(
            RankMemory(
                host=one.host, rank=one.rank, layers=_ends(split[topology.place(one.rank).stage]),
                process=PROCESS + server_bytes(shape) * (one.rank == 0), weights=one.weights,
                loading=one.working, kv=budget.kv, prefixes=budget.prefix,
            )
            for one, budget in zip(predictions, budgets, strict=True)
        ),
        split=tuple(len(layers) for layers in split),
        context=context,
        rows=kv // max(1, -(-length // shape.page_tokens) * shape.page_tokens * whole_token + whole_row),
    )  # fmt: skip


def server_bytes(shape: ModelShape) -> int:
    """What the server's processes hold."""
    return SERVER + TOKENIZER * shape.tokenizer_bytes


def _with_tokenizer(one: Prediction, group: Candidate, shape: ModelShape) -> Prediction:
    """The prediction once the server has its tokenizer, which the server reads while ranks load."""
    if one.machine.kind == "cuda" or one.host != group.hosts[0]:
        return one
    left = max(0, one.machine.available - TOKENIZER * shape.tokenizer_bytes)
    return replace(one, machine=replace(one.machine, available=left))


def _started(host: PlanHost, group: Candidate) -> PlanHost:
    """The host once the group's processes run, before they load: then the start looks at what is free.

    A GPU's own memory holds none of them.
    """
    taken = PROCESS * group.hosts.count(host.name) + SERVER * (host.name == group.hosts[0])
    if host.memory.kind == "cuda":
        return host
    return replace(host, memory=replace(host.memory, available=max(0, host.memory.available - taken)))


def _ends(layers: range) -> tuple[int, int]:
    return layers.start, layers.stop


def _split(shape: ModelShape, topology: Topology, hosts: Sequence[PlanHost], group: Candidate) -> tuple[range, ...]:
    """The layers of each stage, split as `serve` splits them."""
    if topology.n_stages == 1:
        return (range(shape.n_layers),)
    assert shape.parts is not None, "a model without parts has no plan with stages"
    rooms = [
        Room(host.name, max(0, host.memory.available - host.guard) // group.hosts.count(host.name)) for host in hosts
    ]
    return split_layers(topology, shape.parts, rooms)


def _prediction(
    parts: RankParts,
    topology: Topology,
    split: Sequence[range],
    group: Candidate,
    rank: int,
    hosts: Mapping[str, PlanHost],
) -> Prediction:
    layers = split[topology.place(rank).stage]
    own = total(parts.stage(layers.start, layers.stop))
    host = hosts[group.hosts[rank]]
    token, row = _kv(parts, layers)
    return Prediction(
        host=host.name, rank=rank, weights=own.kept, working=own.largest + min(READ_AHEAD, own.stored),
        kv=GRANULE * token + row, guard=host.guard, machine=host.memory,
    )  # fmt: skip


def _budget(
    one: Prediction,
    every: Sequence[Prediction],
    parts: RankParts,
    split: Sequence[range],
    topology: Topology,
    kv_gb: float | None,
) -> MemoryBudget:
    """Memory for rows after all ranks of a device have loaded; they share the rest equally."""
    beside = [other for other in every if other.place == one.place]
    free = one.machine.available - sum(other.weights for other in beside) - one.guard
    machine = replace(one.machine, available=one.guard + max(0, free) // len(beside))
    token, row = _kv(parts, split[topology.place(one.rank).stage])
    return memory.serving_budget(machine, one.guard, kv_gb, None, minimum_kv=GRANULE * token + row)


def _kv(parts: RankParts, layers: range) -> tuple[int, int]:
    """KV bytes per token and per row, of some layers."""
    own = slice(layers.start, layers.stop)
    return sum(parts.kv_token_bytes[own]), sum(parts.kv_row_bytes[own])


def _longest(kv: int, token: int, row: int) -> int:
    return 1 << 40 if not token else max(0, (kv - row) // token) // GRANULE * GRANULE
