"""Executes a plan's disk operations on one rank: one thread writes prefix entries to disk, another loads them.

The threads copy bytes between files and the memory of snapshots, which is allocated before a load begins; they never
call MLX. `sched/disk_prefixes.py` decides which prefixes are worth it.
"""

from __future__ import annotations

import errno
import math
import os
import time
import weakref
from collections.abc import Callable, MutableMapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import assert_never

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from phalanx.errors import StoreError
from phalanx.kernels import install
from phalanx.model.cache.buffers import ArenaBuffers, Snapshot
from phalanx.model.cache.layer_layout import KvLayout, Layout, leaves
from phalanx.prefix_store.store import PrefixStore
from phalanx.sched.disk_index import BLOCK_TOKENS
from phalanx.sched.plan import CompareBlock, DiskBlock, DiskOp, DiskOutcome, DropBlocks, LoadBlocks, WriteBlocks

Bytes = npt.NDArray[np.uint8]
Shape = tuple[tuple[int, ...], mx.Dtype]


CLOSE_S = 2.0  # for pending writes of an ending rank: its supervisor kills it a second later


TOLERANCE = {mx.float32: 1e-3, mx.float16: 0.05, mx.bfloat16: 0.05}
"""Allowed difference, relative to the largest number of a layer's block: other chunk sizes round differently."""


class BlockLayout:
    """The layout of a snapshot in blocks: keys and values per token; in an ending also the recurrent state."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._leaves: list[list[tuple[bool, Shape]]] = []  # by leaf and buffer: whether per token, and shape
        for leaf in leaves(layouts):
            if isinstance(leaf, KvLayout):
                heads = [h for h in (leaf.keys, leaf.values) if h is not None and h.heads * h.dim]
                self._leaves.append([(True, ((h.heads, h.dim), h.dtype)) for h in heads])
            else:
                states = [entry for entry in leaf.entries if entry is not None]
                self._leaves.append([(False, ((1, 1, math.prod(shape)), dtype)) for shape, dtype in states])

    @property
    def by_token(self) -> list[list[bool]]:
        """By leaf and buffer: whether it has values per token."""
        return [[by_token for by_token, _ in leaf] for leaf in self._leaves]

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a block, and of the largest ending."""
        return BLOCK_TOKENS * self._bytes(by_token=True), self.nbytes(BLOCK_TOKENS)

    def nbytes(self, length: int) -> int:
        """Bytes of a snapshot of so many tokens."""
        return length * self._bytes(by_token=True) + self._bytes(by_token=False)

    def _bytes(self, *, by_token: bool) -> int:
        shapes = [shape for leaf in self._leaves for tokens, shape in leaf if tokens is by_token]
        return sum(math.prod(shape) * dtype.size for shape, dtype in shapes)

    def allocate(self, length: int) -> Snapshot:
        """A snapshot of `length` tokens for a load to fill."""
        parts = [
            [
                install.buffer((1, shape[0], length, shape[1]) if by_token else (1, *shape), dtype)
                for by_token, (shape, dtype) in leaf
            ]
            for leaf in self._leaves
        ]
        return Snapshot(length, parts)

    def views(self, snapshot: Snapshot) -> list[tuple[bool, Bytes]]:
        """The memory of a snapshot: [1, heads, tokens, bytes] per buffer with values per token, else flat."""
        arrays = [
            (
                by_token,
                mx.contiguous(array).view(mx.uint8) if by_token else mx.contiguous(array).flatten().view(mx.uint8),
            )
            for leaf, part in zip(self._leaves, snapshot.parts, strict=True)
            for (by_token, _), array in zip(leaf, part, strict=True)
        ]
        mx.eval([array for _, array in arrays])
        return [(by_token, _memory(array)) for by_token, array in arrays]


class DiskBlocks:
    """Executes disk operations on one rank's store. Call `apply` from the engine's thread.

    Args:
        max_pending: bytes of entries waiting to be written; beyond it, an entry is not written.
        report: called by the threads.
    """

    def __init__(
        self,
        store: PrefixStore,
        layout: BlockLayout,
        rank: int,
        max_pending: int,
        report: Callable[[DiskOutcome], None],
    ) -> None:
        self._store = store
        self._layout = layout
        self._rank = rank
        self._max_pending = max_pending
        self._report = report
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix_writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefix_reader")
        self._close_at = math.inf
        self._busy: list[tuple[Future[None], Snapshot]] = []  # snapshots that a thread may use
        self._uncopied: list[tuple[WriteBlocks, Snapshot]] = []  # to write once all their layers are copied

    def apply(self, op: DiskOp, entries: MutableMapping[int, Snapshot], arena: Callable[[int], ArenaBuffers]) -> None:
        """Begin an operation; `begin_writes` begins writes. A thread reports its outcome."""
        self._busy = [(future, snapshot) for future, snapshot in self._busy if not future.done()]
        match op:
            case WriteBlocks():
                self._write(op, entries[op.entry])
            case LoadBlocks():
                snapshot = entries[op.entry] = self._layout.allocate(op.length)
                views = self._layout.views(snapshot)
                wanted = weakref.ref(snapshot)
                self._keep(self._reader.submit(self._load_all, op, views, wanted), Snapshot(op.length, snapshot.parts))
            case CompareBlock():
                self._compare(op, entries[op.entry], arena(op.arena).save(op.slot, op.stop))
            case DropBlocks():
                self.begin_writes(dropped=frozenset(op.names))
                self._writer.submit(self._drop, op)
            case _:
                assert_never(op)

    def begin_writes(self, *, at_once: bool = False, dropped: Set[bytes] = frozenset()) -> None:
        """Begin to write the snapshots that are copied. Out of time, `close` writes none.

        Args:
            at_once: copy the others now, because no row waits for it.
            dropped: blocks that are dropped next; a write of one must come before, so its snapshot is copied now.
        """
        waiting, self._uncopied = self._uncopied, []
        for op, snapshot in waiting:
            if time.monotonic() > self._close_at:
                return
            if at_once or snapshot.is_copied or any(block.name in dropped for block in op.blocks):
                self._keep(self._writer.submit(self._write_all, op, self._layout.views(snapshot)), snapshot)
            else:
                self._uncopied.append((op, snapshot))

    def _write(self, op: WriteBlocks, snapshot: Snapshot) -> None:
        pending = [*(each for _, each in self._busy), *(each for _, each in self._uncopied)]
        if pending and sum(self._layout.nbytes(each.length) for each in [*pending, snapshot]) > self._max_pending:
            self._report(DiskOutcome(self._rank, op.entry, False, 0.0, ()))
            return
        self._uncopied.append((op, snapshot))

    def _keep(self, future: Future[None], snapshot: Snapshot) -> None:
        self._busy.append((future, snapshot))

    def _compare(self, op: CompareBlock, restored: Snapshot, computed: Snapshot) -> None:
        """Report a restored block that differs from its recomputation by more than the tolerance."""
        worst = 0.0
        for leaf, part, other in zip(self._layout.by_token, restored.parts, computed.parts, strict=True):
            for by_token, a, b in zip(leaf, part, other, strict=True):
                if by_token and a.dtype in TOLERANCE:
                    a, b = (x[:, :, op.start : op.stop].astype(mx.float32) for x in (a, b))
                    difference = mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1e-6)
                    value = float(difference) / TOLERANCE[part[0].dtype]
                    worst = max(worst, value if math.isfinite(value) else math.inf)
        if worst > 1.0:
            self._report(DiskOutcome(self._rank, op.entry, False, 0.0, None, "", worst))

    def close(self) -> None:
        """Finish pending writes within `CLOSE_S` and end the threads; reports nothing."""
        self._close_at = time.monotonic() + CLOSE_S
        self.begin_writes(at_once=True)
        for thread in (self._reader, self._writer):
            thread.shutdown()
        self._store.close()

    # -- on the threads ----------------------------------------------------------------------------------------------

    def _write_all(self, op: WriteBlocks, views: list[tuple[bool, Bytes]]) -> None:
        started = time.perf_counter()
        bad: tuple[bytes, ...] | None = None
        error = ""
        first = op.first * BLOCK_TOKENS
        try:
            self._store.write(
                [
                    (block, partial(self._packed, views, first + i * BLOCK_TOKENS, block))
                    for i, block in enumerate(op.blocks)
                ]
            )
        except OSError as failure:
            bad, error = (), failure.strerror or str(failure)
        self._report_outcome(DiskOutcome(self._rank, op.entry, False, time.perf_counter() - started, bad, error))

    def _packed(self, views: list[tuple[bool, Bytes]], first: int, block: DiskBlock) -> Bytes:
        """As `_packed` below, until `close` runs out of time.

        Raises:
            OSError: no time is left.
        """
        if time.monotonic() > self._close_at:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        return _packed(views, first, block)

    def _load_all(self, op: LoadBlocks, views: list[tuple[bool, Bytes]], wanted: Callable[[], Snapshot | None]) -> None:
        started = time.perf_counter()
        into: Bytes = np.empty(max(self._layout.sizes), np.uint8)
        bad: tuple[bytes, ...] | None = None
        error, name = "", b""
        try:
            for i, name in enumerate(op.names):
                if wanted() is None or self._close_at < math.inf:
                    return
                first = i * BLOCK_TOKENS
                _unpack(self._store.read(name, into), views, first, min(first + BLOCK_TOKENS, op.length))
        except StoreError:
            bad = (name,)
        except OSError as failure:
            bad, error = (), failure.strerror or str(failure)
        self._report_outcome(DiskOutcome(self._rank, op.entry, True, time.perf_counter() - started, bad, error))
        if bad is None:
            self._writer.submit(self._store.use, op.names)

    def _drop(self, op: DropBlocks) -> None:
        try:
            self._store.drop(op.names)
        except OSError as failure:
            self._report_outcome(DiskOutcome(self._rank, -1, False, 0.0, (), failure.strerror or str(failure)))

    def _report_outcome(self, outcome: DiskOutcome) -> None:
        if self._close_at == math.inf:
            self._report(outcome)


def _memory(array: mx.array) -> Bytes:
    """The memory of an evaluated array, to be read and written."""
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # it has the buffer protocol


def _packed(views: list[tuple[bool, Bytes]], first: int, block: DiskBlock) -> Bytes:
    """The bytes of a block: its tokens' part of each buffer; for an ending also the states."""
    stop = first + len(block.tokens) // 4
    parts = [view[:, :, first:stop] if by_token else view for by_token, view in views if by_token or block.ending]
    out: Bytes = np.empty(sum(part.size for part in parts), np.uint8)
    place = 0
    for part in parts:
        out[place : place + part.size].reshape(part.shape)[...] = part
        place += part.size
    return out


def _unpack(data: Bytes, views: list[tuple[bool, Bytes]], first: int, stop: int) -> None:
    """The inverse of `_packed`. Data longer than its tokens' part also holds states."""
    parts = [view[:, :, first:stop] for by_token, view in views if by_token]
    ending = len(data) > sum(part.size for part in parts)
    place = 0
    for by_token, view in views:
        if not by_token and not ending:
            continue
        part = view[:, :, first:stop] if by_token else view
        if place + part.size > len(data):
            raise StoreError("a block is too short")
        part[...] = data[place : place + part.size].reshape(part.shape)
        place += part.size
