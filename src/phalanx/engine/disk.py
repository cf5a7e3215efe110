"""Opens a rank's part of the prefix cache on disk; ranks keep only the blocks that all of them have.

On the leader also a queue of the ranks' reports: threads put them in, and the leader takes them between two steps.
"""

from __future__ import annotations

import hashlib
import logging
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.config import GIB, PREFIX_CACHE_DISK_GB, EngineConfig
from phalanx.engine.link import LeaderLink, SingleRank, WorkerLink
from phalanx.errors import ConfigError
from phalanx.model.disk_blocks import BlockLayout, DiskBlocks
from phalanx.model.runner import Runner
from phalanx.prefix_store.store import PrefixStore
from phalanx.sched.disk_index import BLOCK_TOKENS, DiskIndex
from phalanx.sched.disk_prefixes import DiskPrefixes
from phalanx.sched.plan import DiskBlock, DiskOutcome

log = logging.getLogger("phalanx.engine")

INDEX_BYTES = 4096  # per block in the index, counted twice: an index is rewritten beside the old one
PENDING = 8  # the fraction 1/8 of the prefix memory may wait to be written


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks on a rank's disk, and their sizes."""

    names: bytes  # of 16 bytes each
    sizes: tuple[int, int]  # bytes of a block, and of the largest ending
    recurrent: bool


class OpenedStore(NamedTuple):
    """A rank's store, and the blocks that all ranks have."""

    store: PrefixStore
    blocks: list[DiskBlock]
    max_blocks: int
    max_endings: int


def open_store(
    config: EngineConfig, link: LeaderLink | WorkerLink | SingleRank, runner: Runner, identity: str
) -> OpenedStore | None:
    """Open this rank's store and drop blocks that another rank lacks; None if no directory is configured. Collective:
    every rank of the group calls it.

    Args:
        identity: hash of everything that determines the logits.

    Raises:
        ConfigError: the directory cannot be used, or is too small.
    """
    if config.prefix_cache_dir is None:
        return None
    if config.prefix_cache_gb == 0:
        raise ConfigError(
            "--prefix-cache-dir needs memory to read into, and --prefix-cache-gb is 0.",
            remedy="Raise one or drop both.",
        )
    layout = BlockLayout(runner.facts.layouts)
    facts = (identity, link.rank, repr(runner.facts.layouts))
    folder = Path(config.prefix_cache_dir).expanduser() / f"rank-{link.rank}"
    store = PrefixStore(
        folder,
        hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest(),
        layout.sizes,
    )
    if store.was_of_another and link.rank == 0:
        log.info("prefixes on disk were of another model, plan, version or machine: %s starts empty", folder.parent)
    own = _Held(
        names=b"".join(block.name for block in store.blocks), sizes=layout.sizes, recurrent=runner.facts.recurrent
    )
    everyone = link.share(own)
    common = set.intersection(*(_names(held.names) for held in everyone))
    try:
        store.drop([block.name for block in store.blocks if block.name not in common])
    except OSError as error:
        raise ConfigError(
            f"--prefix-cache-dir: {folder} on {link.host} cannot be written: {error.strerror}.",
            remedy="Make room there, or name another directory.",
        ) from error
    disk_gb = PREFIX_CACHE_DISK_GB if config.prefix_cache_disk_gb is None else config.prefix_cache_disk_gb
    return OpenedStore(store, store.blocks, *_limits(disk_gb, everyone))


def serve_blocks(
    opened: OpenedStore, runner: Runner, rank: int, prefix_budget: int, report: Callable[[DiskOutcome], None]
) -> None:
    """Let a rank's runner execute the disk operations of plans."""
    layout = BlockLayout(runner.facts.layouts)
    runner.disk = DiskBlocks(opened.store, layout, rank, prefix_budget // PENDING, report)


class DiskOutcomes:
    """The leader's queue of disk reports: threads put, the leader takes between two steps.

    Args:
        wake: interrupts the leader's wait for messages.
    """

    def __init__(self, prefixes: DiskPrefixes, wake: Callable[[], None]) -> None:
        self._prefixes = prefixes
        self._wake = wake
        self.mismatches = 0
        self._queue: queue.SimpleQueue[DiskOutcome] = queue.SimpleQueue()

    def put(self, outcome: DiskOutcome) -> None:
        """Queue a rank's report. Any thread may call this."""
        self._queue.put(outcome)
        self._wake()

    def take(self) -> None:
        """Apply all queued reports; log the first error of a disk."""
        while not self._queue.empty():
            before = self._prefixes.error
            self._prefixes.take(self._queue.get())
            while self._prefixes.mismatches:
                log.error("--verify-restores: %s", self._prefixes.mismatches.pop())
                self.mismatches += 1
            if self._prefixes.error != before:
                log.warning("the prefix cache on disk is off until the next start: %s", self._prefixes.error)


def open_index(opened: OpenedStore, prefixes: DiskPrefixes, ranks: int, *, whole_only: bool, verify: bool) -> None:
    """Give the leader its index of the blocks that all ranks have."""
    index = DiskIndex(opened.store.secret, opened.max_blocks, opened.max_endings, whole_only=whole_only)
    index.add(opened.blocks)
    prefixes.open(index, ranks, verify=verify and not whole_only)
    prefixes.drop(index.trim())
    log.info("prefixes on disk: %d blocks of %d tokens, room for %d", len(index), BLOCK_TOKENS, opened.max_blocks)


def _limits(disk_gb: float, everyone: Sequence[_Held]) -> tuple[int, int]:
    """Blocks and endings that fit on every disk; endings exist only with recurrent state."""
    recurrent = any(held.recurrent for held in everyone)
    share = int(disk_gb * GIB) // (2 if recurrent else 1)
    blocks, endings = (max(held.sizes[i] for held in everyone) + INDEX_BYTES for i in range(2))
    if share < (endings if recurrent else blocks):
        raise ConfigError(
            f"--prefix-cache-disk-gb {disk_gb:g} holds no {BLOCK_TOKENS} tokens of a prefix.", remedy="Raise it."
        )
    return share // blocks, share // endings if recurrent else 0


def _names(joined: bytes) -> set[bytes]:
    return {joined[i : i + 16] for i in range(0, len(joined), 16)}
