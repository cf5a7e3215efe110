"""Which computed prefix a new row continues from, and how much of it each step copies (design: Ragged rows).

The longest prefix is a kept entry's or a live row's. A copy touches new memory, so beside decoding rows it takes
several steps, each of which copies for about as long as a step of theirs takes on a CPU. A prefix that is dropped
meanwhile is looked up again; what was copied stays.
"""

from __future__ import annotations

from phalanx.sched.arena import ArenaLayout
from phalanx.sched.disk_prefixes import DiskPrefixes
from phalanx.sched.plan import Restore, Share
from phalanx.sched.prefix import PrefixIndex, live_prefix
from phalanx.sched.sequence import Hit, Sequence


class PrefixCopies:
    """Finds prefixes and plans their copies.

    Args:
        whole_only: recurrent state exists only at its exact length, so a prefix is copied at once.
    """

    def __init__(self, entries: PrefixIndex, disk: DiskPrefixes, layout: ArenaLayout, *, whole_only: bool) -> None:
        self._entries = entries
        self._disk = disk
        self._layout = layout
        self._whole_only = whole_only

    def find(self, seq: Sequence) -> tuple[int, Hit | Sequence | None]:
        """The longest prefix in memory: its length, and its kept entry or live row."""
        limit = len(seq.tokens) - 1
        hit = self._entries.find(seq.request.sharing, seq.tokens, limit)
        live, shared = live_prefix(self._layout.rows(), seq, limit, whole_only=self._whole_only)
        if live is not None and (hit is None or shared > hit.length):
            return shared, live
        return (0, None) if hit is None else (hit.length, hit)

    def begin(self, seq: Sequence) -> None:
        """A sequence that got a row will continue from its longest prefix. Changes state."""
        seq.prefix_len, seq.prefix = self.find(seq)
        if isinstance(seq.prefix, Hit) and seq.prefix.entry == seq.load:
            seq.prefix_len = self._disk.restored(seq, seq.prefix_len)
        whole = self._entries.length(seq.prefix.entry) if isinstance(seq.prefix, Hit) else 0
        seq.nearest_len = max(seq.prefix_len, whole)

    def plan(self, max_tokens: float) -> list[Sequence]:
        """Plan copies of at most `max_tokens` tokens, one at least. Changes state.

        Returns:
            The rows whose prefixes are complete now.
        """
        complete: list[Sequence] = []
        for row in self._layout.prefilling():
            if row.prefix is not None and max_tokens > 0:
                max_tokens -= self._copy(row, max(1, max_tokens))
                if row.prefix is None:
                    complete.append(row)
        return complete

    def _copy(self, row: Sequence, max_tokens: float) -> int:
        """Plan to copy further tokens of a row's prefix. Returns how many."""
        if not self._exists(row):
            row.prefix_len, row.prefix = self.find(row)
        length = row.prefix_len if self._whole_only else int(min(row.prefix_len, row.kv_len + max_tokens))
        copied = max(0, length - row.kv_len)
        if copied and row.prefix is not None:
            self._layout.ops.append(_operation(row, row.prefix, length))
        row.kv_len += copied
        if row.kv_len >= row.prefix_len:
            row.prefix = None
        return copied

    def _exists(self, row: Sequence) -> bool:
        """Whether the prefix still has all tokens that its row copies."""
        if isinstance(row.prefix, Sequence):
            return row.prefix.slot >= 0 and row.prefix.kv_len >= row.prefix_len
        return row.prefix is not None and self._entries.length(row.prefix.entry) >= row.prefix_len


def _operation(row: Sequence, source: Hit | Sequence, length: int) -> Restore | Share:
    """The operation that copies up to token `length`."""
    if isinstance(source, Hit):
        return Restore(row.arena, row.slot, source.entry, length, row.kv_len)
    return Share(source.arena, source.slot, row.arena, row.slot, length, row.kv_len)
