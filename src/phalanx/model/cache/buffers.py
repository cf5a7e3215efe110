"""One arena: the buffers of all layers for rows that share a capacity, and what may happen to its slots.

Executes; does not decide which row lives where, and does not know models. Growth holds one extra layer, copies hold
BATCH extra bytes (design: Ragged rows). MLX writes into a buffer in place only when nothing else refers to it, and work
that has been started but not finished does refer to it: so whatever reads a buffer is evaluated before it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from phalanx.errors import EngineError
from phalanx.model.cache.layout import KvLayout, Layout
from phalanx.model.cache.ragged import Leaf, RowView, StateRows, build

BATCH = 64 << 20
"""Bytes of row copies evaluated at once: few enough to fit, many enough to wait rarely."""


class Snapshot:
    """An owned, evaluated copy of the first `length` tokens of a row, in all layers."""

    def __init__(self, length: int, parts: list[list[mx.array]]) -> None:
        self.length = length
        self.parts = parts
        self.nbytes = sum(array.nbytes for part in parts for array in part)


class ArenaBuffers:
    """Buffers of one length class. `caches` is what a model is called with."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.caches: list[Any]
        self.leaves: list[Leaf]
        self.caches, self.leaves = build(layouts)
        self.recurrent = any(isinstance(leaf, StateRows) for leaf in self.leaves)
        kv = [leaf.layout for leaf in self.leaves if isinstance(leaf.layout, KvLayout)]
        self.windows = sorted({layout.window for layout in kv if layout.window is not None})  # tokens
        self.rows = 0
        self.capacity = 0
        self._live: list[bool] = []
        self._extent: list[int] = []  # tokens of the slot that may differ from zero
        self._length: list[int] = []  # tokens behind the slot's recurrent state

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return [array for leaf in self.leaves for array in leaf.arrays()]

    def touched(self) -> list[mx.array]:
        """What the last forward wrote: evaluate it together with the logits."""
        return [array for leaf in self.leaves for array in leaf.touched()]

    def resize(self, rows: int, capacity: int) -> None:
        """Reallocate; live rows below both sizes keep their tokens, as far as they fit."""
        kept = [slot for slot in range(min(rows, self.rows)) if self._live[slot]]
        length = min(capacity, max((self._extent[slot] for slot in kept), default=0))
        for leaf in self.leaves:
            leaf.allocate(rows, capacity, kept, length)
        live = set(kept)
        self._live = [slot in live for slot in range(rows)]
        self._extent = [min(self._extent[slot], length) if slot in live else 0 for slot in range(rows)]
        self._length = [self._length[slot] if slot in live else 0 for slot in range(rows)]
        self.rows, self.capacity = rows, capacity

    def admit(self, slot: int) -> None:
        """A new sequence takes the slot: zero what was written there (a NaN behind a mask still poisons)."""
        self._check(slot)
        self._clear(slot)
        self._live[slot] = True

    def free(self, slot: int) -> None:
        """The slot's row is gone; its tokens are cleared when somebody moves in."""
        self._check(slot)
        self._live[slot] = False

    def save(self, slot: int, length: int) -> Snapshot:
        """Copy the first `length` tokens of a row. Recurrent state exists only at the row's own length."""
        self._check_live(slot)
        self._check_state(slot, length, "keep")
        parts = [leaf.copied(slot, length) for leaf in self.leaves]
        mx.eval(parts)
        return Snapshot(length, parts)

    def load(self, slot: int, snapshot: Snapshot, length: int) -> None:
        """Write the first `length` tokens of a snapshot into a slot."""
        self._check(slot)
        if length > min(snapshot.length, self.capacity):
            raise EngineError(f"{length} tokens of an entry of {snapshot.length} do not fit in {self.capacity}.")
        if self.recurrent and length != snapshot.length:
            raise EngineError(f"Recurrent state kept at {snapshot.length} tokens cannot serve {length}.")
        self._arrive(slot, length, extent=length)
        for leaf, part in zip(self.leaves, snapshot.parts, strict=True):
            leaf.paste(slot, part, length)
        mx.eval(self.arrays())

    def copy(self, src: int, target: ArenaBuffers, dst: int, length: int | None = None) -> None:
        """Copy the first `length` tokens (None: all that were written) of a row into a slot of an arena."""
        self._check_live(src)
        target._check(dst)
        written = self._extent[src] if length is None else length
        if written > target.capacity:
            raise EngineError(f"A row of {written} tokens does not fit in a slot of {target.capacity}.")
        state = self._length[src] if length is None else length
        self._check_state(src, state, "copy")
        target._arrive(dst, state, extent=written)
        for leaves in self._batches(written):
            rows = [self.leaves[i].copied(src, written) for i in leaves]
            mx.eval(rows)
            for i, row in zip(leaves, rows, strict=True):
                target.leaves[i].paste(dst, row, written)
            mx.eval([target.leaves[i].arrays() for i in leaves])

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self._check(a)
        self._check(b)
        length = max(self._extent[a], self._extent[b])
        for leaves in self._batches(2 * length):
            rows = [(self.leaves[i].copied(a, length), self.leaves[i].copied(b, length)) for i in leaves]
            mx.eval(rows)
            for i, (mine, theirs) in zip(leaves, rows, strict=True):
                self.leaves[i].paste(a, theirs, length)
                self.leaves[i].paste(b, mine, length)
            mx.eval([self.leaves[i].arrays() for i in leaves])
        self._live[a], self._live[b] = self._live[b], self._live[a]
        self._extent[a], self._extent[b] = self._extent[b], self._extent[a]
        self._length[a], self._length[b] = self._length[b], self._length[a]

    def open(self, view: RowView, lengths: Sequence[int]) -> None:
        """Prepare all layers for one model call; `lengths` are the rows' tokens afterwards."""
        if view.need > self.capacity:
            raise EngineError(f"A forward needs {view.need} tokens per row; the buffers hold {self.capacity}.")
        for slot, length in zip(range(view.start, view.stop), lengths, strict=True):
            self._check_live(slot)
            self._length[slot] = length
        self.reach(view)
        self.resume(view)

    def reach(self, view: RowView) -> None:
        """Rows of this view are written as far as it needs."""
        for slot in range(view.start, view.stop):
            self._extent[slot] = max(self._extent[slot], view.need)

    def resume(self, view: RowView) -> None:
        """All layers are at this view, whatever view they were opened for meanwhile."""
        for leaf in self.leaves:
            leaf.open(view)

    def close(self) -> None:
        """The model call has returned."""
        for leaf in self.leaves:
            leaf.close()

    def check_state(self, start: int, kv_len: Sequence[int]) -> None:
        """Recurrent rows continue where they are, or start alone: they can neither roll back nor skip."""
        if not self.recurrent:
            return
        if len(kv_len) > 1 and min(kv_len) == 0:
            raise EngineError("A recurrent row without tokens must be fed alone.")
        for slot, length in enumerate(kv_len, start):
            if length:
                self._check_state(slot, length, "continue")

    def _arrive(self, slot: int, length: int, *, extent: int) -> None:
        self._clear(slot)
        self._live[slot], self._length[slot], self._extent[slot] = True, length, extent

    def _batches(self, length: int) -> Iterator[list[int]]:
        """Indices of leaves whose rows of `length` tokens take about BATCH bytes together."""
        batch: list[int] = []
        size = 0
        for i, leaf in enumerate(self.leaves):
            batch.append(i)
            size += leaf.row_bytes(length)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _clear(self, slot: int) -> None:
        if self._extent[slot]:
            for leaf in self.leaves:
                leaf.zero(slot, self._extent[slot])
            mx.eval(self.arrays())
        self._extent[slot] = self._length[slot] = 0

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.rows:
            raise EngineError(f"Slot {slot} does not exist; the arena has {self.rows} rows.")

    def _check_live(self, slot: int) -> None:
        self._check(slot)
        if not self._live[slot]:
            raise EngineError(f"Slot {slot} holds no row.")

    def _check_state(self, slot: int, length: int, what: str) -> None:
        if self.recurrent and length != self._length[slot]:
            raise EngineError(
                f"Cannot {what} slot {slot} at {length} tokens: its recurrent state is that of {self._length[slot]}."
            )
