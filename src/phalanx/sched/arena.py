"""Where rows live: the leader's model of the KV buffers, and the operations that change them.

An arena keeps its rows dense: slots `[0, D)` decode, `[D, len(rows))` prefill. Every change is recorded in `ops` as an
operation of the plan, which all ranks execute. With pipeline stages, each row group has its own arenas and decodes in
its own plans (design: Plans in flight). Does not know arrays, nor how much memory a row may have (`admission.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from phalanx.sched.plan import Admit, Free, Move, Resize, RowOp, Swap
from phalanx.sched.sequence import Sequence


class Arena:
    """One set of KV buffers `[rows, heads, capacity, head_dim]`."""

    def __init__(self, index: int, group: int, level: int) -> None:
        self.index = index
        self.group = group
        self.level = level  # its rows may be twice as long as those of the level below
        self.allocated = 0  # rows
        self.capacity = 0  # tokens per row
        self.rows: list[Sequence] = []
        self.n_decoding = 0


class ArenaLayout:
    """All arenas of a group of ranks, with the operations of the step being planned in `ops`.

    Arenas `[0, row_groups)` hold the short rows of each row group; the next `row_groups`, if any, longer ones, etc.
    """

    def __init__(self, n_arenas: int, row_groups: int) -> None:
        self.row_groups = row_groups
        self.arenas = [Arena(i, i % row_groups, i // row_groups) for i in range(n_arenas)]
        self.ops: list[RowOp] = []

    def group(self, group: int) -> list[Arena]:
        """The arenas of a row group."""
        return self.arenas[group :: self.row_groups]

    def decoding(self, group: int | None) -> list[Sequence]:
        """The decoding rows of a row group; none for None."""
        if group is None:
            return []
        return [row for arena in self.group(group) for row in arena.rows[: arena.n_decoding]]

    def next_group(self, last: int, short_groups: Collection[int] = ()) -> int | None:
        """The next row group to decode, round robin; None if every group with decoding rows is in flight or short.

        Args:
            last: the row group that decoded last.
            short_groups: row groups that lack memory.
        """
        for group in ((last + i) % self.row_groups for i in range(1, self.row_groups + 1)):
            rows = self.decoding(group)
            if rows and group not in short_groups and not any(row.in_flight for row in rows):
                return group
        return None

    @property
    def n_rows(self) -> int:
        """Placed sequences."""
        return sum(len(arena.rows) for arena in self.arenas)

    def prefilling(self) -> list[Sequence]:
        """Placed sequences whose prompts were not computed before this step."""
        return [row for arena in self.arenas for row in arena.rows[arena.n_decoding :]]

    def rows(self) -> list[Sequence]:
        """All placed sequences, arena by arena, in slot order."""
        return [row for arena in self.arenas for row in arena.rows]

    def rows_by_owner(self) -> Counter[str]:
        """How many rows each owner has."""
        return Counter(row.request.owner for row in self.rows())

    def resize(self, arena: Arena, rows: int, capacity: int) -> None:
        """Reallocate. Changes state; every placed row must still fit."""
        assert rows >= len(arena.rows)
        arena.allocated, arena.capacity = rows, capacity
        self.ops.append(Resize(arena.index, rows, capacity))

    def admit(self, seq: Sequence, arena: Arena) -> None:
        """Give a waiting sequence the next slot, as a prefilling row. Changes state; needs `allocated > len(rows)`."""
        assert len(arena.rows) < arena.allocated
        self._place(seq, arena, len(arena.rows))
        arena.rows.append(seq)
        self.ops.append(Admit(arena.index, seq.slot, seq.number))

    def promote(self, seq: Sequence) -> None:
        """A prefilling row becomes a decoding one: it swaps slots with the first prefilling row. Changes state."""
        arena = self.arenas[seq.arena]
        boundary = arena.n_decoding
        assert not seq.decoding and seq.slot >= boundary
        if seq.slot != boundary:
            other = arena.rows[boundary]
            self.ops.append(Swap(arena.index, boundary, seq.slot))
            arena.rows[seq.slot], other.slot = other, seq.slot
            arena.rows[boundary], seq.slot = seq, boundary
        seq.decoding = True
        arena.n_decoding += 1

    def release(self, seq: Sequence) -> None:
        """Free a row and close the hole with the last row of its kind. Changes state."""
        arena = self.arenas[seq.arena]
        hole = seq.slot
        self.ops.append(Free(arena.index, hole))
        if seq.decoding:
            arena.n_decoding -= 1
            hole = self._fill(arena, hole, arena.n_decoding)
        self._fill(arena, hole, len(arena.rows) - 1)
        arena.rows.pop()
        seq.unplace()

    def free_empty(self) -> None:
        """Free the buffers of arenas without rows. Changes state."""
        for arena in self.arenas:
            if not arena.rows and arena.allocated:
                self.resize(arena, 0, 0)

    def transfer(self, seq: Sequence, target: Arena) -> None:
        """Move a row to another arena, keeping its KV. Changes state; needs a free slot there."""
        source, slot, decoding = self.arenas[seq.arena], seq.slot, seq.decoding
        assert len(target.rows) < target.allocated
        free = len(target.rows)
        self.ops.append(Move(source.index, slot, target.index, free))
        if decoding:
            source.n_decoding -= 1
            slot = self._fill(source, slot, source.n_decoding)
        self._fill(source, slot, len(source.rows) - 1)
        source.rows.pop()
        seq.decoding = False
        self._place(seq, target, free)
        target.rows.append(seq)
        if decoding:
            self.promote(seq)

    def _fill(self, arena: Arena, hole: int, last: int) -> int:
        """Row `last` moves into the hole; returns the new hole."""
        if last != hole:
            moved = arena.rows[last]
            self.ops.append(Move(arena.index, last, arena.index, hole))
            arena.rows[hole], moved.slot = moved, hole
        return last

    def _place(self, seq: Sequence, arena: Arena, slot: int) -> None:
        seq.arena, seq.slot = arena.index, slot
