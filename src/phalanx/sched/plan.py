"""The plan: plain data, the only contract between the leader and the ranks that execute it.

A `Step` holds everything a rank does in one step: the commits since the last one, the operations on the KV buffers, and
the rectangular forwards to run. Ranks decide nothing (design: Lock step). Does not know models or
arrays.

Rows live in *arenas*. An arena is one set of KV buffers `[rows, heads, capacity, head_dim]` per layer; all its rows
share one capacity. If rows take memory by the page, there is one arena, as long as the context. Otherwise each
arena may have longer rows than the one before, so that one long prompt does not inflate every row.
A *slot* is a row's index inside its arena; decoding rows are slots `[0, D)`, prefilling rows `[D, D + P)`.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.types import FinishReason


class Commit(Struct, frozen=True, array_like=True):
    """The outcome of one step for one row, decided once (`sched/commit.py`) and applied by every rank.

    The step's forwards extended the row's KV to `computed` positions; `kv_len` of them are valid, the rest were
    rejected drafts. A rank whose row is not at `computed` has skipped or repeated a forward.
    """

    seq: int  # the scheduler's number for the sequence
    tokens: tuple[int, ...]  # committed output tokens, in order; empty for a prefill chunk
    computed: int
    kv_len: int
    finish: FinishReason | None = None
    stop_id: int | None = None  # the stop token that ended it


# Buffer operations, executed in the order listed, before the forwards -------------------------------------------


class Resize(Struct, frozen=True, tag="resize"):
    """Reallocate an arena's buffers; rows below `min(old, new)` keep their content. rows = 0 frees it."""

    arena: int
    rows: int
    capacity: int  # tokens per row


class Admit(Struct, frozen=True, tag="admit"):
    """A sequence takes a slot, which is zeroed first. `seq` starts with kv_len 0."""

    arena: int
    slot: int
    seq: int


class Restore(Struct, frozen=True, tag="restore"):
    """Copy tokens `[start, length)` of a prefix entry into a slot of kv_len `start`; it becomes `length`."""

    arena: int
    slot: int
    entry: int
    length: int
    start: int = 0


class Share(Struct, frozen=True, tag="share"):
    """Copy tokens `[start, length)` of another live row into a slot of kv_len `start`; it becomes `length`."""

    src_arena: int
    src: int
    arena: int
    slot: int
    length: int
    start: int = 0


class Move(Struct, frozen=True, tag="move"):
    """Row `src` becomes row `dst` (which is free); `src` is free afterwards."""

    src_arena: int
    src: int
    arena: int
    dst: int


class Swap(Struct, frozen=True, tag="swap"):
    """Exchange two rows of one arena."""

    arena: int
    a: int
    b: int


class Store(Struct, frozen=True, tag="store"):
    """Keep the first `length` tokens of a slot as prefix entry `entry` (an owned, evaluated copy)."""

    arena: int
    slot: int
    entry: int
    length: int


class Evict(Struct, frozen=True, tag="evict"):
    """Drop a prefix entry."""

    entry: int


class Free(Struct, frozen=True, tag="free"):
    """The sequence in this slot has ended or was preempted."""

    arena: int
    slot: int


class DiskBlock(Struct, frozen=True, array_like=True):
    """Consecutive tokens of a prefix, whose KV is one record on every rank's disk (`sched/disk_index.py`)."""

    name: bytes  # identifies the prefix that ends with this block
    parent: bytes  # name of the prefix before it
    tokens: bytes  # uint32
    owner: bytes  # tag of the sequence's owner (`DiskIndex.owner_tag`)
    ending: bool = False  # the last block of a prefix: may be shorter, and holds recurrent state


class WriteBlocks(Struct, frozen=True, tag="write_blocks"):
    """Copy blocks of a prefix entry to disk, concurrently with steps; `first` is the index of the first block."""

    entry: int
    first: int
    blocks: tuple[DiskBlock, ...]


class LoadBlocks(Struct, frozen=True, tag="load_blocks"):
    """Load a prefix entry of `length` tokens from blocks on disk, concurrently with steps; usable once all ranks have
    it."""

    entry: int
    length: int
    names: tuple[bytes, ...]


class CompareBlock(Struct, frozen=True, tag="compare_block"):
    """Compare tokens `[start, stop)` of a row, which it computed, with those of the entry that was restored into it."""

    arena: int
    slot: int
    entry: int
    start: int
    stop: int


class DropBlocks(Struct, frozen=True, tag="drop_blocks"):
    """Forget blocks on disk."""

    names: tuple[bytes, ...]


class DiskOutcome(Struct, frozen=True, array_like=True):
    """The outcome of a disk operation for an entry on one rank, reported between two plans."""

    rank: int
    entry: int
    loads: bool
    seconds: float
    bad: tuple[bytes, ...] | None = None  # None: success; else blocks that are missing or damaged
    error: str = ""  # of the disk, which is then used no more
    difference: float = 0.0  # found by `CompareBlock`, as a multiple of its tolerance; 0: within it


DiskOp = WriteBlocks | LoadBlocks | CompareBlock | DropBlocks
RowOp = Resize | Admit | Restore | Share | Move | Swap | Store | Evict | Free | DiskOp


class Forward(Struct, frozen=True):
    """One rectangular model call over the contiguous slots `[start, start + len(tokens))` of an arena.

    Row i feeds `tokens[i][:valid[i]]` at positions `kv_len[i] ...`; the rest of `tokens[i]` is padding (0). `sample`
    forwards feed the last known token y and the drafts d1..dk to be verified, and return logits; the others (prefill
    chunks) only fill the cache.
    """

    arena: int
    start: int
    seqs: tuple[int, ...]  # [rows]
    tokens: tuple[tuple[int, ...], ...]  # [rows, L]
    valid: tuple[int, ...]  # [rows], 1 <= valid[i] <= L
    sample: bool
    score: bool = False  # returns logits of all positions although nothing is sampled
    packed: bool = False  # padding is not computed; logits are [sum of valid, 1, V]


class Step(Struct, frozen=True, tag="step"):
    """One step. `digest` is the leader's row state after `commits` and `ops`, before the forwards. It includes the
    positions that steps in flight compute."""

    id: int
    commits: tuple[Commit, ...]
    ops: tuple[RowOp, ...]
    forwards: tuple[Forward, ...]
    digest: int

    @property
    def width(self) -> int:
        """Tokens per row of the widest sampling forward: 1 without drafts."""
        return max((len(forward.tokens[0]) for forward in self.forwards if forward.sample), default=1)

    @property
    def is_chunk(self) -> bool:
        """Whether the step only prefills, so that its outcome is known when it is planned."""
        return not any(forward.sample or forward.score for forward in self.forwards)

    @property
    def has_older_rows(self) -> bool:
        """Whether rows decode that finished their prompts before this step, so that its chunks delay their tokens."""
        sampled = {number for forward in self.forwards if forward.sample for number in forward.seqs}
        return not sampled <= {number for forward in self.forwards if not forward.sample for number in forward.seqs}


class Reset(Struct, frozen=True, tag="reset"):
    """Free MLX's cached buffers (after the scheduler evicted every prefix entry in a `Step`)."""


class RankReport(Struct, frozen=True, tag="report"):
    """Every rank answers with its `RankStats` after the earlier plans: proof that its engine loop runs."""


Plan = Step | Reset | RankReport


class Order(Struct, frozen=True, array_like=True):
    """The leader's message to a rank: a plan, and the seconds after which the group counts as stuck."""

    plan: Plan
    limit_s: float = 0.0
