"""Converts a GGUF file to a directory in mlx-lm's format, with a few rows of a tensor in memory at a time."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import gguf
import numpy as np

from phalanx.catalog.imports import files_of_model
from phalanx.catalog.pull_progress import PullProgress, Report, quiet
from phalanx.errors import ModelError, WeightsError
from phalanx.memory import GB
from phalanx.model.gguf.gguf_blocks import BITS, GROUP, Array, pack, scales_dtypes, to_groups
from phalanx.model.gguf.gguf_config import FACTORS, Named, config_of, name_tensors
from phalanx.model.gguf.gguf_header import DAMAGED
from phalanx.model.gguf.gguf_metadata import Metadata
from phalanx.model.gguf.gguf_parts import OpenModel, open_model
from phalanx.model.gguf.gguf_tokenizer import end_ids, write_tokenizer
from phalanx.model.gguf.import_journal import ImportJournal
from phalanx.text.printable import printable

WEIGHTS = "model.safetensors"
JOURNAL = ".journal"
CHUNK = 4 << 20  # bytes of a tensor in memory at once; its conversion takes up to 30 times as much
NBYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4}
SPARE = 64 << 20  # bytes of the disk that stay free, with room for the tokenizer


def convert(file: Path, directory: Path, report: Report = quiet) -> dict[str, float]:
    """Write the model of a file as a directory. Reports progress, and what is not exact.

    Args:
        file: the model's, or one of its several files.
        directory: new, or as an earlier call for these files left it: then it goes on.

    Returns:
        By their names, the largest error of tensors that were quantised again.

    Raises:
        ModelError: the file is damaged, is not taken over, or the disk is too small.
        OSError: something cannot be read or written.
    """
    with open_model(files_of_model(file)) as model:
        directory.mkdir(exist_ok=True)
        layout = describe(model, file, directory)
        weights = directory / WEIGHTS
        begun = weights.stat().st_blocks * 512 if weights.exists() else 0
        check_disk(file.name, layout.nbytes - begun, directory.parent)
        done = shown_bytes(report, f"importing {file.name}", file, layout.nbytes)
        errors = _write(file, layout, model.streams, weights, done)
    if errors:
        worst = max(errors, key=errors.__getitem__)
        said = f"{len(errors)} tensors are quantised again, to 8 bits; the largest error is {errors[worst]:.2g}"
        report(PullProgress(f"{said} ({worst})"))
    return errors


class _Written(NamedTuple):
    """A tensor of the new file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the end of the header
    nbytes: int


class WeightsLayout(NamedTuple):
    """The tensors of a file of weights."""

    named: Sequence[Named]
    written: Sequence[_Written]  # in the same order, up to three of each

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(one.nbytes for one in self.written)


def describe(model: OpenModel, file: Path, directory: Path) -> WeightsLayout:
    """Write all of a model but its weights: config.json and the tokenizer.

    Args:
        file: for errors.

    Raises:
        ModelError: the model is damaged, or is not taken over.
        OSError: something cannot be written.
    """
    metadata = Metadata(str(file), model.header.metadata)
    named = name_tensors(metadata, model.header)
    config = config_of(metadata, named, _factors(metadata, model), end_ids(metadata))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(metadata, directory)
    return WeightsLayout(named, list(_layout(named)))


def check_disk(name: str, needed: int, folder: Path) -> None:
    """Check that a disk has room.

    Raises:
        ModelError: it has too little.
    """
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise ModelError(
            f"{name} needs {needed / GB:.2f} GiB of disk, but {folder} has {free / GB:.2f} GiB free.",
            remedy="Make room there, or set XDG_CACHE_HOME to a directory with room.",
        )


def shown_bytes(report: Report, status: str, file: Path, total: int) -> Callable[[int], None]:
    """A function that adds bytes to a bar."""
    completed = 0

    def add(n: int) -> None:
        nonlocal completed
        completed += n
        report(PullProgress(printable(status), str(file), total, completed))

    return add


# -- the weights ---------------------------------------------------------------------------------------------------


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
    file: Path, layout: WeightsLayout, streams: Sequence[BinaryIO], weights: Path, done: Callable[[int], None]
) -> dict[str, float]:
    """Write a safetensors file, or the rest of it. Returns the errors of tensors that were quantised again."""
    entries = {
        one.name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": (one.start, one.start + one.nbytes)}
        for one in layout.written
    }
    text = json.dumps({"__metadata__": {"format": "mlx"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    journal = ImportJournal(weights.with_name(JOURNAL), weights, start)
    errors = {name: error for name, error in journal.finished.items() if error is not None}
    places = iter(layout.written)
    todo = [(one, [next(places) for _ in _parts(one)]) for one in layout.named]
    todo = [(one, parts) for one, parts in todo if one.tensor.name not in journal.finished]
    if journal.finished:
        done(layout.nbytes - sum(part.nbytes for _, parts in todo for part in parts))
    with weights.open("r+b") as out:
        for one, parts in todo:
            at = [len(start) + part.start for part in parts]
            error = _write_tensor(file, one, streams, out, at, done)
            if error is not None:
                errors[one.tensor.name] = error
            journal.add(one.tensor.name, error, sum(part.nbytes for part in parts), out)
        journal.finish(out)
    return errors


def _write_tensor(
    file: Path, one: Named, streams: Sequence[BinaryIO], out: BinaryIO, at: list[int], done: Callable[[int], None]
) -> float | None:
    """Write the parts of a tensor, each from its place in the file on. Returns the largest error of an inexact one."""
    kind = one.tensor.type.name
    error = 0.0
    for rows in _joined_heads(file, one, streams) if one.heads else _rows(file, one, streams[one.tensor.part]):
        parts: list[Array] = [rows]
        if kind in BITS:
            found = to_groups(f"{file}: tensor {one.tensor.name}", kind, rows.reshape(-1, one.tensor.type.nbytes))
            parts = [pack(found.codes, BITS[kind]), found.scales]
            if found.biases is not None:
                parts.append(found.biases)
            error = max(error, found.error)
        for i, part in enumerate(parts):
            out.seek(at[i])
            at[i] += out.write(part.tobytes())
        done(sum(part.nbytes for part in parts))
    return error or None


def _rows(file: Path, one: Named, stream: BinaryIO) -> Iterator[Array]:
    """The rows of a tensor in mlx-lm's order, some at a time: uint8 [rows, bytes]."""
    n_rows = math.prod(one.tensor.shape[:-1]) if len(one.tensor.shape) > 1 else one.tensor.shape[0]
    width = one.tensor.nbytes // n_rows
    height = max(1, CHUNK // width)
    if one.pairs_of:
        height = max(1, height // one.pairs_of) * one.pairs_of
    stream.seek(one.tensor.start)
    for first in range(0, n_rows, height):
        rows = _read(file, stream, min(height, n_rows - first), width)
        if one.shifted:
            rows = (rows.view("<f4") - np.float32(1)).view(np.uint8)
        yield halves(rows, one.pairs_of) if one.pairs_of else rows


def _read(file: Path, stream: BinaryIO, n: int, width: int) -> Array:
    read = stream.read(n * width)
    if len(read) != n * width:
        raise WeightsError(f"{file} became shorter while it was read.", remedy=DAMAGED)
    return np.frombuffer(read, np.uint8).reshape(n, width)


def _joined_heads(file: Path, one: Named, streams: Sequence[BinaryIO]) -> Iterator[Array]:
    """Of each head the rows of its keys, transposed, and of its values, in float32: uint8 [rows, bytes]."""
    for head in range(one.heads[0].shape[0]):
        parts = []
        for tensor in one.heads:
            nbytes, stream = tensor.nbytes // tensor.shape[0], streams[tensor.part]
            stream.seek(tensor.start + head * nbytes)
            rows = _read(file, stream, tensor.shape[1], nbytes // tensor.shape[1])
            weights = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type.name])
            if not np.isfinite(weights).all():
                raise WeightsError(f"{file}: tensor {tensor.name} has a weight that is not finite.", remedy=DAMAGED)
            parts.append(weights)
        keys, values = parts
        yield np.concatenate([keys.T, values]).astype("<f4").view(np.uint8)


def halves(rows: Array, head: int) -> Array:
    """Rows of each head from llama.cpp's order to mlx-lm's: the first keeps the two rows of a rotary pair side by side,
    the second has the first rows of all pairs, then the second ones."""
    width = rows.shape[1]
    return rows.reshape(-1, head // 2, 2, width).swapaxes(1, 2).reshape(-1, width)


def _factors(metadata: Metadata, model: OpenModel) -> dict[str, Array | None]:
    """The tensors of rotary factors, by their names; None: the file is only the beginning of a longer one."""
    found: dict[str, Array | None] = {}
    for tensor in model.header.tensors:
        if tensor.name in FACTORS:
            if tensor.type.name != "F32":
                raise metadata.refused(f"{tensor.name} is of type {tensor.type.name}")
            stream = model.streams[tensor.part]
            stream.seek(tensor.start)
            read = stream.read(tensor.nbytes)
            found[tensor.name] = np.frombuffer(read, "<f4") if len(read) == tensor.nbytes else None
    return found
