"""KV memory of rows that live in arenas: the only place that spends the KV budget for them.

A buffer costs rows x capacity, so the budget counts allocated memory, not the sum of row lengths (design:
Ragged rows). Short rows share arena 0, whose capacity never exceeds `long_threshold`; each further arena has twice the
limit of the one before. The threshold is chosen so that a full arena 0 takes at most half of the budget. A long prompt
never resizes other rows to its own length: it takes an arena that has the room or no rows, or waits. With row groups,
each has all these arenas. `scheduler.py` decides which row comes first; `page_admission.py` counts rows that take
memory by the page.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.sched.arena import Arena, ArenaLayout
from phalanx.sched.sequence import Sequence

GRANULE = 256  # tokens; capacities are multiples of it
MIN_THRESHOLD = 1024  # tokens


class KvLimits(Struct, frozen=True, kw_only=True):
    """Limits of the KV cache, constant for the life of an engine."""

    max_num_seqs: int
    max_model_len: int
    kv_budget: int  # bytes
    bytes_per_token: int
    bytes_per_row: int = 0  # recurrent state
    page_tokens: int = 0  # tokens by which the memory of a row grows; 0: rows live in arenas, which grow as a whole
    row_groups: int = 1  # sets of rows that decode in separate plans: most decoding plans in flight

    @property
    def long_threshold(self) -> int:
        """Largest capacity of an arena of short rows, in tokens."""
        half = max(0, self.kv_budget // 2 - self.max_num_seqs * self.bytes_per_row)
        share = half // max(1, self.max_num_seqs * self.bytes_per_token)
        return max(MIN_THRESHOLD, share // GRANULE * GRANULE)

    @property
    def n_arenas(self) -> int:
        """Per row group: one if rows take memory by the page or are all short, else two at least."""
        if self.page_tokens or self.max_model_len <= MIN_THRESHOLD:
            return self.row_groups
        doublings = max(1, (-(-self.max_model_len // self.long_threshold) - 1).bit_length())
        return self.row_groups * (1 + doublings)


def round_up(tokens: int) -> int:
    """Tokens rounded up to whole granules."""
    return -(-tokens // GRANULE) * GRANULE


def max_row(kv_budget: int, bytes_per_token: int, bytes_per_row: int) -> int:
    """The longest single row, in tokens, that the budget can hold: an upper limit of `max_model_len`."""
    if bytes_per_token == 0:
        return 1 << 40
    return max(0, (kv_budget - bytes_per_row) // bytes_per_token) // GRANULE * GRANULE


class Admission:
    """Spends the budget on a layout's arenas by resizing them."""

    def __init__(self, limits: KvLimits, layout: ArenaLayout) -> None:
        self.limits = limits
        self.layout = layout

    @property
    def used(self) -> int:
        """Bytes allocated for rows."""
        return sum(self._cost(a.allocated, a.capacity) for a in self.layout.arenas)

    def admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence a row, with room for one token more, in the row group with the fewest rows.

        Changes state. Returns False, and changes nothing, when all rows are taken, memory is short, or other rows would
        have to be as long as this one.
        """
        if self.layout.n_rows >= self.limits.max_num_seqs:
            return False
        groups = range(self.limits.row_groups)
        group = min(groups, key=lambda group: sum(len(arena.rows) for arena in self.layout.group(group)))
        need = len(seq.tokens) + 1
        arenas = [arena for arena in self.layout.group(group) if need <= self._ceiling(arena)]
        arena = next((arena for arena in arenas if not arena.rows or need <= max(arena.capacity, MIN_THRESHOLD)), None)
        if arena is None or not self.reserve(arena, len(arena.rows) + 1, need):
            return False
        self.layout.admit(seq, arena)
        return True

    def make_room(self, seq: Sequence) -> bool:
        """Give a row room for its known tokens; moves it to an arena of longer rows if necessary.

        Changes state. Returns False, and changes nothing, when memory is short.
        """
        need = len(seq.tokens)
        arena = self.layout.arenas[seq.arena]
        target = next(a for a in self.layout.group(arena.group) if a.level >= arena.level and need <= self._ceiling(a))
        if target is arena:
            return self.reserve(arena, len(arena.rows), need)
        if not self.reserve(target, len(target.rows) + 1, need):
            return False
        self.layout.transfer(seq, target)
        return True

    def reserve(self, arena: Arena, rows: int, tokens: int) -> bool:
        """Make sure the arena has `rows` rows of `tokens` tokens, resizing if the budget allows. Changes state.

        Tries a generous size first (rows doubled, capacity grown by an eighth; that of long rows as large as it may
        be), so that growth is rare; then the smallest size that suffices. Returns False, and changes nothing, when even
        that is over the budget.
        """
        if arena.allocated >= rows and arena.capacity >= tokens:
            return True
        tight_rows = max(rows, len(arena.rows))
        tight = max(round_up(tokens), self._longest(arena))
        roomy_rows = min(self.limits.max_num_seqs, 1 << (tight_rows - 1).bit_length())
        roomy = max(tight, arena.capacity)
        if tokens > arena.capacity:
            wanted = round_up(tokens * 9 // 8) if arena.level == 0 else self._ceiling(arena)
            roomy = max(roomy, min(wanted, self._ceiling(arena)))
        for n, capacity in ((max(roomy_rows, tight_rows), roomy), (tight_rows, tight)):
            if self._fits(arena, n, capacity):
                if (n, capacity) != (arena.allocated, arena.capacity):
                    self.layout.resize(arena, n, capacity)
                return True
        return self._shrink_others(arena) and self.reserve(arena, rows, tokens)

    def draft_room(self, arena: Arena, wanted: int) -> int:
        """Draft tokens that every row of the arena has room for, `wanted` at most. Changes state: takes free memory for
        them."""
        longest = max(len(row.tokens) for row in arena.rows)
        self._widen(arena, longest + wanted)
        return max(0, min(wanted, arena.capacity - longest))

    def settle(self) -> None:
        """Free buffers of arenas without rows. Changes state."""
        self.layout.free_empty()

    def _widen(self, arena: Arena, tokens: int) -> None:
        """Give the arena's rows more room, within free memory and the arena's ceiling. Changes state.

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
        """Shrink the other arenas to what their rows need, never above their capacity; False if none could shrink."""
        changed = False
        for other in self.layout.arenas:
            size = (len(other.rows), min(other.capacity, self._longest(other)))
            if other is not arena and size != (other.allocated, other.capacity):
                self.layout.resize(other, *size)
                changed = True
        return changed

    def _ceiling(self, arena: Arena) -> int:
        return round_up(min(self.limits.max_model_len, self.limits.long_threshold << arena.level))

    def _longest(self, arena: Arena) -> int:
        return max((round_up(row.extent) for row in arena.rows), default=0)

    def _fits(self, arena: Arena, rows: int, capacity: int) -> bool:
        others = self.used - self._cost(arena.allocated, arena.capacity)
        return others + self._cost(rows, capacity) <= self.limits.kv_budget

    def _cost(self, rows: int, capacity: int) -> int:
        return rows * (capacity * self.limits.bytes_per_token + self.limits.bytes_per_row)
