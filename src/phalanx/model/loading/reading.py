"""Copies parts of tensors out of files, straight into the caller's buffers (design: Loading).

What the kernel has in its cache is copied from there. What it has not is read past the cache, in large requests and
several at once: that keeps a fast disk busy at a fraction of the CPU time, and pushes nothing else out of memory. A
slow disk is read through the cache, since that costs it nothing and the next start finds the file there. Does not know
models or who owns what.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.errors import WeightsError
from phalanx.model.loading.weights import AGAIN, Cut, TensorInfo

Bytes = npt.NDArray[np.uint8]

CHUNK = 1 << 20  # bytes of a file that are read in one call; a thread's scratch of them stays in the processor's cache
THREADS = 4  # the disk has several requests at once, page faults several cores
NARROW = 64 << 10  # pieces from this size on are read by themselves, smaller ones with what is between them
BLOCK = 4096  # bytes; reads past the cache start and end at multiples of the disk's own, which is 512 or this
SLOW = 500e6  # bytes a second from a disk below which reading past the cache is given up
JUDGED = 64 << 20  # bytes after which it is


class Reader:
    """Keeps the files open while it is entered. Counts what it copies.

    Args:
        shared: other ranks of this machine read the same files now. What all of them need, be it for a part of every
            page, is then read through the cache, so that the disk reads it once.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.copied = 0
        self._shared = shared
        self._pool = ThreadPoolExecutor(THREADS, "read")
        self._disk = _Disk()
        self._files: dict[Path, _File] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def begin(self, info: TensorInfo, cut: Cut | None, out: Bytes) -> Copying:
        """Begin to copy a tensor, or the rows of `cut`, into the bytes `out`.

        Raises:
            WeightsError: the file cannot be opened.
        """
        if (file := self._files.get(info.file)) is None:
            try:
                file = self._files[info.file] = _File(info.file, self._disk)
            except OSError as error:
                raise _unreadable(info, error) from error
        done, jobs = 0, []
        for piece in _pieces(info, cut):
            common = self._shared and (cut is None or piece.count > 1)
            jobs.append(self._pool.submit(piece.copy, file, out[done : done + piece.size * piece.count], common))
            done += piece.size * piece.count
        self.copied += done
        return Copying(info, jobs)


@dataclass(frozen=True, slots=True)
class Copying:
    """A tensor on its way."""

    info: TensorInfo
    jobs: list[Future[None]]

    def wait(self) -> None:
        """Until it is there.

        Raises:
            WeightsError: the file ended early, or cannot be read.
        """
        try:
            for job in self.jobs:
                job.result()
        except (OSError, ValueError) as error:
            raise _unreadable(self.info, error) from error


def _unreadable(info: TensorInfo, error: Exception) -> WeightsError:
    return WeightsError(f"{info.file} cannot be read: {error}", remedy=AGAIN)


# -- which bytes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """`count` stretches of `size` bytes, the first at `start`, `stride` apart."""

    start: int
    size: int
    count: int
    stride: int

    def copy(self, file: _File, out: Bytes, common: bool) -> None:
        """Copy from a file to `out`, which has just the size. `common`: others read the same pages now."""
        if self.count == 1:
            file.read(self.start, out, common=common)
            return
        around = file.view(self.start, (self.count - 1) * self.stride + self.size, common=common)
        rows = np.lib.stride_tricks.as_strided(around, (self.count, self.size), (self.stride, 1), writeable=False)
        out.reshape(self.count, self.size)[:] = rows


def _pieces(info: TensorInfo, cut: Cut | None) -> Iterator[_Piece]:
    """What to copy, in the order of the result, in chunks."""
    if cut is None or not info.nbytes:
        yield from _chunks(info.start, info.nbytes)
        return
    outer = math.prod(info.shape[: cut.axis])
    block = info.nbytes // outer  # bytes of one index of the axes before
    row = block // info.shape[cut.axis]
    spans = [(start * row, (stop - start) * row) for start, stop in cut.runs]
    if len(spans) == 1 and spans[0][1] < NARROW and outer > 1:
        [(offset, size)] = spans
        most = max(1, CHUNK // block)
        for first in range(0, outer, most):
            yield _Piece(info.start + first * block + offset, size, min(most, outer - first), block)
        return
    for index in range(outer):
        for offset, size in spans:
            yield from _chunks(info.start + index * block + offset, size)


def _chunks(start: int, size: int) -> Iterator[_Piece]:
    for done in range(0, size, CHUNK):
        yield _Piece(start + done, min(CHUNK, size - done), 1, 0)


# -- how they are read ---------------------------------------------------------------------------------------------


class _Disk:
    """How fast reads past the cache are, and so whether they are worth it. Any thread may tell or ask."""

    def __init__(self) -> None:
        self.worth_it = True
        self._lock = threading.Lock()
        self._bytes = 0
        self._seconds = 0.0  # of all threads

    def tell(self, count: int, seconds: float) -> None:
        with self._lock:
            self._bytes += count
            self._seconds += seconds
            if self._bytes >= JUDGED and self._bytes * THREADS < SLOW * self._seconds:
                self.worth_it = False


class _File:
    """An open file, read through the kernel's cache or past it."""

    def __init__(self, path: Path, disk: _Disk) -> None:
        self._disk = disk
        self._size = path.stat().st_size
        self._cached = os.open(path, os.O_RDONLY)
        self._direct = -1
        self._cache: _Cache | None = None
        if sys.platform == "linux" and self._size:
            try:
                self._cache = _Cache(self._cached, self._size)
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError:  # not every file system can do both
                pass

    def close(self) -> None:
        os.close(self._cached)
        if self._direct >= 0:
            os.close(self._direct)
        if self._cache is not None:
            self._cache.close()

    def read(self, start: int, out: Bytes, *, common: bool) -> None:
        """Fill `out` with the bytes from `start` on; through the cache in any case where they are common."""
        past = None if common else self._read_past(start, len(out))
        if past is None:
            _fill(self._cached, start, out)
        else:
            out[:] = past

    def view(self, start: int, size: int, *, common: bool) -> Bytes:
        """So many bytes from `start` on, in memory that the calling thread's next call overwrites."""
        past = None if common else self._read_past(start, size)
        if past is None:
            past = _scratch(size)
            _fill(self._cached, start, past)
        return past

    def _read_past(self, start: int, size: int) -> Bytes | None:
        """Past the cache; None where that is not worth it or does not work, and reading through it will say why."""
        if self._direct < 0 or self._cache is None or not self._disk.worth_it or self._cache.holds(start, size):
            return None
        first = start - start % BLOCK
        stop = start + size
        buffer = _scratch(-(-(stop - first) // BLOCK) * BLOCK)
        began = time.perf_counter()
        done = 0
        try:
            while (
                first + done < stop
                and done % BLOCK == 0
                and (n := os.preadv(self._direct, [buffer[done:].data], first + done))
            ):
                done += n
        except OSError:
            self._disk.worth_it = False
            return None
        self._disk.tell(done, time.perf_counter() - began)
        return buffer[start - first : stop - first] if first + done >= stop else None


class _Cache:
    """Which pages of a file the kernel has in memory."""

    def __init__(self, file: int, size: int) -> None:
        self._map = mmap.mmap(file, size, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._mincore = ctypes.CDLL(None, use_errno=True).mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def holds(self, start: int, size: int) -> bool:
        """All of it; also where the kernel does not tell, as of files that this user could not write."""
        first = start - start % mmap.PAGESIZE
        size = start + size - first
        pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        failed = self._mincore(self._address + first, size, pages.ctypes.data)
        return bool(failed or (pages & 1).all())

    def close(self) -> None:
        self._map.close()


_kept = threading.local()


def _scratch(size: int) -> Bytes:
    """Bytes to read into, the same ones for every call of a thread; they start at a page."""
    if len(getattr(_kept, "bytes", ())) < size:
        _kept.bytes = np.frombuffer(mmap.mmap(-1, max(size, CHUNK + 2 * BLOCK)), np.uint8)
    found: Bytes = _kept.bytes[:size]
    return found


def _fill(file: int, start: int, out: Bytes) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(file, [out[done:].data], start + done)
        if not count:
            raise OSError(f"it ended {len(out) - done} bytes early")
        done += count
