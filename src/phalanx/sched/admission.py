"""Whether a row may have this much KV memory. The one place that spends the KV budget.

A buffer costs rows x capacity, so the budget counts what is really allocated, not the sum of row lengths (design:
Ragged rows). Short rows share arena 0, whose capacity never exceeds `long_threshold`; longer ones share arena 1. The
threshold is chosen so that a full arena 0 takes at most half of the budget. Does not know which row comes first
(`scheduler.py`).
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.sched.arena import Arena, Layout

GRANULE = 256  # tokens; capacities are multiples of it
SMALLEST_THRESHOLD = 1024  # tokens


class KvLimits(Struct, frozen=True, kw_only=True):
    """Limits of the KV cache, constant for the life of an engine."""

    max_num_seqs: int
    max_model_len: int
    kv_budget: int  # bytes
    bytes_per_token: int
    bytes_per_row: int = 0  # recurrent state

    @property
    def long_threshold(self) -> int:
        """Largest capacity of arena 0, in tokens."""
        half = max(0, self.kv_budget // 2 - self.max_num_seqs * self.bytes_per_row)
        share = half // max(1, self.max_num_seqs * self.bytes_per_token)
        return max(SMALLEST_THRESHOLD, share // GRANULE * GRANULE)

    @property
    def n_arenas(self) -> int:
        """Two where rows can be longer than the threshold, else one."""
        return 2 if self.max_model_len > self.long_threshold else 1


def round_up(tokens: int) -> int:
    """Tokens rounded up to whole granules."""
    return -(-tokens // GRANULE) * GRANULE


def largest_row(kv_budget: int, bytes_per_token: int, bytes_per_row: int) -> int:
    """The longest single row, in tokens, that the budget can hold: an upper limit of `max_model_len`."""
    if bytes_per_token == 0:
        return 1 << 40
    return max(0, (kv_budget - bytes_per_row) // bytes_per_token) // GRANULE * GRANULE


class Admission:
    """Spends the budget on a layout's arenas by resizing them."""

    def __init__(self, limits: KvLimits, layout: Layout) -> None:
        self.limits = limits
        self.layout = layout

    @property
    def used(self) -> int:
        """Bytes allocated for rows."""
        return sum(self._cost(a.allocated, a.capacity) for a in self.layout.arenas)

    def arena_for(self, tokens: int) -> Arena:
        """The arena a row of this many tokens belongs to."""
        long = self.limits.n_arenas > 1 and tokens > self.limits.long_threshold
        return self.layout.arenas[1 if long else 0]

    def reserve(self, arena: Arena, rows: int, tokens: int) -> bool:
        """Make sure the arena has `rows` rows of `tokens` tokens, resizing if the budget allows. Changes state.

        Tries a generous size first (rows doubled, capacity grown by an eighth), so that growth is rare; then the
        smallest size that suffices. Returns False, and changes nothing, when even that is over the budget.
        """
        if arena.allocated >= rows and arena.capacity >= tokens:
            return True
        tight_rows = max(rows, len(arena.rows))
        tight = max(round_up(tokens), self._longest(arena))
        roomy_rows = min(self.limits.max_num_seqs, 1 << (tight_rows - 1).bit_length())
        roomy = max(tight, min(round_up(max(arena.capacity, tokens * 9 // 8)), self._ceiling(arena)))
        for n, capacity in ((max(roomy_rows, tight_rows), roomy), (tight_rows, tight)):
            if self._fits(arena, n, capacity):
                if (n, capacity) != (arena.allocated, arena.capacity):
                    self.layout.resize(arena, n, capacity)
                return True
        return self._shrink_others(arena) and self.reserve(arena, rows, tokens)

    def widen(self, arena: Arena, tokens: int) -> None:
        """Give the arena's rows more room, as far as memory is free and rows may be so long. Changes state.

        Tries a generous size first, as `reserve` does.
        """
        if arena.capacity >= tokens:
            return
        for wanted in (tokens * 9 // 8, tokens):
            capacity = min(round_up(wanted), self._ceiling(arena))
            if capacity > arena.capacity and self._fits(arena, arena.allocated, capacity):
                self.layout.resize(arena, arena.allocated, capacity)
                return

    def _shrink_others(self, arena: Arena) -> bool:
        """Cut the other arenas to what their rows need; False when they are as small as possible already."""
        changed = False
        for other in self.layout.arenas:
            size = (len(other.rows), self._longest(other) if other.rows else 0)
            if other is not arena and size != (other.allocated, other.capacity):
                self.layout.resize(other, *size)
                changed = True
        return changed

    def _ceiling(self, arena: Arena) -> int:
        limit = self.limits.max_model_len
        if self.limits.n_arenas > 1 and arena.index == 0:
            limit = self.limits.long_threshold
        return round_up(limit)

    def _longest(self, arena: Arena) -> int:
        return max((round_up(len(row.tokens)) for row in arena.rows), default=0)

    def _fits(self, arena: Arena, rows: int, capacity: int) -> bool:
        others = self.used - self._cost(arena.allocated, arena.capacity)
        return others + self._cost(rows, capacity) <= self.limits.kv_budget

    def _cost(self, rows: int, capacity: int) -> int:
        return rows * (capacity * self.limits.bytes_per_token + self.limits.bytes_per_row)
