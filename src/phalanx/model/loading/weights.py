"""The tensors in a model's safetensors files, by their headers, and the model's fingerprint (design: Loading).

Headers give names, dtypes, shapes and offsets. Files are checked to be complete before anything is loaded (`reading.py`
reads tensors). Does not know models, MLX, or which rank owns which part.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import WeightsError

PATTERN = "model*.safetensors"
"""Files that mlx-lm loads."""
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the format's own limit
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
REDOWNLOAD = "Download or copy the file again."


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
        WeightsError: there are no weights, a file is truncated or not safetensors, a file of the index is missing, or
            two files have the same tensor.
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
        WeightsError: not a safetensors file, or not complete; names the actual and the expected size.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER:
            raise WeightsError(f"{file} is not a safetensors file ({size} bytes).", remedy=REDOWNLOAD)
        if size < 8 + length:
            raise WeightsError(f"{file} ends inside its header: {size} bytes, {8 + length} wanted.", remedy=REDOWNLOAD)
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _parse(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} has a damaged header: {error}", remedy=REDOWNLOAD) from error
    wanted = max((info.stop for info in tensors.values()), default=8 + length)
    if size != wanted:
        kind = "cut short" if size < wanted else "longer than its header says"
        raise WeightsError(f"{file} is {kind}: {size} bytes, {wanted} wanted.", remedy=REDOWNLOAD)
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
        raise WeightsError(f"{index} is damaged: {error}", remedy=REDOWNLOAD) from error
    absent = sorted(shards - present)
    if absent:
        raise WeightsError(
            f"{path} lacks {len(absent)} of {len(shards)} weight files: {some(absent)}.",
            remedy="The download is not complete: start it again.",
        )


def some(names: Iterable[str], most: int = 8) -> str:
    """The first `most` names, for a message, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


# -- the model's identity ------------------------------------------------------------------------------------------

SAMPLE = 64  # bytes from each of a tensor's start, middle and end


def fingerprint(path: Path) -> str:
    """A hash by which ranks compare their models: of the config, the headers, and a sample of each tensor's bytes.

    Hashing every byte would be as slow as loading. The distribution of tensors over files does not matter.

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
