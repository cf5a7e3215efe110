"""What one layer of a model keeps per row, as plain data.

Found by running a model on mlx-lm's own caches without evaluating anything (`registry.py`), used to allocate
(`cache.py`) and to count bytes (`CacheFacts`, what the engine knows). Does not know models, rows or plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx


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
    """Keys and values per token. `window` is the number of tokens a query sees, itself included; None is all.

    `keys` and `values` are None for a cache that the model makes but never writes.
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
    """What the engine and the scheduler need to know about a model's caches."""

    layouts: tuple[Layout, ...]
    """What every cache holds per token or per row, in the order of the model's cache list."""
    rolls_back: bool
    """Rows can be set back to a shorter length; False with recurrent state (A3)."""
    recurrent: bool
    """Some state is per row: prefill one row at a time, unpadded; several rows only with one token each."""
    exact_prefix_only: bool
    """A kept prefix serves only at its full length."""
    bytes_per_token: int
    """All layers, per row and token of capacity."""
    bytes_per_row: int
    """Recurrent state, per row."""
    one_row: str
    """Why rows of one forward are computed one after the other; empty when they are computed together."""
    mask_dims: int
    """Dimensions of the mask the model expects for several rows."""
    max_len: int | None
    """Longest prompt and output the model can take; None where its config does not say."""
    description: str
    """One line: which cache classes were replaced by what."""
    packs: bool = False
    """Rows can be fed several tokens each without padding; found out by `check.py`."""


def leaves(layouts: Sequence[Layout]) -> Iterator[KvLayout | StateLayout]:
    """All caches, groups resolved, in the model's order."""
    for layout in layouts:
        if isinstance(layout, GroupLayout):
            yield from leaves(layout.parts)
        else:
            yield layout


def bytes_per_token(layouts: Sequence[Layout]) -> int:
    """Bytes that one more token of one row takes in all layers."""
    kv = [leaf for leaf in leaves(layouts) if isinstance(leaf, KvLayout)]
    return sum(heads.nbytes for leaf in kv for heads in (leaf.keys, leaf.values) if heads is not None)


def row_bytes(layouts: Sequence[Layout], dtype: mx.Dtype) -> int:
    """As `bytes_per_token`, if keys and values were of this dtype: for a model whose weights are cast when read."""
    kv = [leaf for leaf in leaves(layouts) if isinstance(leaf, KvLayout)]
    return sum(h.heads * h.dim * dtype.size for leaf in kv for h in (leaf.keys, leaf.values) if h is not None)


def bytes_per_row(layouts: Sequence[Layout]) -> int:
    """Bytes of recurrent state that one row takes, whatever its length."""
    states = [leaf for leaf in leaves(layouts) if isinstance(leaf, StateLayout)]
    return sum(math.prod(e[0]) * e[1].size for leaf in states for e in leaf.entries if e is not None)
