"""One arena: the buffers of all layers for rows of one capacity, and the operations on its slots.

Growing needs the memory of one extra layer, copying that of BATCH extra bytes (design: Ragged rows); buffers that take
memory by the page (`row_memory.py`) need not grow, and their rows move without copying. MLX writes into any other
buffer in place only if nothing else refers to it, as unfinished work does: so everything that reads a buffer is
evaluated before the buffer is written. Does not know models, nor decides which row gets which slot.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from phalanx.errors import EngineError
from phalanx.model.cache import row_memory
from phalanx.model.cache.layer_layout import KvLayout, Layout
from phalanx.model.cache.ragged_cache import Leaf, StateRows, build
from phalanx.model.cache.row_view import RowView

BATCH = 64 << 20
"""Bytes of row copies that are evaluated together: few enough to fit, enough to keep waits rare."""


class Snapshot:
    """An evaluated copy of the first `length` tokens of a row, in all layers, with memory of its own.

    Args:
        parts: of each layer. Those of further layers are copied from the row later, by `source`.
    """

    def __init__(self, length: int, parts: list[list[mx.array]], source: ArenaBuffers | None = None) -> None:
        self.length = length
        self.copied = parts
        self._source = source

    @property
    def parts(self) -> list[list[mx.array]]:
        """The arrays of each layer. Copies what is missing."""
        if self._source is not None:
            self._source.copy_saved(only=self)
            self._source = None
        return self.copied

    @property
    def is_copied(self) -> bool:
        """Whether the copies of all layers exist."""
        return self._source is None or len(self.copied) == len(self._source.leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of what is copied so far."""
        return sum(array.nbytes for part in self.copied for array in part)


class ArenaBuffers:
    """The buffers of one arena. `caches` is the cache list for the model's call."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.caches: list[Any]
        self.leaves: list[Leaf]
        self.caches, self.leaves = build(layouts)
        self.recurrent = any(isinstance(leaf, StateRows) for leaf in self.leaves)
        kv = [leaf.layout for leaf in self.leaves if isinstance(leaf.layout, KvLayout)]
        self.windows = sorted({layout.window for layout in kv if layout.window is not None})  # tokens
        self.rows = 0
        self.capacity = 0
        self._live: list[bool] = []  # by slot: holds a row
        self._extent: list[int] = []  # by slot: tokens that may differ from zero
        self._length: list[int] = []  # by slot: tokens in the recurrent state
        self._given_back: list[int] = []  # by slot: leaves of an ended row already given back
        self._unsaved: list[tuple[int, weakref.ref[Snapshot]]] = []  # slots, and snapshots that lack layers of theirs

    @property
    def has_rows(self) -> bool:
        """Whether a slot holds a row."""
        return any(self._live)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of rows; of pages only written ones, to within a page per head."""
        if row_memory.in_pages():
            return sum(leaf.row_bytes(extent) for leaf in self.leaves for extent in self._extent if extent)
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All buffers."""
        return [array for leaf in self.leaves for array in leaf.arrays()]

    def touched(self) -> list[mx.array]:
        """The arrays that the last forward wrote: evaluate them together with the logits."""
        return [array for leaf in self.leaves for array in leaf.touched()]

    def resize(self, rows: int, capacity: int) -> None:
        """Reallocate. Live rows in slots that remain keep their tokens, up to the new capacity."""
        self.copy_saved()
        kept = [slot for slot in range(min(rows, self.rows)) if self._live[slot]]
        length = min(capacity, max((self._extent[slot] for slot in kept), default=0))
        for leaf in self.leaves:
            leaf.allocate(rows, capacity, kept, length)
        live = set(kept)
        self._live = [slot in live for slot in range(rows)]
        self._extent = [min(self._extent[slot], length) if slot in live else 0 for slot in range(rows)]
        self._length = [self._length[slot] if slot in live else 0 for slot in range(rows)]
        self._given_back = [0] * rows
        self.rows, self.capacity = rows, capacity

    def admit(self, slot: int) -> None:
        """Give the slot to a new sequence. Clears it, because a NaN spreads even from a masked position."""
        self._check(slot)
        if self._is_unsaved(slot) and (unused := self._unused()) is not None:
            self.swap(slot, unused)
        self._clear(slot)
        self._live[slot] = True

    def free(self, slot: int) -> None:
        """Free the slot. Its tokens are cleared by `give_back`, at the latest when the next row takes it."""
        self._check(slot)
        self._live[slot] = False

    def give_back(self, max_bytes: float = math.inf) -> None:
        """Return memory of ended rows to the system, about `max_bytes` at most. Does nothing without pages, nor for
        rows that are not wholly saved."""
        ended = [slot for slot, live in enumerate(self._live) if not live and self._extent[slot]]
        ended = [slot for slot in ended if not self._is_unsaved(slot)]
        for slot in ended if row_memory.in_pages() else ():
            for leaf in self.leaves[self._given_back[slot] :]:
                if max_bytes <= 0:
                    return
                leaf.zero(slot, self._extent[slot])
                self._given_back[slot] += 1
                max_bytes -= leaf.row_bytes(self._extent[slot])
            self._clear(slot)

    def save(self, slot: int, length: int) -> Snapshot:
        """Copy the first `length` tokens of a row. A recurrent row can be copied only at its own length.

        With pages, `copy_saved` copies them, at the latest when the snapshot is used or another row takes the slot. The
        row may only grow meanwhile.
        """
        self._check_live(slot)
        self._check_state(slot, length, "keep")
        snapshot = Snapshot(length, [], self)
        self._unsaved.append((slot, weakref.ref(snapshot)))
        if self.recurrent or not row_memory.in_pages():
            self.copy_saved()
        return snapshot

    def copy_saved(self, max_bytes: float = math.inf, *, only: Snapshot | None = None) -> None:
        """Copy layers that snapshots lack (or that `only` this one lacks), about `max_bytes` at most."""
        for entry in [*self._unsaved]:
            slot, snapshot = entry[0], entry[1]()
            if only is not None and snapshot is not only:
                continue
            while snapshot is not None and len(snapshot.copied) < len(self.leaves):
                if max_bytes <= 0:
                    return
                mx.eval(part := self.leaves[len(snapshot.copied)].copied(slot, snapshot.length))
                snapshot.copied.append(part)
                max_bytes -= sum(array.nbytes for array in part)
            self._unsaved.remove(entry)

    def load(self, slot: int, snapshot: Snapshot, length: int, start: int = 0) -> None:
        """Write tokens `[start, length)` of a snapshot into a slot, which has the tokens before."""
        self._check(slot)
        if length > min(snapshot.length, self.capacity):
            raise EngineError(f"{length} tokens of an entry of {snapshot.length} do not fit in {self.capacity}.")
        if self.recurrent and length != snapshot.length:
            raise EngineError(f"Recurrent state kept at {snapshot.length} tokens cannot serve {length}.")
        if start == 0:
            self._occupy(slot, length, extent=length)
        self._length[slot], self._extent[slot] = length, max(length, self._extent[slot])
        for leaf, part in zip(self.leaves, snapshot.parts, strict=True):
            leaf.paste(slot, [array[:, :, start:] for array in part] if start else part, length, start)
        mx.eval(self.arrays())

    def copy(self, src: int, target: ArenaBuffers, dst: int, length: int | None = None, start: int = 0) -> None:
        """Copy tokens `[start, length)` (None: to the last written one) of a row into a slot of an arena, maybe this
        one. The slot has the tokens before `start`."""
        self._check_live(src)
        target._check(dst)
        written = self._extent[src] if length is None else length
        if written > target.capacity:
            raise EngineError(f"A row of {written} tokens does not fit in a slot of {target.capacity}.")
        state = self._length[src] if length is None else length
        self._check_state(src, state, "copy")
        if start == 0:
            target._occupy(dst, state, extent=written)
        target._length[dst], target._extent[dst] = state, max(written, target._extent[dst])
        for leaves in self._batches(written - start):
            rows = [self.leaves[i].copied(src, written, start) for i in leaves]
            mx.eval(rows)
            for i, row in zip(leaves, rows, strict=True):
                target.leaves[i].paste(dst, row, written, start)
            mx.eval([target.leaves[i].arrays() for i in leaves])

    def move(self, src: int, target: ArenaBuffers, dst: int) -> None:
        """Move a row to a free slot of an arena, maybe this one."""
        self._check_live(src)
        if target is self and row_memory.in_pages():
            self.swap(src, dst)
            return
        self.copy(src, target, dst)
        self.free(src)

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots, one of which may be free: by their pages, or through copies."""
        self._check(a)
        self._check(b)
        length = max(self._extent[a], self._extent[b])
        if row_memory.in_pages():
            mx.eval(regions := self.arrays())
            for region in regions:
                row_memory.swap(region, a, b, length)
        else:
            self._swap_copies(a, b, length)
        by_slot: list[list[Any]] = [self._live, self._extent, self._length, self._given_back]
        for values in by_slot:
            values[a], values[b] = values[b], values[a]
        other = {a: b, b: a}
        self._unsaved = [(other.get(slot, slot), snapshot) for slot, snapshot in self._unsaved]

    def _swap_copies(self, a: int, b: int, length: int) -> None:
        for leaves in self._batches(2 * length):
            rows = [(self.leaves[i].copied(a, length), self.leaves[i].copied(b, length)) for i in leaves]
            mx.eval(rows)
            for i, (mine, theirs) in zip(leaves, rows, strict=True):
                self.leaves[i].paste(a, theirs, length)
                self.leaves[i].paste(b, mine, length)
            mx.eval([self.leaves[i].arrays() for i in leaves])

    def open(self, view: RowView, lengths: Sequence[int]) -> None:
        """Prepare all layers for one model call; `lengths` are the rows' lengths after it."""
        self.advance(view, lengths)
        self.resume(view)

    def advance(self, view: RowView, lengths: Sequence[int]) -> None:
        """Record the rows' lengths after a model call, without preparing the layers."""
        if view.need > self.capacity:
            raise EngineError(f"A forward needs {view.need} tokens per row; the buffers hold {self.capacity}.")
        for slot, length in zip(range(view.start, view.stop), lengths, strict=True):
            self._check_live(slot)
            self._length[slot] = length
        self.reach(view)

    def reach(self, view: RowView) -> None:
        """Record that a forward over this view writes its rows."""
        for slot, end in enumerate(view.ends, view.start):
            self._extent[slot] = max(self._extent[slot], end)

    def resume(self, view: RowView) -> None:
        """Set all layers to this view."""
        for leaf in self.leaves:
            leaf.open(view)

    def close(self) -> None:
        """End a model call."""
        for leaf in self.leaves:
            leaf.close()

    def forget(self) -> None:
        """Drop the new recurrent state of the last model call: the rows keep their earlier lengths."""
        for leaf in self.leaves:
            if isinstance(leaf, StateRows):
                leaf.forget()

    def check_state(self, start: int, kv_len: Sequence[int]) -> None:
        """Check that recurrent rows continue at their own length, or start alone: they cannot roll back or skip."""
        if not self.recurrent:
            return
        if len(kv_len) > 1 and min(kv_len) == 0:
            raise EngineError("A recurrent row without tokens must be fed alone.")
        for slot, length in enumerate(kv_len, start):
            if length:
                self._check_state(slot, length, "continue")

    def _occupy(self, slot: int, length: int, *, extent: int) -> None:
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

    def _is_unsaved(self, slot: int) -> bool:
        return any(slot == unsaved and snapshot() is not None for unsaved, snapshot in self._unsaved)

    def _unused(self) -> int | None:
        """A slot without a row or tokens."""
        return next((slot for slot, live in enumerate(self._live) if not live and not self._extent[slot]), None)

    def _clear(self, slot: int) -> None:
        if self._is_unsaved(slot):
            self.copy_saved()
        if self._extent[slot]:
            mx.eval(self.arrays())
            for leaf in self.leaves[self._given_back[slot] :]:
                leaf.zero(slot, self._extent[slot])
            mx.eval(self.arrays())
        self._extent[slot] = self._length[slot] = self._given_back[slot] = 0

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.rows:
            raise EngineError(f"Slot {slot} does not exist; the arena has {self.rows} rows.")

    def _check_live(self, slot: int) -> None:
        self._check(slot)
        if not self._live[slot]:
            raise EngineError(f"Slot {slot} holds no row.")

    def _check_state(self, slot: int, length: int, operation: str) -> None:
        if self.recurrent and length != self._length[slot]:
            raise EngineError(
                f"Cannot {operation} slot {slot} at {length} tokens: "
                f"its recurrent state is that of {self._length[slot]}."
            )
