"""The geometry of one forward over ragged rows: slots, positions and attention masks.

New keys and values are scattered at each row's length, the mask is made from the lengths, and RoPE gets one offset per
row. If all rows of a forward have the same length (in particular, a single row), offset and mask are exactly those of
mlx-lm's caches: an integer, None or "causal". Owns no buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from phalanx.kernels import install
from phalanx.kernels.ragged_mask import RaggedMask
from phalanx.kernels.traced import Traced

Mask = mx.array | str | None

EARLY_FIRST, EARLY_EVERY = 2, 4
"""Layers after which evaluation starts early: 12.9 -> 12.0 ms per step of the 8-layer demo model on 2 CPU cores.
Starting more often gains nothing."""


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
        self.ends = [n + length for n in kv_len]  # of each row: tokens after the forward, padding included
        if packed is not None:
            self.ends = [n + fed for n, fed in zip(kv_len, packed, strict=True)]
        self.need = max(self.ends)  # S: keys a query may see
        self.uniform = self.need == self.shortest + length and not ragged and packed is None
        self.offset: int | mx.array = self.shortest
        self.after: int | mx.array = self.need
        self.lengths: tuple[mx.array, ...] = ()
        """If rows differ in length: lengths before and after the forward, int32 `[rows]` each. Else empty."""
        self._mask_dims = mask_dims
        self._writes = 0
        self.early = True  # start evaluation before the graph of the whole call is built
        self._masks: dict[tuple[int | None, bool, int], Mask] = {}
        self.slots: mx.array | None = None
        """The slot of each packed token, counted from `start`: int32 `[tokens]`. None if not packed."""
        if packed is not None:
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
        """Write `new` [rows, heads, L, dim] at each row's length; in place if nothing else refers to the buffer. The
        native operation (`row_memory.py`) writes in place in any case."""
        if (ops := install.operations()) is not None:
            starts = self.shortest if self.uniform else self.lengths[0]
            return ops.write_rows(buffer, new, starts, self.start, slots=self.slots)
        if self.uniform:
            buffer[self.start : self.stop, :, self.shortest : self.need] = new
            return buffer
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
