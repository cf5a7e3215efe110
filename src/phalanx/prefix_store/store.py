"""One rank's prefix blocks on disk: a log as index, and two files of fixed-size slots, for blocks and for endings.

Slots of dropped blocks are reused, so a file never exceeds its number of slots, and compaction is never needed. A block
is written and synced before the index names it, and the index drops it before its slot is reused: a process killed at
any byte leaves only whole or unnamed blocks. A checksum per block detects other damage. Where a file was deleted, the
next write fails and gives its space back. One thread writes; another may read meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import os
import secrets
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.errors import ConfigError, StoreError
from phalanx.prefix_store.index_log import FORMAT, Drop, Put, Record, StoreHeader, Use, encode, records
from phalanx.private_files import why_not_private
from phalanx.sched.plan import DiskBlock

LOCK_PATIENCE_S = 5.0  # for the end of a killed rank
SLACK = 1 << 20  # bytes: a smaller log is not worth rewriting
Bytes = npt.NDArray[np.uint8]
if sys.platform == "linux":
    sync = os.fdatasync
else:
    sync = os.fsync


class PrefixStore:
    """The blocks of one rank, by name. Opening takes the folder's lock for the life of the process.

    Args:
        folder: of this rank alone; created if missing.
        identity: hash of everything that determines the KV in the blocks. Blocks of another identity are deleted.
        sizes: bytes per slot, of blocks and of endings.

    Raises:
        ConfigError: another process uses the folder, others may enter it, or it cannot be written.
    """

    def __init__(self, folder: Path, identity: str, sizes: tuple[int, int]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._puts: OrderedDict[bytes, Put] = OrderedDict()  # least recently used first
        self._free: tuple[list[int], list[int]] = ([], [])
        self._ends = [0, 0]  # slots ever used
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := why_not_private(folder):
                raise ConfigError(f"--prefix-cache-dir: {folder} cannot be used: {why}.", remedy=f"chmod 700 {folder}")
            self._lock = _locked(folder / "lock")
            self._files = tuple(_opened(folder / name) for name in ("blocks", "endings"))
            self._log_bytes = self._read_log(identity)
            self._log = os.open(folder / "index", os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise ConfigError(
                f"--prefix-cache-dir: {error.filename or folder} cannot be used: {error.strerror}.",
                remedy="Name a directory that can be made and written on every rank's machine.",
            ) from error

    @property
    def blocks(self) -> list[DiskBlock]:
        """All blocks, least recently used first."""
        return [put.block for put in self._puts.values()]

    def write(self, blocks: Sequence[tuple[DiskBlock, Callable[[], Bytes]]]) -> int:
        """Write blocks, sync them, then add them to the index. Returns their bytes.

        Args:
            blocks: each with a function that returns its bytes.

        Raises:
            OSError: the disk failed; the store is of no further use.
        """
        puts: list[Put] = []
        try:
            for block, fill in blocks:
                data = fill().data
                slot = self._take_slot(block.ending)
                puts.append(Put(block, slot, len(data), _crc(block.name, data)))
                _write_at(self._files[block.ending], data, slot * self._sizes[block.ending])
            for ending in {put.block.ending for put in puts}:
                sync(self._files[ending])
            self._append(*puts)
            sync(self._log)
        except OSError:
            for put in puts:
                self._give_back(put)
            raise
        for put in puts:
            if (old := self._puts.pop(put.block.name, None)) is not None:
                self._give_back(old)
            self._puts[put.block.name] = put
        self._rewrite_if_long()
        return sum(put.size for put in puts)

    def read(self, name: bytes, into: Bytes) -> Bytes:
        """Read a block. Returns the part of `into` that it fills.

        Raises:
            StoreError: it is missing or damaged.
            OSError: it cannot be read.
        """
        put = self._puts.get(name)
        if put is None or put.size > len(into):
            raise StoreError("a block is not there")
        data, place = into[: put.size], put.slot * self._sizes[put.block.ending]
        got = 0
        while got < put.size:
            n = os.preadv(self._files[put.block.ending], [data[got:].data], place + got)
            if n == 0:
                raise StoreError("a block is cut short")
            got += n
        if _crc(name, data.data) != put.crc:
            raise StoreError("a block is damaged")
        return data

    def use(self, names: Sequence[bytes]) -> None:
        """Record that blocks were used, so that they are kept longer. Ignores errors of the disk."""
        with contextlib.suppress(OSError):
            self._append(Use(tuple(names)))
        for name in names:
            if name in self._puts:
                self._puts.move_to_end(name)

    def drop(self, names: Sequence[bytes]) -> None:
        """Drop blocks; the index is synced before their slots can be reused.

        Raises:
            OSError: the index cannot be written; the slots stay in use.
        """
        dropped = [put for name in names if (put := self._puts.pop(name, None)) is not None]
        if dropped:
            self._append(Drop(tuple(put.block.name for put in dropped)))
            sync(self._log)
            for put in dropped:
                self._give_back(put)

    def close(self) -> None:
        """Close the files and release the folder's lock."""
        for file in (*self._files, self._log, self._lock):
            os.close(file)

    # -- slots and the log -------------------------------------------------------------------------------------------

    def _take_slot(self, ending: bool) -> int:
        if self._free[ending]:
            return heapq.heappop(self._free[ending])
        self._ends[ending] += 1
        return self._ends[ending] - 1

    def _give_back(self, put: Put) -> None:
        heapq.heappush(self._free[put.block.ending], put.slot)

    def _append(self, *new: Record) -> None:
        self._check_files()
        data = b"".join(encode(record) for record in new)
        try:
            _write_at(self._log, memoryview(data), None)
        except OSError:
            os.ftruncate(self._log, self._log_bytes)  # behind half a record nothing would be read
            raise
        self._log_bytes += len(data)

    def _check_files(self) -> None:
        """Raise an error if a file was deleted, which would be written in vain and keep its space until the end."""
        if all(os.fstat(file).st_nlink for file in (*self._files, self._log)):
            return
        for file in self._files:
            os.ftruncate(file, 0)
        raise FileNotFoundError(errno.ENOENT, f"{self._folder} was deleted")

    def _read_log(self, identity: str) -> int:
        """Read the index, or begin a new one. Returns its length."""
        path = self._folder / "index"
        log = path.read_bytes() if path.exists() else b""
        header, whole, begun = None, 0, False
        for record, whole in records(log):  # noqa: B007 (the end of the last record)
            match record:
                case StoreHeader():
                    header = record
                case Put():
                    self._puts[record.block.name] = record
                    self._puts.move_to_end(record.block.name)
                case Drop():
                    for name in record.names:
                        self._puts.pop(name, None)
                case Use():
                    for name in record.names:
                        if name in self._puts:
                            self._puts.move_to_end(name)
        self.was_of_another = header is not None and (header.format, header.identity) != (FORMAT, identity)
        """The blocks were of another identity or format, and are deleted."""
        if header is None or self.was_of_another:
            self._puts.clear()
            for file in self._files:
                os.ftruncate(file, 0)
            header, begun = StoreHeader(FORMAT, identity, secrets.token_bytes(32)), True
        self.secret = header.secret
        """Of this installation: keyed with it, names reveal neither tokens nor keys."""
        self._header = header
        self._note_slots()
        live = self._live()
        if begun or whole != len(log) or len(log) > 2 * len(live) + SLACK:
            return self._rewrite(live)
        self._live_bytes = len(live)
        return len(log)

    def _note_slots(self) -> None:
        for ending in (False, True):
            taken = {put.slot for put in self._puts.values() if put.block.ending is ending}
            self._ends[ending] = max(taken, default=-1) + 1
            self._free[ending].extend(set(range(self._ends[ending])) - taken)
            heapq.heapify(self._free[ending])
            os.ftruncate(self._files[ending], self._ends[ending] * self._sizes[ending])

    def _rewrite_if_long(self) -> None:
        if self._log_bytes > 2 * self._live_bytes + SLACK:
            before = self._log
            self._log_bytes = self._rewrite(self._live())
            self._log = os.open(self._folder / "index", os.O_WRONLY | os.O_APPEND)
            os.close(before)

    def _live(self) -> bytes:
        """An index of the live blocks only."""
        everything: list[Record] = [self._header, *self._puts.values()]
        return b"".join(map(encode, everything))

    def _rewrite(self, data: bytes) -> int:
        """Replace the index. Returns its length."""
        new = self._folder / "index.new"
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        new.replace(self._folder / "index")
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._live_bytes = len(data)
        return len(data)


def _crc(name: bytes, data: memoryview) -> int:
    """Covers the name too, so that a swapped block counts as damaged. Computed without the interpreter's lock."""
    return zlib.crc32(data, zlib.crc32(name))


def _write_at(file: int, data: memoryview, place: int | None) -> None:
    """Write all of `data`, at the end if `place` is None."""
    done = 0
    while done < len(data):
        rest = data[done:]
        done += os.write(file, rest) if place is None else os.pwrite(file, rest, place + done)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _locked(path: Path) -> int:
    """Lock the folder. Returns the descriptor that holds the lock.

    Raises:
        ConfigError: another process holds it.
    """
    descriptor = _opened(path)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"--prefix-cache-dir: another server uses {path.parent}.",
                    remedy="Give each server a directory of its own.",
                ) from None
            time.sleep(0.1)
        else:
            return descriptor
