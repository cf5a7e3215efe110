"""What a model's safetensors files hold, and any part of it (DESIGN section 6).

Headers say names, dtypes, shapes and places; files are checked to be whole before anything is loaded. Of a tensor only
the rows asked for are copied, straight into the caller's buffer. Does not know models, MLX or who owns what.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from phalanx.errors import WeightsError

PATTERN = "model*.safetensors"
"""Files that mlx-lm loads."""
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the format's own limit
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
AGAIN = "Download or copy the file again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: bytes `[start, stop)` of it, row-major."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of a tensor along one axis, as runs `[start, stop)` in the order in which they are kept."""

    axis: int
    runs: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """How many rows are kept."""
        return sum(stop - start for start, stop in self.runs)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept of a tensor."""
        return (*whole[: self.axis], self.rows, *whole[self.axis + 1 :])


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a model's directory, by name.

    Raises:
        WeightsError: no weights, a file cut short or not safetensors, a shard the index names but is not there, or a
            tensor that is in two files.
    """
    files = sorted(path.glob(PATTERN))
    _check_index(path, {file.name for file in files})
    if not files:
        others = sorted(file.name for file in path.glob("*.safetensors")) + sorted(f.name for f in path.glob("*.gguf"))
        raise WeightsError(
            f"{path} has no {PATTERN}" + (f", only {some(others)}." if others else "."),
            remedy="Convert the model with `mlx_lm.convert`." if others else "Download the model's weights.",
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise WeightsError(
                    f"Tensor {name} is in both {tensors[name].file.name} and {file.name}.",
                    remedy=f"Remove the files in {path} that belong to another version of the model.",
                )
            tensors[name] = info
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises:
        WeightsError: not a safetensors file, or not whole; says how many bytes there are and should be.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER:
            raise WeightsError(f"{file} is not a safetensors file ({size} bytes).", remedy=AGAIN)
        if size < 8 + length:
            raise WeightsError(f"{file} ends inside its header: {size} bytes, {8 + length} wanted.", remedy=AGAIN)
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _parse(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} has a damaged header: {error}", remedy=AGAIN) from error
    wanted = max((info.stop for info in tensors.values()), default=8 + length)
    if size != wanted:
        kind = "cut short" if size < wanted else "longer than its header says"
        raise WeightsError(f"{file} is {kind}: {size} bytes, {wanted} wanted.", remedy=AGAIN)
    return tensors


def _parse(file: Path, base: int, entry: Any) -> TensorInfo:
    start, stop = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(n) for n in entry["shape"])
    bits = math.prod(shape) * BITS[entry["dtype"]]
    if start < 0 or min(shape, default=0) < 0 or (stop - start) * 8 != bits:
        raise ValueError(f"{stop - start} bytes for {entry['dtype']}{list(shape)}")
    return TensorInfo(file, entry["dtype"], shape, base + start, base + stop)


def _check_index(path: Path, present: set[str]) -> None:
    index = path / INDEX
    if not index.exists():
        return
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is damaged: {error}", remedy=AGAIN) from error
    absent = sorted(shards - present)
    if absent:
        raise WeightsError(
            f"{path} lacks {len(absent)} of {len(shards)} weight files: {some(absent)}.",
            remedy="The download is not complete: start it again.",
        )


def some(names: Iterable[str], most: int = 8) -> str:
    """At most `most` names for a message."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


# -- tensors -------------------------------------------------------------------------------------------------------

CHUNK = 8 << 20  # bytes of a file that are read in one call
THREADS = 4  # that copy chunks of one tensor: the disk has several requests at once, page faults several cores
DIRECT = 64 << 10  # pieces from this size on are read by themselves, smaller ones with what is between them
AHEAD = 128 << 20  # bytes that the kernel is asked to have ready, so that the disk is busy while a tensor is cast
ADVICE = 128 << 10  # bytes it is asked for in one call: more than its read-ahead window it would not take


class Reader:
    """Copies parts of tensors out of files, which it keeps open while it is entered. Counts what it copies.

    Args:
        wanted: everything that will be read, in that order; files are read fastest from their start to their end.
    """

    def __init__(self, wanted: Sequence[tuple[TensorInfo, Cut | None]]) -> None:
        self.copied = 0
        self._pool = ThreadPoolExecutor(THREADS, "read")
        self._files: dict[Path, BinaryIO] = {}
        self._wanted = iter(wanted)
        self._announced = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def begin(self, info: TensorInfo, cut: Cut | None, out: npt.NDArray[np.uint8]) -> Copying:
        """Begin to copy a tensor, or the rows of `cut`, into the bytes `out`.

        Raises:
            WeightsError: the file cannot be opened.
        """
        try:
            self._announce()
            file, done, jobs = self._open(info.file).fileno(), 0, []
            for piece in _pieces(info, cut):
                jobs.append(self._pool.submit(piece.copy, file, out[done : done + piece.size * piece.count]))
                done += piece.size * piece.count
        except OSError as error:
            raise _unreadable(info, error) from error
        self.copied += done
        return Copying(info, jobs)

    def _open(self, path: Path) -> BinaryIO:
        if (file := self._files.get(path)) is None:
            file = self._files[path] = path.open("rb", buffering=0)
        return file

    def _announce(self) -> None:
        """Let the kernel begin to read what comes next."""
        while sys.platform == "linux" and self._announced < self.copied + AHEAD:
            want = next(self._wanted, None)
            if want is None:
                return
            for piece in _pieces(*want):
                file = self._open(want[0].file).fileno()
                for start in range(piece.start, piece.start + piece.span, ADVICE):
                    size = min(ADVICE, piece.start + piece.span - start)
                    os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)
                self._announced += piece.size * piece.count


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


@dataclass(frozen=True, slots=True)
class _Piece:
    """`count` stretches of `size` bytes, the first at `start`, `stride` apart."""

    start: int
    size: int
    count: int
    stride: int

    @property
    def span(self) -> int:
        """Bytes from the first to the last."""
        return (self.count - 1) * self.stride + self.size

    def copy(self, file: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy from an open file to `out`, which has just the size."""
        if self.count == 1:
            _fill(file, self.start, out)
            return
        around = _scratch(self.span)
        _fill(file, self.start, around)
        rows = np.lib.stride_tricks.as_strided(around, (self.count, self.size), (self.stride, 1), writeable=False)
        out.reshape(self.count, self.size)[:] = rows


_kept = threading.local()


def _scratch(size: int) -> npt.NDArray[np.uint8]:
    """Bytes to read into, the same ones for every call of a thread: fresh memory costs more than reading."""
    if len(getattr(_kept, "bytes", ())) < size:
        _kept.bytes = np.empty(max(size, CHUNK), np.uint8)
    found: npt.NDArray[np.uint8] = _kept.bytes[:size]
    return found


def _fill(file: int, start: int, out: npt.NDArray[np.uint8]) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(file, [out[done:].data], start + done)
        if not count:
            raise OSError(f"it ended {len(out) - done} bytes early")
        done += count


def _pieces(info: TensorInfo, cut: Cut | None) -> Iterator[_Piece]:
    """What to copy, in the order of the result, in chunks."""
    if cut is None or not info.nbytes:
        yield from _chunks(info.start, info.nbytes)
        return
    outer = math.prod(info.shape[: cut.axis])
    block = info.nbytes // outer  # bytes of one index of the axes before
    row = block // info.shape[cut.axis]
    spans = [(start * row, (stop - start) * row) for start, stop in cut.runs]
    if len(spans) == 1 and spans[0][1] < DIRECT and outer > 1:
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


# -- the model's identity ------------------------------------------------------------------------------------------

SAMPLE = 64  # bytes that a fingerprint takes of every tensor's start, middle and end


def fingerprint(path: Path) -> str:
    """A number by which ranks see that they hold the same model: config, tensors and a sample of each one's bytes.

    Not of every byte, which would be as slow as loading. How tensors are spread over files does not matter.

    Raises:
        WeightsError: as `read_headers`, or no config.json.
    """
    try:
        digest = hashlib.sha256((path / "config.json").read_bytes())
    except OSError as error:
        raise WeightsError(
            f"{path} has no config.json that can be read: {error.strerror}.",
            remedy="Name the directory that holds config.json and the weights.",
        ) from error
    headers = read_headers(path)
    files: dict[Path, BinaryIO] = {}
    try:
        for name, info in sorted(headers.items()):
            if (file := files.get(info.file)) is None:
                file = files[info.file] = info.file.open("rb", buffering=0)
            digest.update(f"{name} {info.dtype} {info.shape}".encode())
            for start in (info.start, (info.start + info.stop) // 2, info.stop - SAMPLE):
                file.seek(max(info.start, start))
                digest.update(file.read(min(SAMPLE, info.nbytes)))
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()[:32]
