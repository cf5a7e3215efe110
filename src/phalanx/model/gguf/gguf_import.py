"""Imports a GGUF file: a directory as mlx-lm has them, written once, a few rows of a tensor in memory at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from phalanx.catalog.imports import ORIGIN, Origin, directory_for, imported_content, imported_file, origin_of
from phalanx.catalog.pull_progress import PullProgress, Report, quiet
from phalanx.errors import ModelError, WeightsError
from phalanx.memory import GB
from phalanx.model.gguf.gguf_blocks import BITS, GROUP, Array, pack, scales_dtypes, to_groups
from phalanx.model.gguf.gguf_config import FREQUENCIES, Metadata, Named, config_of, name_tensors
from phalanx.model.gguf.gguf_header import DAMAGED, GgufHeader, parse_header
from phalanx.model.gguf.gguf_tokenizer import end_ids, write_tokenizer
from phalanx.text.model_files import open_file

CHUNK = 4 << 20  # bytes of a tensor in memory at once; its conversion takes some ten times as much
NBYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4}
SPARE = 64 << 20  # bytes of the disk that stay free, with room for the tokenizer


def import_gguf(file: Path, report: Report = quiet) -> Path:
    """The directory of the model in a file, which is imported unless it has been before.

    Raises:
        ModelError: the file is damaged, is not taken over, or the disk is too small; says why.
    """
    try:
        if (known := imported_file(file)) is not None:
            return known
        origin = replace(origin_of(file), sha256=_sha256(file, report))
        directory = directory_for(file, origin.sha256)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _alone(directory.parent):
            if (same := imported_content(origin.sha256)) is not None:
                _record(same, origin)  # it is found by this path from now on, without reading the file
                return same
            part = directory.with_name(f".part-{directory.name}")
            for left in (part, directory):  # of a process that was killed; without its record
                shutil.rmtree(left, ignore_errors=True)
            try:
                convert(file, part, report)
                _record(part, origin)
                part.rename(directory)  # whole or not at all
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{file} could not be imported: {error.filename or ''} {error.strerror or error}.",
            remedy="Check the file and the room on the disk, or set XDG_CACHE_HOME to another directory.",
        ) from error
    return directory


def convert(file: Path, directory: Path, report: Report = quiet) -> dict[str, float]:
    """Write the model of a file as a directory that does not exist yet. Reports progress, and what is not exact.

    Returns:
        By their names, the largest error of tensors that were quantised again.

    Raises:
        ModelError: the file is damaged, is not taken over, or the disk is too small.
        OSError: something cannot be read or written.
    """
    with open_file(file, WeightsError) as stream:
        header = parse_header(str(file), os.fstat(stream.fileno()).st_size, stream.read)
        metadata = Metadata(str(file), header.metadata)
        named = name_tensors(metadata, header)
        written = list(_layout(named))
        total = sum(one.nbytes for one in written)
        free = shutil.disk_usage(directory.parent).free
        if total + SPARE > free:
            raise ModelError(
                f"{file.name} needs {total / GB:.2f} GB of disk, but {directory.parent} has {free / GB:.2f} GB free.",
                remedy="Make room there, or set XDG_CACHE_HOME to a directory with room.",
            )
        directory.mkdir()
        config = config_of(metadata, named, _factors(metadata, header, stream), end_ids(metadata))
        (directory / "config.json").write_text(json.dumps(config, indent=1))
        write_tokenizer(metadata, directory)
        with (directory / "model.safetensors").open("xb") as out:
            errors = _write(file, named, written, stream, out, _shown(report, f"importing {file.name}", file, total))
            out.flush()
            os.fsync(out.fileno())
    if errors:
        worst = max(errors, key=errors.__getitem__)
        said = f"{len(errors)} tensors are quantised again, to 8 bits; the largest error is {errors[worst]:.2g}"
        report(PullProgress(f"{said} ({worst})"))
    return errors


# -- the weights ---------------------------------------------------------------------------------------------------


class _Written(NamedTuple):
    """A tensor of the new file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the end of the header
    nbytes: int


def _layout(named: Sequence[Named]) -> Iterator[_Written]:
    """The tensors of the new file, those of one module after each other: weights, scales, biases."""
    start = 0
    for one in named:
        for part, dtype, shape in _parts(one):
            nbytes = math.prod(shape) * NBYTES[dtype]
            yield _Written(f"{one.module}.{part}", dtype, shape, start, nbytes)
            start += nbytes


def _parts(one: Named) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    kind, shape = one.tensor.type.name, one.tensor.shape
    if kind not in BITS:
        yield one.part, kind, shape
        return
    *rows, width = shape
    yield one.part, "U32", (*rows, width * BITS[kind] // 32)
    for part, dtype in scales_dtypes(kind).items():
        yield part, dtype, (*rows, width // GROUP)


def _write(
    file: Path,
    named: Sequence[Named],
    written: Sequence[_Written],
    stream: BinaryIO,
    out: BinaryIO,
    done: Callable[[int], None],
) -> dict[str, float]:
    """Write a safetensors file. Returns the errors of tensors that were quantised again."""
    entries = {
        one.name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": (one.start, one.start + one.nbytes)}
        for one in written
    }
    text = json.dumps({"__metadata__": {"format": "mlx"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    places = iter(written)
    errors: dict[str, float] = {}
    for one in named:
        kind = one.tensor.type.name
        at = [8 + len(text) + next(places).start for _ in _parts(one)]
        for rows in _rows(file, one, stream):
            parts: list[Array] = [rows]
            if kind in BITS:
                found = to_groups(f"{file}: tensor {one.tensor.name}", kind, rows.reshape(-1, one.tensor.type.nbytes))
                parts = [pack(found.codes, BITS[kind]), found.scales]
                if found.biases is not None:
                    parts.append(found.biases)
                if found.error:
                    errors[one.tensor.name] = max(errors.get(one.tensor.name, 0.0), found.error)
            for i, part in enumerate(parts):
                out.seek(at[i])
                at[i] += out.write(part.tobytes())
            done(sum(part.nbytes for part in parts))
    return errors


def _rows(file: Path, one: Named, stream: BinaryIO) -> Iterator[Array]:
    """The rows of a tensor in mlx-lm's order, some at a time: uint8 [rows, bytes]."""
    width = one.tensor.nbytes // one.tensor.shape[0]
    height = max(1, CHUNK // width)
    if one.pairs_of:
        height = max(1, height // one.pairs_of) * one.pairs_of
    stream.seek(one.tensor.start)
    for first in range(0, one.tensor.shape[0], height):
        n = min(height, one.tensor.shape[0] - first)
        read = stream.read(n * width)
        if len(read) != n * width:
            raise WeightsError(f"{file} became shorter while it was read.", remedy=DAMAGED)
        rows = np.frombuffer(read, np.uint8).reshape(n, width)
        yield halves(rows, one.pairs_of) if one.pairs_of else rows


def halves(rows: Array, head: int) -> Array:
    """Rows of each head from llama.cpp's order to mlx-lm's: the first keeps the two rows of a rotary pair side by side,
    the second has the first rows of all pairs, then the second ones."""
    width = rows.shape[1]
    return rows.reshape(-1, head // 2, 2, width).swapaxes(1, 2).reshape(-1, width)


def _factors(metadata: Metadata, header: GgufHeader, stream: BinaryIO) -> Array | None:
    for tensor in header.tensors:
        if tensor.name == FREQUENCIES:
            if tensor.type.name != "F32":
                raise metadata.refused(f"{FREQUENCIES} is of type {tensor.type.name}")
            stream.seek(tensor.start)
            return np.frombuffer(stream.read(tensor.nbytes), "<f4")
    return None


# -- around them ---------------------------------------------------------------------------------------------------


def _sha256(file: Path, report: Report) -> str:
    digest = hashlib.sha256()
    with open_file(file, WeightsError) as stream:
        done = _shown(report, f"reading {file.name}", file, os.fstat(stream.fileno()).st_size)
        while data := stream.read(CHUNK):
            digest.update(data)
            done(len(data))
    return digest.hexdigest()


def _shown(report: Report, status: str, file: Path, total: int) -> Callable[[int], None]:
    """A function that adds bytes to a bar."""
    completed = 0

    def add(n: int) -> None:
        nonlocal completed
        completed += n
        report(PullProgress(status, str(file), total, completed))

    return add


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine imports."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _record(directory: Path, origin: Origin) -> None:
    written = directory / f"{ORIGIN}.new"
    written.write_bytes(msgspec.json.encode(origin))
    written.replace(directory / ORIGIN)
