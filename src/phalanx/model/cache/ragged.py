"""The cache objects for models: ragged rows of keys and values, and rows of recurrent state (design: Ragged rows).

The valid region of row r is `[0, kv_len[r])`. New keys and values are scattered at `kv_len[r]`, the mask is made from
the lengths, and RoPE gets one offset per row. A rollback is a smaller `kv_len` in the next forward, so the caches store
no lengths. mlx-lm's models run unmodified: they use a cache only through `offset`, `make_mask`, `update_and_fetch`,
`keys_and_values`, `keys`/`values`, and indexing (recurrent state).

If all rows of a forward have the same length (above all, if there is one row), offset and mask are exactly those of
mlx-lm's caches: an integer, None or "causal". Does not know plans, sequences or prefixes; `buffers.py` allocates and
copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from phalanx.errors import EngineError
from phalanx.kernels import install
from phalanx.kernels.ragged import RaggedMask
from phalanx.kernels.traced import Traced
from phalanx.model.cache.layout import GroupLayout, Heads, KvLayout, Layout, StateLayout

Mask = mx.array | str | None

EARLY_FIRST, EARLY_EVERY = 2, 4
"""Layers after which evaluation starts early: 12.9 -> 12.0 ms per step of the 8-layer demo model on 2 CPU cores. More
often is no better."""


class RowView:
    """The geometry of one forward, shared by all layers: its slots, positions and masks.

    Args:
        start: first slot; the rows are `[start, start + len(kv_len))`.
        kv_len: valid tokens of each row before the forward.
        length: tokens per row in this forward (L).
        mask_dims: 4 for masks `[rows, 1, L, S]`; 5 for models that split heads into groups themselves.
        prefill: the tokens are part of a prompt; see `RaggedKV.make_mask`.
        ragged: treat rows of equal length as if their lengths differed.
        packed: tokens of each row, >= 1, without padding. For the model each token is a row of its own (L is 1); tokens
            of one slot share its keys and values. Needs the native kernels.
    """

    def __init__(
        self,
        start: int,
        kv_len: Sequence[int],
        length: int,
        *,
        mask_dims: int = 4,
        prefill: bool = False,
        ragged: bool = False,
        packed: Sequence[int] | None = None,
    ) -> None:
        self.prefill = prefill
        self.start = start
        self.stop = start + len(kv_len)
        self.length = length
        self.shortest = min(kv_len)
        self.need = max(kv_len) + length  # S: keys a query may see
        self.uniform = self.need == self.shortest + length and not ragged and packed is None
        self.offset: int | mx.array = self.shortest
        self.after: int | mx.array = self.need
        self.lengths: tuple[mx.array, ...] = ()
        """If rows differ in length: lengths before and after the forward, int32 `[rows]` each. Else empty."""
        self._mask_dims = mask_dims
        self._writes = 0
        self.early = True  # start to evaluate while the model builds the call
        self._masks: dict[tuple[int | None, bool, int], Mask] = {}
        self.slots: mx.array | None = None
        """The slot of each packed token, counted from `start`: int32 `[tokens]`. None if not packed."""
        if packed is not None:
            self.need = max(n + fed for n, fed in zip(kv_len, packed, strict=True))
            before = [n + i for n, fed in zip(kv_len, packed, strict=True) for i in range(fed)]
            self.slots = mx.array([slot for slot, fed in enumerate(packed) for _ in range(fed)], dtype=mx.int32)
            self.give(mx.array(before, dtype=mx.int32), mx.array([n + 1 for n in before], dtype=mx.int32))
        elif not self.uniform:
            before, after = list(kv_len), [n + length for n in kv_len]
            self.give(mx.array(before, dtype=mx.int32), mx.array(after, dtype=mx.int32))

    def give(self, before: mx.array, after: mx.array) -> None:
        """Set the lengths of rows before and after the forward: int32 `[rows]` each."""
        self.offset, self.after = self.lengths = before, after

    def trace(self) -> tuple[Traced, ...]:
        """Prepare a call that is captured and starts no evaluation. If rows have equal length, returns offset and
        length as integers that record whether the model computed with them."""
        self.early = False
        if not self.uniform:
            return ()
        traces = Traced(self.shortest), Traced(self.need)
        self.offset, self.after = traces
        return traces

    def write(self, buffer: mx.array, new: mx.array) -> mx.array:
        """Write `new` [rows, heads, L, dim] at each row's length; in place if nothing else refers to the buffer."""
        if self.uniform:
            buffer[self.start : self.stop, :, self.shortest : self.need] = new
            return buffer
        if (ops := install.operations()) is not None:
            return ops.write_rows(buffer, new, self.lengths[0], self.start, slots=self.slots)
        slots = mx.arange(self.start, self.stop, dtype=mx.int32)[:, None]  # [rows, 1]
        buffer[slots, :, self._positions()] = new.swapaxes(1, 2)
        return buffer

    def _positions(self) -> mx.array:
        """The position of each token, [rows, L]."""
        return self.lengths[0][:, None] + mx.arange(self.length, dtype=mx.int32)

    def start_early(self, buffer: mx.array) -> None:
        """Start to evaluate the layers built so far, every few layers, while the model builds the rest.

        Building the graph of a decode step takes Python about as long as computing a few layers. Without this, the
        device would start with the first layer only after Python has built the last.
        """
        self._writes += 1
        if self.early and self._writes % EARLY_EVERY == EARLY_FIRST:
            mx.async_eval(buffer)  # type: ignore[no-untyped-call]

    def first(self, window: int | None) -> int:
        """The first key to read. A single decoded token reads only the keys that mlx-lm's rotating cache would hold."""
        single = self.uniform and self.length == 1 and not self.prefill
        return max(0, self.need - window) if window is not None and single else 0

    def read(self, buffer: mx.array, window: int | None) -> mx.array:
        """A view of the rows up to the longest one: `[rows, heads, S, dim]`."""
        return buffer[self.start : self.stop, :, self.first(window) : self.need]

    def mask(self, window: int | None, as_array: bool, first: int) -> Mask:
        """Which of the S keys from `first` on each of the L queries attends to. Cached for the forward."""
        key = (window, as_array, first)
        if key not in self._masks:
            uniform = self.uniform
            self._masks[key] = self._uniform_mask(window, as_array, first) if uniform else self._ragged_mask(window)
        return self._masks[key]

    def _uniform_mask(self, window: int | None, as_array: bool, first: int) -> Mask:
        if window is None or self.need - first <= window:
            if self.length == 1:
                return None
            if not as_array:
                return "causal"
        queries = mx.arange(self.shortest, self.need)[:, None]
        return _visible(queries, mx.arange(first, self.need), window)  # [L, S]

    def _ragged_mask(self, window: int | None) -> mx.array:
        visible = _visible(self._positions()[:, :, None], mx.arange(self.need, dtype=mx.int32), window)  # [rows, L, S]
        mask = mx.expand_dims(visible, tuple(range(1, self._mask_dims - 2)))
        return RaggedMask.of(mask, self.lengths[1], window, self.slots) if self._mask_dims == 4 else mask


def _visible(queries: mx.array, keys: mx.array, window: int | None) -> mx.array:
    """Whether the query at one position attends to the key at another. A window includes the query's own token."""
    visible = keys <= queries
    if window is not None:
        visible = visible & (keys > queries - window)
    return visible


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

    # Called by models ------------------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, [rows, heads, L, dim]. Returns `keys_and_values`."""
        view = self._current()
        self.keys = view.write(self._allocated(self.keys), keys)
        if values.shape[-1]:
            self.values = view.write(self._allocated(self.values), values)
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
        """End the forward."""
        self._view = None

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
            buffer[slot : slot + 1, :, :length] = mx.array(0, buffer.dtype)

    def copied(self, slot: int, length: int) -> list[mx.array]:
        """Copies of the first `length` tokens of a slot, one per buffer, to be evaluated before the next write."""
        return [_own_copy(buffer[slot : slot + 1, :, :length]) for buffer in self.arrays()]

    def paste(self, slot: int, parts: Sequence[mx.array], length: int) -> None:
        """Write the first `length` tokens of copies from `copied` into a slot."""
        for buffer, part in zip(self.arrays(), parts, strict=True):
            buffer[slot : slot + 1, :, :length] = part[:, :, :length]

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
    """Recurrent state of one layer for all rows of an arena: per entry `[rows, ...]`. Cannot roll back (A3).

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
        self.cache = [None if fresh or b is None else b[view.start : view.stop] for b in self.buffers]

    def close(self) -> None:
        """End the forward: keep the new state, to be written back after it has been evaluated.

        A write in the same graph as the reads of the old state would copy the whole buffer.
        """
        if self._view is None:
            return
        for buffer, new in zip(self.buffers, self.cache, strict=True):
            if buffer is None or new is None:
                continue
            if new.shape[1:] != buffer.shape[1:]:
                raise EngineError(f"Recurrent state changed its shape from {buffer.shape[1:]} to {new.shape[1:]}.")
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
            buffer[view.start : view.stop] = new
        self._pending = []

    def allocate(self, rows: int, capacity: int, kept: Sequence[int], length: int) -> None:
        """Allocate new zeroed buffers and copy the slots `kept`; evaluated."""
        self._store()
        for i, entry in enumerate(self.layout.entries):
            if entry is None:
                continue
            new = mx.zeros((rows, *entry[0]), entry[1]) if rows else None
            old = self.buffers[i]
            if new is not None and old is not None:
                for slot in kept:
                    new[slot : slot + 1] = old[slot : slot + 1]
            if new is not None:
                mx.eval(new)
            self.buffers[i] = new

    def arrays(self) -> list[mx.array]:
        """The buffers, after pending state was written back."""
        self._store()
        return [b for b in self.buffers if b is not None]

    def zero(self, slot: int, length: int) -> None:
        """Clear a slot."""
        for buffer in self.arrays():
            buffer[slot : slot + 1] = mx.array(0, buffer.dtype)

    def copied(self, slot: int, length: int) -> list[mx.array]:
        """Copies of a slot's state, one per buffer, to be evaluated before the next write."""
        return [_own_copy(buffer[slot : slot + 1]) for buffer in self.arrays()]

    def paste(self, slot: int, parts: Sequence[mx.array], length: int) -> None:
        """Write copies from `copied` into a slot."""
        for buffer, part in zip(self.arrays(), parts, strict=True):
            buffer[slot : slot + 1] = part


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
    new = mx.zeros((rows, heads.heads, capacity, heads.dim), heads.dtype)
    if old is not None and length:
        for first, last in _runs(kept):
            new[first:last, :, :length] = old[first:last, :, :length]
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
