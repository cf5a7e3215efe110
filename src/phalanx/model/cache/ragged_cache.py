"""The cache objects for models: ragged rows of keys and values, and rows of recurrent state (design: Ragged rows).

The valid region of row r is `[0, kv_len[r])`, and the forward's `RowView` knows the lengths: a rollback is a smaller
`kv_len` in the next forward, so the caches store none. mlx-lm's models run unmodified: they use a cache only through
`offset`, `make_mask`, `update_and_fetch`, `keys_and_values`, `keys`/`values`, and indexing (recurrent state).

Does not know plans, sequences or prefixes; `buffers.py` allocates and copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from phalanx.errors import EngineError
from phalanx.model.cache import row_memory
from phalanx.model.cache.layer_layout import GroupLayout, Heads, KvLayout, Layout, StateLayout
from phalanx.model.cache.row_view import Mask, RowView


class RaggedKV:
    """Keys and values of one layer for all rows of an arena: `[rows, heads, capacity, dim]` each.

    Replaces KVCache, RotatingKVCache (with a window), ConcatenateKVCache and ChunkedKVCache (without trimming, because
    its models mask by chunk themselves). `keys` and `values` are plain attributes, because models assign them.
    """

    start_position = 0  # of ChunkedKVCache: index of the first token that it keeps

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset: int | mx.array = 0
        self._view: RowView | None = None
        self._written: tuple[mx.array | None, mx.array | None] | None = None  # by this forward

    # Called by models ------------------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, [rows, heads, L, dim]. Returns `keys_and_values`."""
        view = self._current()
        self.keys = view.write(self._allocated(self.keys), keys)
        if values.shape[-1]:
            self.values = view.write(self._allocated(self.values), values)
        self._written = self.keys, self.values
        self.offset = view.after
        view.start_early(self._allocated(self.keys))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of the keys and values to attend to, `[rows, heads, S, dim]`; also called by layers that share them."""
        view = self._current()
        window = self.layout.window
        return view.read(self._allocated(self.keys), window), view.read(self._allocated(self.values), window)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The mask of a forward, with mlx-lm's signature.

        A prefill uses the window that the model passes. Decoding uses at most the cache's own, as mlx-lm's cache holds
        no more tokens: plamo3 passes one token more than its cache holds, so its prefill sees a wider window.
        """
        view = self._current()
        if view.length != N:
            raise EngineError(f"The model asked for a mask of {N} queries in a forward of {view.length} tokens.")
        window = window_size or self.layout.window
        if window is not None and self.layout.window is not None and not view.prefill:
            window = min(window, self.layout.window)
        return view.mask(window, return_array, view.first(self.layout.window))

    def maybe_trim_front(self) -> None:
        """Does nothing: ChunkedKVCache trims here, but rows must be able to roll back."""

    # Called by the arena ---------------------------------------------------------------------------------------

    def open(self, view: RowView) -> None:
        """Start a forward over the rows of `view`."""
        self._view = view
        self.offset = view.offset

    def close(self) -> None:
        """End the forward. Restores the written buffers if the model assigned others."""
        if self._written is not None:
            self.keys, self.values = self._written
        self._view = self._written = None

    def allocate(self, rows: int, capacity: int, kept: Sequence[int], length: int) -> None:
        """Allocate new zeroed buffers and copy the first `length` tokens of the slots `kept`; evaluated."""
        self.keys = _reallocated(self.keys, self.layout.keys, rows, capacity, kept, length)
        self.values = _reallocated(self.values, self.layout.values, rows, capacity, kept, length)

    def arrays(self) -> list[mx.array]:
        """The buffers that are not empty."""
        return [b for b in (self.keys, self.values) if b is not None and b.size]

    touched = arrays

    def row_bytes(self, length: int) -> int:
        """Bytes of the first `length` tokens of one row."""
        return length * sum(heads.nbytes for heads in (self.layout.keys, self.layout.values) if heads is not None)

    def zero(self, slot: int, length: int) -> None:
        """Clear the first `length` tokens of a slot."""
        for buffer in self.arrays():
            row_memory.clear(buffer, slot, length)

    def copied(self, slot: int, length: int, start: int = 0) -> list[mx.array]:
        """Copies of tokens `[start, length)` of a slot, one per buffer, to be evaluated before the next write."""
        return [_own_copy(buffer[slot : slot + 1, :, start:length]) for buffer in self.arrays()]

    def paste(self, slot: int, parts: Sequence[mx.array], length: int, start: int = 0) -> None:
        """Write copies of tokens from `start` on into a slot, up to token `length`."""
        for buffer, part in zip(self.arrays(), parts, strict=True):
            row_memory.write(buffer, part[:, :, : length - start], slot, start)

    def _current(self) -> RowView:
        if self._view is None:
            raise EngineError("A KV cache was used outside a forward.")
        return self._view

    def _allocated(self, buffer: mx.array | None) -> mx.array:
        if buffer is None:
            raise EngineError(
                "A model writes to a cache that its dry run left unused.", remedy="Please report the model's name."
            )
        return buffer


class StateRows(ArraysCache):  # type: ignore[misc]
    """Recurrent state of one layer for all rows of an arena: per entry `[rows, 1, 1, size]`. Cannot roll back.

    A subclass, because models test `isinstance(cache, ArraysCache)`. During a forward `cache` holds the
    state of the forward's rows (None for a row without tokens, as in mlx-lm). Afterwards the new state is written back.
    """

    def __init__(self, layout: StateLayout) -> None:
        super().__init__(len(layout.entries))
        self.layout = layout
        self.buffers: list[mx.array | None] = [None] * len(layout.entries)
        self._view: RowView | None = None
        self._pending: list[tuple[RowView, mx.array, mx.array]] = []  # view, buffer, new state of the view's rows

    def open(self, view: RowView) -> None:
        """Start a forward: give the model the state of the rows of `view`."""
        self._store()
        self._view = view
        fresh = view.need == view.length
        rows = slice(view.start, view.stop)
        self.cache = [
            None if fresh or b is None or entry is None else b[rows].reshape(-1, *entry[0])
            for b, entry in zip(self.buffers, self.layout.entries, strict=True)
        ]

    def close(self) -> None:
        """End the forward: keep the new state, to be written back after it has been evaluated.

        A write in the same graph as the reads of the old state would copy the whole buffer.
        """
        if self._view is None:
            return
        for buffer, entry, new in zip(self.buffers, self.layout.entries, self.cache, strict=True):
            if buffer is None or entry is None or new is None:
                continue
            if new.shape[1:] != entry[0]:
                raise EngineError(f"Recurrent state changed its shape from {entry[0]} to {new.shape[1:]}.")
            self._pending.append((self._view, buffer, new))
        self.cache = [None] * len(self.buffers)
        self._view = None

    def touched(self) -> list[mx.array]:
        """The new state, to be evaluated after a forward."""
        return [new for _, _, new in self._pending]

    def forget(self) -> None:
        """Drop the new state."""
        self._pending = []

    def row_bytes(self, length: int) -> int:
        """Bytes of one row, whatever its length."""
        return sum(math.prod(shape) * dtype.size for shape, dtype in filter(None, self.layout.entries))

    def _store(self) -> None:
        for view, buffer, new in self._pending:
            row_memory.write(buffer, new.reshape(new.shape[0], 1, 1, -1), view.start)
        self._pending = []

    def allocate(self, rows: int, capacity: int, kept: Sequence[int], length: int) -> None:
        """Allocate new zeroed buffers and copy the slots `kept`; evaluated."""
        self._store()
        for i, entry in enumerate(self.layout.entries):
            if entry is None:
                continue
            new = row_memory.allocate((rows, 1, 1, math.prod(entry[0])), entry[1]) if rows else None
            old = self.buffers[i]
            if new is not None and old is not None:
                for slot in kept:
                    row_memory.write(new, old[slot : slot + 1], slot)
                mx.eval(new)
            self.buffers[i] = new

    def arrays(self) -> list[mx.array]:
        """The buffers, after pending state was written back."""
        self._store()
        return [b for b in self.buffers if b is not None]

    def zero(self, slot: int, length: int) -> None:
        """Clear a slot."""
        for buffer in self.arrays():
            row_memory.clear(buffer, slot, 1)

    def copied(self, slot: int, length: int, start: int = 0) -> list[mx.array]:
        """Copies of a slot's state, one per buffer, to be evaluated before the next write."""
        return [_own_copy(buffer[slot : slot + 1]) for buffer in self.arrays()]

    def paste(self, slot: int, parts: Sequence[mx.array], length: int, start: int = 0) -> None:
        """Write copies from `copied` into a slot."""
        for buffer, part in zip(self.arrays(), parts, strict=True):
            row_memory.write(buffer, part, slot)


Leaf = RaggedKV | StateRows


def build(layouts: Sequence[Layout]) -> tuple[list[Any], list[Leaf]]:
    """The cache list for a model's call, and its leaves (groups flattened). Nothing is allocated yet."""
    leaves: list[Leaf] = []
    return [_make(layout, leaves) for layout in layouts], leaves


def _make(layout: Layout, leaves: list[Leaf]) -> Any:
    if isinstance(layout, GroupLayout):
        return CacheList(*[_make(part, leaves) for part in layout.parts])
    leaves.append(RaggedKV(layout) if isinstance(layout, KvLayout) else StateRows(layout))
    return leaves[-1]


def _own_copy(view: mx.array) -> mx.array:
    """A copy with memory of its own. A contiguous slice would share the whole buffer, and keep it alive."""
    return view * mx.array(1, view.dtype)


def _reallocated(
    old: mx.array | None, heads: Heads | None, rows: int, capacity: int, kept: Sequence[int], length: int
) -> mx.array | None:
    if heads is None or rows == 0:
        return None
    new = row_memory.allocate((rows, heads.heads, capacity, heads.dim), heads.dtype)
    if old is not None and length:
        for first, last in _runs(kept):
            row_memory.write(new, old[first:last, :, :length], first)
        mx.eval(new)
    return new


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending slots as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs
