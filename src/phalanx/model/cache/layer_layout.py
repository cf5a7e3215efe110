"""The layout of a layer's cache as plain data: shapes and dtypes per token or per row.

`registry.py` derives it from an unevaluated call of the model on mlx-lm's own caches. `buffers.py` allocates by it, and
`CacheFacts` counts bytes for the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from phalanx.sched.admission import GRANULE

PAGE = 4096  # bytes


@dataclass(frozen=True)
class Heads:
    """Shape and dtype of the keys or the values of one token: `[heads, dim]`."""

    heads: int
    dim: int
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return self.heads * self.dim * self.dtype.size


@dataclass(frozen=True)
class KvLayout:
    """Keys and values per token.

    `window` is the number of tokens that a query attends to, including its own; None: all tokens. `keys` and `values`
    are None for a cache that the model makes but never writes.
    """

    keys: Heads | None
    values: Heads | None
    window: int | None


@dataclass(frozen=True)
class StateLayout:
    """Recurrent state of one row: shape (without the row axis) and dtype per entry; None for an entry never written."""

    entries: tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]


@dataclass(frozen=True)
class GroupLayout:
    """A layer with several caches (mlx-lm's CacheList)."""

    parts: tuple[Layout, ...]


Layout = KvLayout | StateLayout | GroupLayout


@dataclass(frozen=True)
class CacheFacts:
    """The facts about a model's caches that the engine and the scheduler need."""

    layouts: tuple[Layout, ...]
    """In the order of the model's cache list."""
    supports_rollback: bool
    """Whether a row can be set back to a shorter length; False with recurrent state."""
    recurrent: bool
    """Whether rows have state: then prefill takes one unpadded row at a time, a forward over several rows feeds one
    token each, and a cached prefix is used only at its full length."""
    bytes_per_token: int
    """Bytes of all layers, per row and token of capacity."""
    bytes_per_row: int
    """Bytes of recurrent state, per row."""
    one_row: str
    """Why a forward computes its rows one after another; "" if together."""
    mask_dims: int
    """Number of dimensions of the mask that the model expects for several rows."""
    max_len: int | None
    """Most tokens of prompt and output together; None if the model's config does not say."""
    description: str
    """One line on which cache classes were replaced by which."""
    packs: bool = False
    """Whether rows can be fed different numbers of tokens without padding (`check.py`)."""


def leaves(layouts: Sequence[Layout]) -> Iterator[KvLayout | StateLayout]:
    """All caches in the model's order, with groups flattened."""
    for layout in layouts:
        if isinstance(layout, GroupLayout):
            yield from leaves(layout.parts)
        else:
            yield layout


def single_caches(caches: Sequence[Any]) -> Iterator[Any]:
    """A model's own caches, with groups flattened: in the order of `leaves`."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from single_caches(cache.caches)
        else:
            yield cache


def bytes_per_token(layouts: Sequence[Layout]) -> int:
    """Bytes of one token of one row, in all layers."""
    kv = [leaf for leaf in leaves(layouts) if isinstance(leaf, KvLayout)]
    return sum(heads.nbytes for leaf in kv for heads in (leaf.keys, leaf.values) if heads is not None)


def page_tokens(layouts: Sequence[Layout]) -> int:
    """Tokens by which a row's paged memory grows: a power of two, GRANULE at most."""
    kv = [leaf for leaf in leaves(layouts) if isinstance(leaf, KvLayout)]
    least = min((h.dim * h.dtype.size for leaf in kv for h in (leaf.keys, leaf.values) if h and h.dim), default=PAGE)
    return int(min(GRANULE, 1 << max(0, -(-PAGE // least) - 1).bit_length()))


def buffer_shapes(layouts: Sequence[Layout], rows: int, capacity: int) -> Iterator[tuple[tuple[int, ...], mx.Dtype]]:
    """Shape and dtype of every buffer of `rows` rows of `capacity` tokens."""
    for leaf in leaves(layouts):
        if isinstance(leaf, StateLayout):
            yield from (((rows, 1, 1, math.prod(entry[0])), entry[1]) for entry in leaf.entries if entry is not None)
        else:
            yield from (((rows, h.heads, capacity, h.dim), h.dtype) for h in (leaf.keys, leaf.values) if h and h.dim)


def row_bytes(layouts: Sequence[Layout], dtype: mx.Dtype) -> int:
    """As `bytes_per_token`, with keys and values of this dtype: for models whose weights are cast when read."""
    kv = [leaf for leaf in leaves(layouts) if isinstance(leaf, KvLayout)]
    return sum(h.heads * h.dim * dtype.size for leaf in kv for h in (leaf.keys, leaf.values) if h is not None)


def bytes_per_row(layouts: Sequence[Layout]) -> int:
    """Bytes of recurrent state of one row, whatever its length."""
    states = [leaf for leaf in leaves(layouts) if isinstance(leaf, StateLayout)]
    return sum(math.prod(e[0]) * e[1].size for leaf in states for e in leaf.entries if e is not None)
