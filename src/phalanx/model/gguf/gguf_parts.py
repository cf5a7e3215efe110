"""Opens the files of a model, one or those that `llama-gguf-split` made, and joins their headers.

The first file has the metadata; each has some of the tensors, its number (`split.no`), and how many files
(`split.count`) and tensors (`split.tensors.count`) the model has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from phalanx.errors import ModelNotFound, WeightsError
from phalanx.model.gguf.gguf_header import DAMAGED, GgufHeader, parse_header, shown
from phalanx.text.model_files import open_file

ONE_MODEL = "Download all files of the model again, from one place."


class OpenModel(NamedTuple):
    """The open files of a model, and their joined header."""

    header: GgufHeader
    streams: Sequence[BinaryIO]


@contextmanager
def open_model(files: Sequence[Path], sizes: Sequence[int] = ()) -> Iterator[OpenModel]:
    """Open the files of a model, and close them when the context is left.

    Args:
        sizes: of the files when they are whole; without them, those that they have.

    Raises:
        ModelNotFound: one of the files is missing.
        WeightsError: one is damaged, or they do not belong together.
        ModelUnsupported: one has another version of the format.
        OSError: one cannot be read.
    """
    with ExitStack() as opened:
        streams = []
        for file in files:
            if not file.exists() and len(files) > 1:
                raise ModelNotFound(
                    f"{file} is missing: the model has {len(files)} files.", remedy="Put all of them into one folder."
                )
            streams.append(opened.enter_context(open_file(file, WeightsError)))
        sizes = sizes or [os.fstat(stream.fileno()).st_size for stream in streams]
        headers = [
            parse_header(str(file), size, stream.read) for file, size, stream in zip(files, sizes, streams, strict=True)
        ]
        yield OpenModel(_joined(files, headers), streams)


def _joined(files: Sequence[Path], headers: Sequence[GgufHeader]) -> GgufHeader:
    if len(files) == 1:
        _check_alone(files[0], headers[0].metadata)
    else:
        tensors = sum(len(header.tensors) for header in headers)
        for part, (file, header) in enumerate(zip(files, headers, strict=True)):
            _check_part(file, header.metadata, part, {"split.count": len(files), "split.no": part})
        for part, (file, header) in enumerate(zip(files, headers, strict=True)):
            _check_part(file, header.metadata, part, {"split.tensors.count": tensors})
    joined = []
    parts: dict[str, int] = {}
    for part, header in enumerate(headers):
        for tensor in header.tensors:
            if parts.setdefault(tensor.name, part) != part:
                both = f"{files[parts[tensor.name]]} and {files[part].name}"
                raise WeightsError(f"{both} both have tensor {shown(tensor.name)}.", remedy=ONE_MODEL)
            joined.append(tensor._replace(part=part))
    return GgufHeader(headers[0].metadata, tuple(joined))


def _check_alone(file: Path, metadata: Mapping[str, Any]) -> None:
    count = _number(file, metadata, "split.count", 1)
    if count > 1:
        number = _number(file, metadata, "split.no", 0) + 1
        raise WeightsError(
            f"{file} is one of {count} files of a model, but is not named as such.",
            remedy=f"Name it NAME-{number:05}-of-{count:05}.gguf, and the others beside it with their numbers.",
        )


def _check_part(file: Path, metadata: Mapping[str, Any], part: int, wanted: Mapping[str, int]) -> None:
    for key, value in wanted.items():
        if (found := _number(file, metadata, key, -1)) != value:
            said = "is missing" if key not in metadata else f"is {found}"
            raise WeightsError(f"{file} is not file {part + 1} of these: {key} {said}, not {value}.", remedy=ONE_MODEL)


def _number(file: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    found = metadata.get(key, default)
    if type(found) is not int:
        raise WeightsError(f"{file} is damaged: {key} is {shown(str(found)[:64])}.", remedy=DAMAGED)
    return found
