"""Reads what a model needs of each rank, from headers alone.

`python -m phalanx.engine.model_shape_reader DIRECTORY MAX_DEGREE` prints a `ModelShape` as JSON, for programs that do
not import MLX; what is wrong with the model stands on stderr.
"""

from __future__ import annotations

import phalanx.kernels.preload  # noqa: F401  (before anything loads MLX)

# isort: split
import hashlib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import mlx.core as mx
import msgspec
from mlx.nn.layers.base import Module

from phalanx.dist.reduce import Reducer
from phalanx.errors import ModelUnsupported, PhalanxError
from phalanx.kernels import install
from phalanx.model import registry
from phalanx.model.cache.layer_layout import CacheFacts, Layout, bytes_per_row, page_tokens, row_bytes
from phalanx.model.cache.row_memory import in_pages
from phalanx.model.loading import load
from phalanx.model.loading.layer_trace import BEFORE, BEHIND, BETWEEN, LayerTrace, trace
from phalanx.model.loading.lazy_model import build, check_config
from phalanx.model.loading.parameters import ModelParameter
from phalanx.model.loading.shard import degrees
from phalanx.model.loading.stage_cut import costs
from phalanx.model.loading.stage_parts import parts_of
from phalanx.model.loading.weights import read_headers
from phalanx.model.modules import copy_structure
from phalanx.planning.model_shape import ModelShape, RankParts, WeightPart
from phalanx.sched.admission import GRANULE


class ShardReducer(Reducer):
    """The reducer of a rank that computes its shard of every layer and sums with no other: to read or time a shard."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size

    def all_sum(self, y: mx.array, site: int) -> mx.array:
        """This rank's own summand."""
        return y


def read_shape(path: Path, max_degree: int) -> ModelShape:
    """What the model in a directory needs, for each number of ranks up to `max_degree` that can share its layers.

    Raises:
        ModelUnsupported, WeightsError: phalanx cannot serve it.
    """
    whole = load.prepare(path, dtype="auto", trust_remote_code=False)
    unsplit, uncut, found = "", "", None
    possible = [1]
    stored = lazy_model(path)
    try:
        possible = [degree for degree in degrees(stored, path.name) if degree <= max_degree]
    except ModelUnsupported as error:
        unsplit = error.message
    try:
        found = trace(copy_structure(stored), path.name)
    except ModelUnsupported as error:
        uncut = error.message
    shares = []
    facts = None
    for degree in possible:
        reducer = ShardReducer(degree)
        prepared = load.prepare(path, dtype="auto", trust_remote_code=False, reducer=reducer)
        own = registry.inspect(prepared.model, prepared.config)
        reducer.discard()
        facts = facts or own
        shares.append(_parts(prepared, found, own, degree))
    assert facts is not None
    return ModelShape(
        name=path.name,
        shares=tuple(shares),
        width=0 if found is None else found.width,
        activation_bytes=whole.dtype.size,
        page_tokens=page_tokens(facts.layouts) if in_pages() else GRANULE,
        tokenizer_bytes=_size_of(path / "tokenizer.json"),
        max_len=facts.max_len,
        parts=None if found is None else parts_of(costs(stored, found)),
        uncut=uncut,
        unsplit=unsplit,
        on_gpu=mx.default_device() != mx.Device(mx.cpu),
        key=_key(whole),
    )


def lazy_model(path: Path) -> Module:
    """The model as the files have it; nothing is read."""
    config = check_config(path, trust_remote_code=False)
    return build(path, config, read_headers(path), trust_remote_code=False).model


def _size_of(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _key(prepared: load.Prepared) -> str:
    """Of everything that decides how long a forward takes: types and shapes of all parameters, and the dtype."""
    facts = [(entry.name, entry.size, str(entry.dtype), entry.repacked) for entry in prepared.plan]
    config = {name: value for name, value in prepared.config.items() if name != "_name_or_path"}
    plain = msgspec.json.encode((facts, str(prepared.dtype), config), enc_hook=str, order="deterministic")
    return hashlib.blake2b(plain, digest_size=12).hexdigest()


def _parts(prepared: load.Prepared, found: LayerTrace | None, facts: CacheFacts, degree: int) -> RankParts:
    """The parts of one rank. A model that cannot be cut is one layer with everything."""
    n_layers = 1 if found is None else len(found.places)
    layers: list[list[ModelParameter]] = [[] for _ in range(n_layers)]
    ends: dict[str, list[ModelParameter]] = {BEFORE: [], BEHIND: [], BETWEEN: []}
    for entry in prepared.plan:
        if found is None or entry.name in found.layer_of:
            layers[0 if found is None else found.layer_of[entry.name]].append(entry)
            continue
        read = found.read.get(entry.name, frozenset())
        for end in read if read and BETWEEN not in read else (BETWEEN,):
            ends[end].append(entry)
    owned = _caches_by_layer(facts, None if found is None else found.caches)
    return RankParts(
        degree=degree,
        before=_part(ends[BEFORE]),
        layers=tuple(map(_part, layers)),
        behind=_part(ends[BEHIND]),
        both=_part({entry.name: entry for entry in [*ends[BEFORE], *ends[BEHIND]]}.values()),
        everywhere=_part(ends[BETWEEN]),
        kv_token_bytes=tuple(row_bytes(own, prepared.dtype) for own in owned),
        kv_row_bytes=tuple(bytes_per_row(own) for own in owned),
        all_reduces=prepared.sums,
    )


def _caches_by_layer(facts: CacheFacts, caches: tuple[frozenset[int], ...] | None) -> list[list[Layout]]:
    """The caches of each layer; one that several layers use belongs to the first of them."""
    if caches is None:
        return [list(facts.layouts)]
    owner: dict[int, int] = {}
    for layer, used in enumerate(caches):
        for cache in used:
            owner.setdefault(cache, layer)
    return [[layout for number, layout in enumerate(facts.layouts) if owner.get(number) == layer]
            for layer in range(len(caches))]  # fmt: skip


def _part(entries: Collection[ModelParameter]) -> WeightPart:
    return WeightPart(
        kept=sum(entry.nbytes for entry in entries),
        stored=sum(entry.stored for entry in entries),
        largest=max((entry.stored + entry.nbytes for entry in entries), default=0),
    )


def prepare_kernels(threads: int | None = None, ranks_here: int = 1) -> None:
    """Install the kernels that a rank would compute with."""
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()
    install.install("auto", threads or install.threads_for(ranks_here), async_dispatch=ranks_here == 1)


def main(arguments: Sequence[str]) -> None:
    """Print the shape of a model."""
    prepare_kernels()
    try:
        print(msgspec.json.encode(read_shape(Path(arguments[1]), int(arguments[2]))).decode())
    except PhalanxError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv)
