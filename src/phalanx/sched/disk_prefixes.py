"""The leader's decisions about loading prefixes from the ranks' disks and writing them, and their outcomes.

A sequence whose longest prefix is on disk waits until every rank has loaded it, unless computing it would be faster;
both speeds are measured. A load reserves an entry of the prefix cache before it begins. `engine/disk.py` collects the
ranks' reports.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from msgspec import Struct

from phalanx.sched.disk_index import BLOCK_TOKENS, DiskIndex
from phalanx.sched.plan import CompareBlock, DiskBlock, DiskOutcome, DropBlocks, Evict, LoadBlocks, RowOp, WriteBlocks
from phalanx.sched.prefix import PrefixIndex
from phalanx.sched.sequence import Sequence

PATIENCE_S = 10.0  # for a load while the prefill speed is unknown
MIN_PATIENCE_S = 0.5
RETRY = 1.1  # raises the assumed speed of a slow disk at each skipped load, so that it is tried again


class _Load(Struct):
    """A load in progress on some ranks."""

    names: tuple[bytes, ...]
    length: int
    began: float
    deadline: float
    waiting: set[int]  # numbers of sequences
    missing: set[int]  # ranks that have not finished
    seconds: float = 0.0


class _Write(Struct):
    """A write in progress on some ranks."""

    blocks: tuple[DiskBlock, ...]
    missing: set[int]
    failed: bool = False


class _Check(NamedTuple):
    """The last block of a restored entry, which its row recomputes for comparison."""

    entry: int
    names: tuple[bytes, ...]
    start: int
    stop: int


class DiskPrefixes:
    """See the module's docstring.

    Args:
        entries: the prefix cache in memory.
        ops: of the step that is being planned.
    """

    def __init__(self, entries: PrefixIndex, ops: list[RowOp]) -> None:
        self.index = DiskIndex(b"", 0)
        self.error = ""
        """The first error of a disk; it turns the disk cache off."""
        self.queries = self.failures = 0  # tokens looked up; loads that failed
        self.mismatches: list[str] = []
        """Messages on restored prefixes that differ from recomputed ones; `engine/disk.py` logs them."""
        self._on = self._verify = False
        self._names: dict[int, tuple[bytes, ...]] = {}  # by entry that was loaded
        self._checks: dict[int, _Check] = {}  # by number of a sequence
        self._entries = entries
        self._ops = ops
        self._ranks = 0
        self._loads: dict[int, _Load] = {}  # by entry
        self._writes: dict[int, _Write] = {}
        self._speed = math.inf  # tokens loaded per second

    def open(self, index: DiskIndex, ranks: int, *, verify: bool = False) -> None:
        """Turn the disk cache on, with the index of the blocks that all ranks hold.

        Args:
            verify: recompute the last block of each restored prefix and compare.
        """
        self.index, self._ranks, self._verify, self._on = index, ranks, verify, True

    @property
    def held(self) -> Collection[int]:
        """Numbers of sequences that wait for a load."""
        return {number for load in self._loads.values() for number in load.waiting}

    def may_look_up(self, seq: Sequence) -> bool:
        """Whether to look up a sequence's prefix: the cache is on, and it was not looked up yet."""
        return self._on and not seq.looked_on_disk

    def waits(self, seq: Sequence, cached: int, prefill_speed: float, now: float) -> bool:
        """Whether a sequence must wait because its prefix is being loaded. May begin the load. Changes state.

        Args:
            cached: tokens of its longest prefix in memory.
            prefill_speed: tokens per second; infinite if unknown.
        """
        if seq.load is not None:
            load = self._loads.get(seq.load)
            if load is None:
                return False
            if now < load.deadline and seq.load in self._entries:
                return True
            self._abandon(seq.load, load, now)
            return False
        if not self.may_look_up(seq):
            return False
        seq.looked_on_disk = True
        self.queries += seq.prompt_len
        hit = self.index.find(seq.request.sharing, seq.tokens, len(seq.tokens) - 1)
        if hit is None or hit.length < cached + BLOCK_TOKENS:
            return False
        prefill_s = math.inf if math.isinf(prefill_speed) else (hit.length - cached) / prefill_speed
        if hit.length / self._speed > prefill_s:
            self._speed *= RETRY
            return False
        for entry in [entry for entry in self._loads if entry not in self._entries]:
            self._end(entry, evict=True)  # it had to make room when nobody waited any more, so ranks say no more of it
        for entry, load in self._loads.items():
            if load.names[: len(hit.names)] == hit.names:
                seq.load = entry
                load.waiting.add(seq.number)
                return True
        number, evicted = self._entries.reserve(seq.request.sharing, seq.tokens[: hit.length])
        self._ops.extend(Evict(old) for old in evicted)
        if number is None:
            return False
        patience_s = PATIENCE_S if math.isinf(prefill_s) else max(MIN_PATIENCE_S, prefill_s)
        ranks = set(range(self._ranks))
        self._loads[number] = _Load(hit.names, hit.length, now, now + patience_s, {seq.number}, ranks)
        self._ops.append(LoadBlocks(number, hit.length, hit.names))
        self.index.use(hit.names)
        seq.load = number
        return True

    def restored(self, seq: Sequence, length: int) -> int:
        """How many tokens of a loaded entry to restore: all, or with `verify` all but the last block. Changes state."""
        assert seq.load is not None
        if not self._verify or seq.load not in self._names:
            return length
        start = max(0, length - BLOCK_TOKENS)
        self._checks[seq.number] = _Check(seq.load, self._names[seq.load], start, length)
        return start

    def compare(self, seq: Sequence) -> None:
        """Plan the comparison of a row with its restored entry, once it has recomputed the block. Changes state."""
        check = self._checks.get(seq.number)
        if check is not None and seq.slot >= 0 and seq.kv_len >= check.stop:
            del self._checks[seq.number]
            if check.entry in self._entries:
                self._ops.append(CompareBlock(seq.arena, seq.slot, check.entry, check.start, check.stop))

    def leave(self, seq: Sequence) -> None:
        """Compare what an ending sequence has recomputed, and drop its check. Changes state."""
        self.compare(seq)
        self._checks.pop(seq.number, None)

    def write(self, seq: Sequence, entry: int, length: int) -> None:
        """Plan to write those blocks of a new entry that are not on disk. Changes state."""
        if not self._on:
            return
        new = self.index.write(seq.request.sharing, seq.request.owner, seq.tokens[:length])
        if new is not None:
            self.drop(new.dropped)
            self._writes[entry] = _Write(new.blocks, set(range(self._ranks)))
            self._ops.append(WriteBlocks(entry, new.first, new.blocks))

    def keep_owners(self, owners: Collection[str]) -> None:
        """Drop the blocks of all other owners. Changes state."""
        self.drop(self.index.forget_owners(owners))

    def reset(self) -> None:
        """Drop all blocks, also those being written. Changes state."""
        for write in self._writes.values():
            write.failed = True
        self.drop(self.index.clear())

    def drop(self, names: tuple[bytes, ...]) -> None:
        """Plan to drop blocks on the ranks that the index has dropped."""
        if names:
            self._ops.append(DropBlocks(names))

    def take(self, outcome: DiskOutcome) -> None:
        """Apply a rank's report. Changes state."""
        if outcome.error:
            self._on, self.error = False, self.error or f"rank {outcome.rank}: {outcome.error}"
        if outcome.difference:
            self._delete_mismatch(outcome)
        elif outcome.loads and (load := self._loads.get(outcome.entry)) is not None:
            self._loaded(outcome, load)
        elif not outcome.loads and (write := self._writes.get(outcome.entry)) is not None:
            write.missing.discard(outcome.rank)
            write.failed = write.failed or outcome.bad is not None
            if not write.missing:
                del self._writes[outcome.entry]
                self.drop(self.index.settle(write.blocks, written=not write.failed))

    def _loaded(self, outcome: DiskOutcome, load: _Load) -> None:
        if outcome.bad is not None:
            self.drop(self.index.forget(outcome.bad))
            self._end(outcome.entry, evict=True)
            return
        load.missing.discard(outcome.rank)
        load.seconds = max(load.seconds, outcome.seconds)
        if not load.missing:
            self._speed = load.length / max(load.seconds, 1e-6)
            self._names = {entry: names for entry, names in self._names.items() if entry in self._entries}
            self._names[outcome.entry] = load.names
            self._end(outcome.entry, evict=False)

    def _delete_mismatch(self, outcome: DiskOutcome) -> None:
        names = self._names.pop(outcome.entry, ())
        if names and outcome.entry in self._entries:
            self.mismatches.append(
                f"rank {outcome.rank}: a restored prefix of {len(names)} blocks, the last of them {names[-1].hex()}, "
                f"differs by {outcome.difference:.3g} times what rounding may; it is deleted"
            )
            self.drop(self.index.forget(names))
            self._entries.drop(outcome.entry)
            self._ops.append(Evict(outcome.entry))

    def _abandon(self, entry: int, load: _Load, now: float) -> None:
        """End a load that takes too long or whose entry was evicted."""
        if now >= load.deadline:
            self._speed = min(self._speed, load.length / max(now - load.began, 1e-6))
        self._end(entry, evict=True)

    def _end(self, entry: int, *, evict: bool) -> None:
        del self._loads[entry]
        self.failures += evict
        if entry in self._entries:
            self._entries.reveal(entry)
            if evict:
                self._entries.drop(entry)
                self._ops.append(Evict(entry))
