"""Reads parts of tensors from files directly into the caller's buffers (design: Loading).

Pages that are in the kernel's page cache are copied from it. Other pages are read with direct I/O (O_DIRECT; F_NOCACHE
on macOS), in large requests and several at once: that keeps a fast disk busy with little processor time, and evicts
nothing from memory. A slow disk is read through the page cache, which costs no time there and helps the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from phalanx.model.loading.weight_files import REDOWNLOAD
from phalanx.model.loading.weights import Cut, TensorInfo
from phalanx.text.model_files import open_file

Bytes = npt.NDArray[np.uint8]

CHUNK = (8 if sys.platform == "darwin" else 1) << 20
"""Bytes per read call. On Linux a thread's buffer of this size stays in the processor's cache. macOS splits a direct
read into pieces of about 1 MiB that are under way together, so a read has to have several (an estimate, not measured).
"""
THREADS = 4  # so that the disk has several requests at once, and several cores handle page faults
MIN_SPAN = 64 << 10  # bytes; larger spans are read one by one, smaller ones together with the bytes between them
BLOCK = max(4096, mmap.PAGESIZE)
"""Bytes. Direct reads start and end at multiples of the disk's block, 512 or 4096, on macOS of a page, 16384; else they
go through the cache."""
SLOW = 500e6  # bytes per second: a disk with slower direct reads is read through the page cache
SPEED_AFTER = 64 << 20  # bytes of direct reads after which their speed is judged


class WeightReader:
    """Reads tensors on a pool of threads. A context manager: files stay open inside it.

    Args:
        shared: other ranks of this machine read the same files at the same time. Pages that all of them need are then
            read through the page cache, so that the disk reads them once.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.copied = 0  # bytes
        self._shared = shared
        self._pool = ThreadPoolExecutor(THREADS, "read")
        self._direct_speed = _DirectSpeed()
        self._files: dict[Path, _WeightFile] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def begin(self, info: TensorInfo, cut: Cut | None, out: Bytes) -> CopyJob:
        """Start to read a tensor, or only the rows of `cut`, into `out`, which has exactly that size.

        Raises:
            WeightsError: the file cannot be opened.
        """
        if (file := self._files.get(info.file)) is None:
            try:
                file = self._files[info.file] = _WeightFile(info.file, self._direct_speed)
            except OSError as error:
                raise _unreadable(info, error) from error
        done, jobs = 0, []
        for extent in _extents(info, cut):
            shared = self._shared and (cut is None or extent.count > 1)
            jobs.append(self._pool.submit(extent.copy, file, out[done : done + extent.size * extent.count], shared))
            done += extent.size * extent.count
        self.copied += done
        return CopyJob(info, jobs)


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A tensor that is being read."""

    info: TensorInfo
    jobs: list[Future[None]]

    def wait(self) -> None:
        """Wait until it is read.

        Raises:
            WeightsError: the file ended early, or cannot be read.
        """
        try:
            for job in self.jobs:
                job.result()
        except (OSError, ValueError) as error:
            raise _unreadable(self.info, error) from error


def _unreadable(info: TensorInfo, error: Exception) -> WeightsError:
    return WeightsError(f"{info.file} cannot be read: {error}", remedy=REDOWNLOAD)


# -- which bytes to read -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Extent:
    """`count` spans of `size` bytes of a file; the first starts at `start`, the others `stride` bytes apart."""

    start: int
    size: int
    count: int
    stride: int

    def copy(self, file: _WeightFile, out: Bytes, shared: bool) -> None:
        """Read from a file into `out`, which has exactly the size. `shared`: other ranks read the same pages now."""
        if self.count == 1:
            file.read(self.start, out, shared=shared)
            return
        around = file.view(self.start, (self.count - 1) * self.stride + self.size, shared=shared)
        rows = np.lib.stride_tricks.as_strided(around, (self.count, self.size), (self.stride, 1), writeable=False)
        out.reshape(self.count, self.size)[:] = rows


def _extents(info: TensorInfo, cut: Cut | None) -> Iterator[_Extent]:
    """The bytes to read, in the order of the result, in chunks."""
    if cut is None or not info.nbytes:
        yield from _chunks(info.start, info.nbytes)
        return
    outer = math.prod(info.shape[: cut.axis])
    block = info.nbytes // outer  # bytes per index of the axes before the cut's
    row = block // info.shape[cut.axis]
    spans = [(start * row, (stop - start) * row) for start, stop in cut.runs]
    if len(spans) == 1 and spans[0][1] < MIN_SPAN and outer > 1:
        [(offset, size)] = spans
        most = max(1, CHUNK // block)
        for first in range(0, outer, most):
            yield _Extent(info.start + first * block + offset, size, min(most, outer - first), block)
        return
    for index in range(outer):
        for offset, size in spans:
            yield from _chunks(info.start + index * block + offset, size)


def _chunks(start: int, size: int) -> Iterator[_Extent]:
    for done in range(0, size, CHUNK):
        yield _Extent(start + done, min(CHUNK, size - done), 1, 0)


# -- how to read them ----------------------------------------------------------------------------------------------


class _DirectSpeed:
    """Measures direct reads, and decides whether they are fast enough. Thread-safe."""

    def __init__(self) -> None:
        self.is_fast = True
        self._lock = threading.Lock()
        self._bytes = 0
        self._seconds = 0.0  # summed over threads

    def record(self, count: int, seconds: float) -> None:
        with self._lock:
            self._bytes += count
            self._seconds += seconds
            if self._bytes >= SPEED_AFTER and self._bytes * THREADS < SLOW * self._seconds:
                self.is_fast = False


class _WeightFile:
    """An open file, read through the page cache or with direct I/O."""

    def __init__(self, path: Path, speed: _DirectSpeed) -> None:
        self._direct_speed = speed
        with open_file(path, WeightsError) as stream:  # it may have become a pipe since its header was read
            self._size = os.fstat(stream.fileno()).st_size
            self._cached = os.dup(stream.fileno())
        self._direct = -1
        self._cache: _PageCache | None = None
        if self._size:
            with contextlib.suppress(OSError):  # some file systems do not support mmap or direct reads
                if sys.platform == "linux":
                    self._cache = _PageCache(self._cached, self._size)
                self._direct = _open_direct(path)

    def close(self) -> None:
        os.close(self._cached)
        if self._direct >= 0:
            os.close(self._direct)
        if self._cache is not None:
            self._cache.close()

    def read(self, start: int, out: Bytes, *, shared: bool) -> None:
        """Fill `out` with the bytes from `start` on; if `shared`, always through the page cache."""
        data = None if shared else self._read_direct(start, len(out))
        if data is None:
            _fill(self._cached, start, out)
        else:
            out[:] = data

    def view(self, start: int, size: int, *, shared: bool) -> Bytes:
        """`size` bytes from `start` on, in memory that the calling thread's next call overwrites."""
        data = None if shared else self._read_direct(start, size)
        if data is None:
            data = _scratch(size)
            _fill(self._cached, start, data)
        return data

    def _read_direct(self, start: int, size: int) -> Bytes | None:
        """Read with direct I/O; None if the page cache has the bytes, if direct reads are slow, or if they fail."""
        if self._direct < 0 or not self._direct_speed.is_fast:
            return None
        if self._cache is not None and self._cache.holds(start, size):
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
            self._direct_speed.is_fast = False
            return None
        self._direct_speed.record(done, time.perf_counter() - began)
        return buffer[start - first : stop - first] if first + done >= stop else None


def _open_direct(path: Path) -> int:
    """Open a file for reads past the page cache; -1 where the system has none.

    Raises:
        OSError: the file system does not support them.
    """
    if sys.platform == "linux":
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    if sys.platform == "darwin":
        file = os.open(path, os.O_RDONLY)
        try:
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)  # of this descriptor only; what is cached is still taken from there
        except OSError:
            os.close(file)
            raise
        return file
    return -1


class _PageCache:
    """Tells which pages of a file are in the kernel's page cache."""

    def __init__(self, file: int, size: int) -> None:
        self._map = mmap.mmap(file, size, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._mincore = ctypes.CDLL(None, use_errno=True).mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def holds(self, start: int, size: int) -> bool:
        """Whether all these bytes are cached. True if the kernel does not say (files that this user cannot write)."""
        first = start - start % mmap.PAGESIZE
        size = start + size - first
        pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        failed = self._mincore(self._address + first, size, pages.ctypes.data)
        return bool(failed or (pages & 1).all())

    def close(self) -> None:
        self._map.close()


_thread = threading.local()


def _scratch(size: int) -> Bytes:
    """A page-aligned buffer, the same one for every call of a thread."""
    if len(getattr(_thread, "bytes", ())) < size:
        _thread.bytes = np.frombuffer(mmap.mmap(-1, max(size, CHUNK + 2 * BLOCK)), np.uint8)
    found: Bytes = _thread.bytes[:size]
    return found


def _fill(file: int, start: int, out: Bytes) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(file, [out[done:].data], start + done)
        if not count:
            raise OSError(f"it ended {len(out) - done} bytes early")
        done += count
