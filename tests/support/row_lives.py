"""Random lives of rows in one arena, beside a plain model of what each row holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from phalanx.model.cache.buffers import ArenaBuffers, Snapshot
from phalanx.model.cache.layer_layout import Heads, KvLayout, Layout, StateLayout
from phalanx.model.cache.ragged_cache import RaggedKV, StateRows
from phalanx.model.cache.row_view import RowView
from phalanx.model.disk_blocks import BlockLayout, _packed, _unpack
from phalanx.sched.plan import DiskBlock

ROWS, CAPACITY = 5, 64
KV: tuple[Layout, ...] = (
    KvLayout(Heads(2, 16, mx.float32), Heads(2, 16, mx.float32), None),  # a row begins with a page
    KvLayout(Heads(3, 5, mx.float32), Heads(1, 7, mx.bfloat16), None),  # it does not
)
HYBRID: tuple[Layout, ...] = (*KV[:1], StateLayout((((3, 4), mx.float32), None, ((1100,), mx.float32))))


class Lives:
    """Does everything to an arena and to lists of numbers: `rows[slot]` has the number of each token, or is None."""

    def __init__(self, layouts: tuple[Layout, ...]) -> None:
        self.arena = ArenaBuffers(layouts)
        self.arena.resize(ROWS, CAPACITY)
        self.blocks = BlockLayout(layouts)
        self.recurrent = self.arena.recurrent
        self.rows: list[list[int] | None] = [None] * ROWS
        self.kept: list[tuple[list[int], Snapshot]] = []
        self.numbers = 0

    def live(self, run: int = 1) -> list[int]:
        """Slots from which on `run` rows live."""
        return [s for s in range(ROWS - run + 1) if all(self.rows[t] is not None for t in range(s, s + run))]

    def feed(self, data: Any) -> None:
        """Tokens for neighbouring rows, of equal or different lengths; maybe after a rollback, or with padding."""
        count = data.draw(st.integers(1, 3))
        starts = self.live(count)
        if not starts:
            return
        first = data.draw(st.sampled_from(starts))
        rows = [self.rows[s] for s in range(first, first + count)]
        if self.recurrent and count > 1 and not all(rows):
            return
        for row in rows:
            assert row is not None
            if row and not self.recurrent:
                del row[data.draw(st.integers(0, len(row))) :]
        most = CAPACITY - max(len(row or ()) for row in rows)
        if most == 0:
            return
        width = data.draw(st.integers(1, min(most, 20)))
        view = RowView(first, [len(row or ()) for row in rows], width)
        valid = [width if self.recurrent else data.draw(st.integers(1, width)) for _ in rows]
        self.arena.open(view, [len(row or ()) + n for row, n in zip(rows, valid, strict=True)])
        numbers = np.arange(self.numbers, self.numbers + count * width).reshape(count, width)
        self.numbers += count * width
        self._write(numbers)
        self.arena.close()
        mx.eval(self.arena.touched())
        for row, fed, n in zip(rows, numbers, valid, strict=True):
            assert row is not None
            row.extend(int(token) for token in fed[:n])

    def _write(self, numbers: np.ndarray) -> None:
        for i, leaf in enumerate(self.arena.leaves):
            if isinstance(leaf, RaggedKV):
                sides = [leaf.layout.keys, leaf.layout.values]
                keys, values = (_tokens(numbers + 100 * i, heads) for heads in sides if heads is not None)
                leaf.update_and_fetch(keys, values)
            else:
                last = mx.array(numbers[:, -1].astype(np.float32))
                entries = leaf.layout.entries
                leaf.cache = [
                    None if e is None else mx.broadcast_to(last.reshape(-1, *[1] * len(e[0])), (len(last), *e[0])) + i
                    for e in entries
                ]

    def admit(self, data: Any) -> None:
        """A new row, maybe from a snapshot or with a live row's beginning."""
        free = [s for s, row in enumerate(self.rows) if row is None]
        if not free:
            return
        slot = data.draw(st.sampled_from(free))
        source = data.draw(st.sampled_from(["", "snapshot", "row"]))
        self.arena.admit(slot)
        self.rows[slot] = []
        if source == "snapshot" and self.kept:
            tokens, snapshot = data.draw(st.sampled_from(self.kept))
            length = len(tokens) if self.recurrent else data.draw(st.integers(1, len(tokens)))
            for start, stop in self._parts(data, length):
                self.arena.load(slot, snapshot, stop, start)
            self.rows[slot] = tokens[:length]
        others = [s for s in self.live() if s != slot and self.rows[s]]
        if source == "row" and others:
            src = data.draw(st.sampled_from(others))
            row = self.rows[src] or []
            length = len(row) if self.recurrent else data.draw(st.integers(1, len(row)))
            for start, stop in self._parts(data, length):
                self.arena.copy(src, self.arena, slot, stop, start)
            self.rows[slot] = row[:length]

    def _parts(self, data: Any, length: int) -> list[tuple[int, int]]:
        """In what parts tokens are copied: recurrent state at once."""
        middle = 0 if self.recurrent else data.draw(st.integers(0, length - 1))
        return [(0, middle), (middle, length)] if middle else [(0, length)]

    def end(self, data: Any) -> None:
        """A row ends; maybe it is kept, maybe another takes its slot, maybe its memory is given back in part."""
        if not (slots := self.live()):
            return
        slot = data.draw(st.sampled_from(slots))
        row = self.rows[slot]
        if row and data.draw(st.booleans()):
            snapshot = self.arena.save(slot, len(row))
            self.kept.append((list(row), self._from_disk(snapshot) if data.draw(st.booleans()) else snapshot))
        self.arena.free(slot)
        self.rows[slot] = None
        if (others := self.live()) and data.draw(st.booleans()):
            src = data.draw(st.sampled_from(others))
            self.arena.move(src, self.arena, slot)
            self.rows[slot], self.rows[src] = self.rows[src], None
        self.arena.copy_saved(data.draw(st.sampled_from([0, 1, 2000, float("inf")])))
        self.arena.give_back(data.draw(st.sampled_from([0, 1, 2000, float("inf")])))

    def _from_disk(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot as it is after it was written to disk and loaded."""
        block = DiskBlock(b"name", b"parent", bytes(4 * snapshot.length), b"owner", ending=self.recurrent)
        loaded = self.blocks.allocate(snapshot.length)
        _unpack(_packed(self.blocks.views(snapshot), 0, block), self.blocks.views(loaded), 0, snapshot.length)
        return loaded

    def swap(self, data: Any) -> None:
        """Two slots, of which each may be empty."""
        a, b = data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(0, ROWS - 1))
        self.arena.swap(a, b)
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]

    def compare(self) -> None:
        """Every row holds its tokens; a row that was admitted just now is zero everywhere."""
        for slot, row in enumerate(self.rows):
            if row is None:
                continue
            for i, leaf in enumerate(self.arena.leaves):
                if isinstance(leaf, StateRows):
                    last = row[-1] + i if row else 0
                    assert all((np.array(buffer[slot]) == last).all() for buffer in leaf.arrays()), slot
                    continue
                for buffer, heads in zip(leaf.arrays(), (leaf.layout.keys, leaf.layout.values), strict=True):
                    assert heads is not None
                    wanted = _tokens(np.array([row]) + 100 * i, heads)
                    assert mx.array_equal(buffer[slot : slot + 1, :, : len(row)], wanted), slot
                    assert row or not mx.any(buffer[slot]).item(), slot

    def play(self, data: Any, steps: int = 25) -> None:
        """A random life, compared after every step."""
        actions = [self.admit, self.admit, self.feed, self.feed, self.feed, self.end, self.swap]
        for _ in range(steps):
            data.draw(st.sampled_from(actions))(data)
            self.compare()


def _tokens(numbers: np.ndarray, heads: Heads) -> mx.array:
    """[rows, L] as [rows, heads, L, dim]."""
    values = mx.array(numbers.astype(np.float32))[:, None, :, None]
    return mx.broadcast_to(values, (numbers.shape[0], heads.heads, numbers.shape[1], heads.dim)).astype(heads.dtype)
