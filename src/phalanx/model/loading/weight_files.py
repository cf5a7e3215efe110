"""Chooses the files with a model's weights; for a directory without them, the error says what it holds instead.

Downloads, conversions and merges leave directories with an index of another split, shards of an unfinished download,
and files that belong to something else. Where there is an index, it decides. Reads no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.errors import WeightsError
from phalanx.text.model_files import INDEX, MAX_INDEX, read_file

PATTERN = "model*.safetensors"
"""Files that mlx-lm loads."""
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(.*)")
UNFINISHED = ("*.incomplete", ".cache/huggingface/download/*.incomplete", "*.part", "*.crdownload", "*.aria2")
"""Files that the hub's client, browsers and download managers leave behind after an interrupted download."""
REDOWNLOAD = "Download or copy the file again."
RESUME = "The download is not complete: start it again."


def weight_files(path: Path) -> tuple[list[Path], str]:
    """The files of a model's directory that hold its weights, sorted by name; at least one. And a warning, if any.

    Raises:
        WeightsError: there are none, some are missing, or the index is damaged.
    """
    present = {file.name: file for file in path.glob(PATTERN)}
    named, warning = _names_of_index(path / INDEX), ""
    if named and present and not named & present.keys():
        warning = f"{path / INDEX} names none of the files that are there; loading {some(sorted(present))} instead"
        named = set()
    if not present and not named:
        what, remedy = describe(path, PATTERN)
        raise WeightsError(what, remedy=remedy)
    _check_complete(path, named or set(_shards(present)), present)
    if named and (others := sorted(present.keys() - named)):
        warning = f"not loading {some(others)} in {path}, since {INDEX} does not name them"
    return [present[name] for name in sorted(named or present)], warning


class _Index(Struct, frozen=True):
    """The fields of the index that phalanx reads."""

    weight_map: dict[str, str]


def _names_of_index(file: Path) -> set[str]:
    """The names of the files that hold the tensors; empty without an index."""
    try:
        return set(msgspec.json.decode(read_file(file, MAX_INDEX, WeightsError), type=_Index).weight_map.values())
    except FileNotFoundError:
        return set()
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} is damaged: {error}", remedy=REDOWNLOAD) from error


def _shards(present: Iterable[str]) -> Iterator[str]:
    """The names of all shards that the present ones imply: `model-00001-of-00002.safetensors` implies a second."""
    for name in present:
        if (found := SHARD.fullmatch(name)) is not None:
            start, number, total, end = found.groups()
            for i in range(1, min(int(total), 10**4) + 1):
                yield f"{start}-{i:0{len(number)}}-of-{total}{end}"


def _check_complete(path: Path, wanted: set[str], present: Iterable[str]) -> None:
    absent = sorted(wanted - set(present))
    if not absent:
        return
    unmatched = [name for name in absent if "/" not in name and (path / name).is_file()]
    if unmatched:
        raise WeightsError(
            f"{path}/{INDEX} names {some(unmatched)}; mlx-lm loads {PATTERN} only.",
            remedy="Convert the model with `mlx_lm.convert`.",
        )
    raise WeightsError(
        f"{path} lacks {len(absent)} of {len(wanted)} weight files: {some(absent)}.{_unfinished(path)}", remedy=RESUME
    )


def _unfinished(path: Path) -> str:
    found = sorted(file.name for pattern in UNFINISHED for file in path.glob(pattern))
    return f" There is an unfinished download: {some(found, 2)}." if found else ""


OTHERS = {
    "adapter_config.json": "It is an adapter (LoRA): fuse it with its base model (`mlx_lm.fuse`), and serve that.",
    "*.safetensors": "Convert the model with `mlx_lm.convert`, or download its files for Transformers.",
    "*.gguf": "Name the GGUF file itself: phalanx imports it.",
    "*.bin": "PyTorch's files are not read: download the model's safetensors.",
    "*.pt*": "PyTorch's files are not read: download the model's safetensors.",
    "*.npz": "That format is no longer read: download the model anew, or convert it with `mlx_lm.convert`.",
}
"""By the files that are there instead of a model's: the remedy. The first pattern with a file counts."""


def describe(path: Path, lacking: str) -> tuple[str, str]:
    """A sentence that says what a directory without some file of a model has instead, and the remedy.

    Args:
        lacking: the file or pattern.
    """
    if unfinished := _unfinished(path):
        return f"{path} has no {lacking}.{unfinished}", RESUME
    if lacking != PATTERN and any(path.glob(PATTERN)):
        return f"{path} has no {lacking}.", "Copy it from the place where the weights come from."
    for pattern, remedy in OTHERS.items():
        if found := sorted(file.name for file in path.glob(pattern)):
            return f"{path} has no {lacking}, only {some(found)}.", remedy
    if below := sorted(file.parent for file in path.glob("*/config.json")):
        return f"{path} has no {lacking}.", f"The model seems to be in {below[0]}: name that directory."
    return f"{path} has no {lacking}.", "Name the directory that holds config.json and the weights (*.safetensors)."


def some(names: Iterable[str], most: int = 8) -> str:
    """The first `most` names, for a message, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
