"""The tensors in a model's safetensors files, by their headers, and the model's fingerprint (design: Loading).

Headers give names, dtypes, shapes and offsets. Files are checked to be complete before anything is loaded (`reading.py`
reads tensors).
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Struct

from phalanx.errors import WeightsError
from phalanx.model.loading.weight_files import REDOWNLOAD, describe, weight_files
from phalanx.text.model_files import LFS, MAX_CONFIG, open_file, pointer, read_file

MAX_HEADER = 32 << 20  # bytes; a file of 10,000 tensors takes 1 MB
MAX_TENSORS = 500_000  # of a model; the largest known have 150,000, their experts stored one by one
MAX_AXES = 8  # weights of convolutions in three dimensions have 5
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
Offset = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Bytes from the end of the header, or elements along an axis; no file system holds more."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: bytes `[start, stop)` of a file, row-major."""

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
        """Number of rows."""
        return sum(stop - start for start, stop in self.runs)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of these rows of a tensor whose shape is `whole`."""
        return (*whole[: self.axis], self.rows, *whole[self.axis + 1 :])


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a model's directory, by name.

    Raises:
        WeightsError: as `weight_files`, or there are too many tensors, a file is truncated or not safetensors, or two
            files have the same tensor.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(path)[0]:
        try:
            header = read_header(file)
        except FileNotFoundError as error:
            raise WeightsError(f"{file} is a link to nothing.", remedy=REDOWNLOAD) from error
        for name, info in header.items():
            if name in tensors:
                raise WeightsError(
                    f"Tensor {name} is in both {tensors[name].file.name} and {file.name}.",
                    remedy=f"Remove the files in {path} that belong to another version of the model.",
                )
            tensors[name] = info
        if len(tensors) > MAX_TENSORS:
            raise WeightsError(f"{path} has more than {MAX_TENSORS} tensors.", remedy=REDOWNLOAD)
    return tensors


class _Entry(Struct, frozen=True):
    """A tensor, as a header describes it."""

    dtype: str
    shape: Annotated[list[Offset], Meta(max_length=MAX_AXES)]
    data_offsets: tuple[Offset, Offset]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises:
        WeightsError: not a safetensors file, or not complete; names the actual and the expected size. Or tensors
            overlap or leave gaps, are described in other words than the format's, or are of an unknown dtype.
    """
    with open_file(file, WeightsError) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        if size and LFS.startswith(start):
            raise pointer(file, WeightsError)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER:
            raise WeightsError(f"{file} is not a safetensors file ({size} bytes).", remedy=REDOWNLOAD)
        if size < 8 + length:
            raise WeightsError(f"{file} ends inside its header: {size} bytes, {8 + length} wanted.", remedy=REDOWNLOAD)
        text = stream.read(length)
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} has a damaged header: {error}", remedy=REDOWNLOAD) from error
    header.pop("__metadata__", None)
    tensors = {name: _parse(file, 8 + length, name, entry) for name, entry in header.items()}
    wanted = max((info.stop for info in tensors.values()), default=8 + length)
    if size != wanted:
        kind = "cut short" if size < wanted else "longer than its header says"
        raise WeightsError(f"{file} is {kind}: {size} bytes, {wanted} wanted.", remedy=REDOWNLOAD)
    _check_order(file, 8 + length, tensors)
    return tensors


def _parse(file: Path, base: int, name: str, text: msgspec.Raw) -> TensorInfo:
    try:
        entry = msgspec.json.decode(text, type=_Entry)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} has a damaged header: tensor {name}: {error}.", remedy=REDOWNLOAD) from error
    start, stop = entry.data_offsets
    if entry.dtype not in BITS:
        raise WeightsError(
            f"{file}: tensor {name} has the dtype {entry.dtype!r}, which safetensors does not have.", remedy=REDOWNLOAD
        )
    if (stop - start) * 8 != math.prod(entry.shape) * BITS[entry.dtype]:
        raise WeightsError(
            f"{file} has a damaged header: tensor {name} has {stop - start} bytes for {entry.dtype}{entry.shape}.",
            remedy=REDOWNLOAD,
        )
    return TensorInfo(file, entry.dtype, tuple(entry.shape), base + start, base + stop)


def _check_order(file: Path, base: int, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that tensors follow each other without overlap or gap, as the format demands."""
    end = base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            what = "overlaps another" if info.start < end else "leaves a gap before it"
            raise WeightsError(f"{file} has a damaged header: tensor {name} {what}.", remedy=REDOWNLOAD)
        end = info.stop


# -- the model's identity ------------------------------------------------------------------------------------------

SAMPLE = 64  # bytes of a tensor in one place; of a fingerprint, from each one's start, middle and end


def fingerprint(path: Path) -> str:
    """A hash by which ranks compare their models: of the config, the headers, and a sample of each tensor's bytes.

    Hashing every byte would be as slow as loading. The distribution of tensors over files does not matter.

    Raises:
        WeightsError: as `read_headers`, or no config.json.
    """
    try:
        digest = hashlib.sha256(read_file(path / "config.json", MAX_CONFIG, WeightsError))
    except FileNotFoundError as error:
        what, remedy = describe(path, "config.json")
        raise WeightsError(what, remedy=remedy) from error
    headers = read_headers(path)
    files: dict[Path, BinaryIO] = {}
    try:
        for name, info in sorted(headers.items()):
            if (file := files.get(info.file)) is None:
                file = files[info.file] = info.file.open("rb", buffering=0)
                if sys.platform == "linux":  # no read-ahead around the samples
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            digest.update(f"{name} {info.dtype} {info.shape}".encode())
            for start in (info.start, (info.start + info.stop) // 2, info.stop - SAMPLE):
                file.seek(max(info.start, start))
                digest.update(file.read(min(SAMPLE, info.nbytes)))
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()[:32]
