"""KV memory of rows that take it by the page (design: Ragged rows). Spends the budget in place of `admission.py`.

A row costs its own tokens, rounded up to whole pages, promised before a page is touched. So rows grow without an
operation in the plan, and one arena has room for all rows, each as long as the context.
"""

from __future__ import annotations

from phalanx.sched.admission import Admission, KvLimits, round_up
from phalanx.sched.arena import Arena, ArenaLayout
from phalanx.sched.sequence import Sequence


class PageAdmission:
    """Spends the budget row by row."""

    def __init__(self, limits: KvLimits, layout: ArenaLayout) -> None:
        self.limits = limits
        self.layout = layout

    @property
    def used(self) -> int:
        """Bytes promised to rows."""
        limits = self.limits
        return sum(row.room * limits.bytes_per_token + limits.bytes_per_row for row in self.layout.rows())

    def admit(self, seq: Sequence) -> bool:
        """As `Admission.admit`."""
        if self.layout.n_rows >= self.limits.max_num_seqs or not self._grant(seq, len(seq.tokens) + 1):
            return False
        arena = min(self.layout.arenas, key=lambda arena: len(arena.rows))
        if not arena.allocated:
            self.layout.resize(arena, self.limits.max_num_seqs, round_up(self.limits.max_model_len))
        self.layout.admit(seq, arena)
        return True

    def make_room(self, seq: Sequence) -> bool:
        """As `Admission.make_room`."""
        return self._grant(seq, len(seq.tokens))

    def draft_room(self, arena: Arena, wanted: int) -> int:
        """As `Admission.draft_room`."""
        rows = arena.rows[: arena.n_decoding]
        for row in rows:
            self._grant(row, min(len(row.tokens) + wanted, arena.capacity))
        return max(0, min([wanted, *(min(row.room, arena.capacity) - len(row.tokens) for row in rows)]))

    def settle(self) -> None:
        """As `Admission.settle`: nothing to do, as ended rows free their own pages."""

    def _grant(self, seq: Sequence, tokens: int) -> bool:
        """Promise a row memory for this many tokens. Returns False, and changes nothing, if it is not free."""
        if tokens <= seq.room:
            return True
        limits = self.limits
        room = -(-tokens // limits.page_tokens) * limits.page_tokens
        more = (room - seq.room) * limits.bytes_per_token + (limits.bytes_per_row if seq.slot < 0 else 0)
        if self.used + more > limits.kv_budget:
            return False
        seq.room = room
        return True


def admission_for(limits: KvLimits, layout: ArenaLayout) -> Admission | PageAdmission:
    """By the page if all ranks can, else by arena."""
    return PageAdmission(limits, layout) if limits.page_tokens else Admission(limits, layout)
