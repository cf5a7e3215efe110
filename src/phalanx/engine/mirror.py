"""The mirror: every rank's own record of the rows, rebuilt from plans alone and compared with the scheduler's.

The leader keeps one too: the plan's digest comes from the scheduler's state, so the leader also detects a difference
between what it planned and what it executed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.errors import Desync
from phalanx.sched.plan import (
    Admit,
    Commit,
    CompareBlock,
    DropBlocks,
    Evict,
    Forward,
    Free,
    LoadBlocks,
    Move,
    Resize,
    Restore,
    RowOp,
    Share,
    Step,
    Store,
    Swap,
    WriteBlocks,
)
from phalanx.sched.sequence import extend_crc, state_digest


@dataclass(slots=True)
class Row:
    """One sequence in its slot."""

    seq: int  # its number
    kv_len: int = 0  # computed positions; a later commit may reject the last ones
    crc: int = 0  # of its committed tokens


class Mirror:
    """Rows by (arena, slot). Raises `Desync` when a plan does not fit them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], Row] = {}
        self.capacity: dict[int, tuple[int, int]] = {}  # arena -> (rows, tokens)
        self.entries: dict[int, int] = {}  # prefix entry -> tokens
        self._by_seq: dict[int, Row] = {}
        self.step = 0
        self.matches = 0

    def begin(self, step: Step) -> None:
        """Apply a step's commits and operations, and compare the result with its digest.

        Raises:
            Desync: names the step, the row and the field that differ.
        """
        if step.id != self.step + 1:
            raise Desync(f"step {step.id} follows step {self.step}: a plan was lost or repeated.")
        self.step = step.id
        for commit in step.commits:
            self._commit(commit)
        for op in step.ops:
            self._apply_op(op)
        rows = sorted(self.rows.items())
        own = state_digest((arena, slot, row.seq, row.kv_len, row.crc) for (arena, slot), row in rows)
        if own != step.digest:
            shown = "; ".join(f"arena {a} slot {s}: seq {r.seq} kv_len {r.kv_len}" for (a, s), r in rows)
            raise Desync(f"step {step.id}: row digest {own:08x}, in the plan {step.digest:08x}. Rows here: {shown}.")
        self.matches += 1

    def lengths(self, forward: Forward) -> list[int]:
        """Valid KV length of each row of a forward, before it. Checks that the rows hold the forward's sequences."""
        lengths = []
        for i, seq in enumerate(forward.seqs):
            row = self._row(forward.arena, forward.start + i, "forward")
            if row.seq != seq:
                raise Desync(
                    f"step {self.step}: forward over arena {forward.arena} slot {forward.start + i} means "
                    f"sequence {seq}, the row holds sequence {row.seq}."
                )
            lengths.append(row.kv_len)
        return lengths

    def advance(self, forward: Forward) -> None:
        """Count a forward's valid tokens as computed. Changes state."""
        for i, valid in enumerate(forward.valid):
            self._row(forward.arena, forward.start + i, "forward").kv_len += valid

    def _commit(self, commit: Commit) -> None:
        row = self._by_seq.get(commit.seq)
        if row is None:
            raise Desync(f"step {self.step}: commit for sequence {commit.seq}, which has no row here.")
        if commit.computed != row.kv_len:
            raise Desync(
                f"step {self.step}: sequence {commit.seq} has {row.kv_len} computed positions here, "
                f"{commit.computed} in the plan."
            )
        row.kv_len = commit.kv_len
        row.crc = extend_crc(row.crc, commit.tokens)

    def _apply_op(self, op: RowOp) -> None:
        match op:
            case Resize():
                self.capacity[op.arena] = (op.rows, op.capacity)
            case Admit():
                if (op.arena, op.slot) in self.rows:
                    raise Desync(f"step {self.step}: arena {op.arena} slot {op.slot} is taken.")
                row = Row(op.seq)
                self.rows[op.arena, op.slot] = row
                self._by_seq[op.seq] = row
            case Restore():
                self._copy(op, "restore")
                self._check_entry(op.entry, op.length)
            case Share():
                if self._row(op.src_arena, op.src, "share").kv_len < op.length:
                    raise Desync(f"step {self.step}: slot {op.src} has fewer than the {op.length} tokens to share.")
                self._copy(op, "share")
            case Move():
                self.rows[op.arena, op.dst] = self._pop(op.src_arena, op.src)
            case Swap():
                a, b = self._row(op.arena, op.a, "swap"), self._row(op.arena, op.b, "swap")
                self.rows[op.arena, op.a], self.rows[op.arena, op.b] = b, a
            case Store():
                if self._row(op.arena, op.slot, "store").kv_len < op.length:
                    raise Desync(f"step {self.step}: slot {op.slot} has fewer than the {op.length} tokens to keep.")
                self.entries[op.entry] = op.length
            case Evict():
                if self.entries.pop(op.entry, None) is None:
                    raise Desync(f"step {self.step}: prefix entry {op.entry} is not here.")
            case WriteBlocks():
                self._check_entry(op.entry, 0)
            case CompareBlock():
                self._check_entry(op.entry, op.stop)
                if self._row(op.arena, op.slot, "compare").kv_len < op.stop:
                    raise Desync(f"step {self.step}: slot {op.slot} has fewer than the {op.stop} tokens to compare.")
            case LoadBlocks():
                self.entries[op.entry] = op.length
            case DropBlocks():
                pass  # no entry: what is on disk is compared block by block
            case Free():
                row = self._pop(op.arena, op.slot)
                if self._by_seq.pop(row.seq, None) is None:
                    raise Desync(
                        f"step {self.step}: slot {op.slot} of arena {op.arena} holds a sequence never admitted."
                    )

    def _copy(self, op: Restore | Share, action: str) -> None:
        row = self._row(op.arena, op.slot, action)
        if row.kv_len != op.start:
            raise Desync(
                f"step {self.step}: {action} from token {op.start} on into slot {op.slot}, which has {row.kv_len}."
            )
        row.kv_len = op.length

    def _row(self, arena: int, slot: int, action: str) -> Row:
        row = self.rows.get((arena, slot))
        if row is None:
            raise Desync(f"step {self.step}: {action} on arena {arena} slot {slot}, which is empty here.")
        return row

    def _pop(self, arena: int, slot: int) -> Row:
        self._row(arena, slot, "move or free")
        return self.rows.pop((arena, slot))

    def _check_entry(self, entry: int, length: int) -> None:
        if self.entries.get(entry, -1) < length:
            raise Desync(f"step {self.step}: prefix entry {entry} has fewer than {length} tokens here.")

    def snapshot(self) -> dict[tuple[int, int], Row]:
        """A copy of the rows, for diagnostics."""
        return {place: replace(row) for place, row in self.rows.items()}
