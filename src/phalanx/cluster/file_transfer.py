"""A host's side of `model push`: lists which files are missing, receives them, verifies them (L2).

A file is received as NAME.part and renamed once its checksum is right, so an interrupted transfer continues where it
ended, and an incomplete file is never taken for a complete one. Does not know where files come from.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from msgspec import Struct

from phalanx.cluster.library import files_of, needed_files
from phalanx.config import hub_cache
from phalanx.errors import ClusterError, ConfigError

BLOCK = 1 << 20  # bytes


class ModelFile(Struct, frozen=True, kw_only=True):
    """A file of a model."""

    path: str  # relative to the model's directory, with /
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    """A model: its place on hosts, and its files."""

    place: str  # an absolute path, a path below the home directory, or `hub:OWNER/NAME@REVISION`
    files: list[ModelFile]


class MissingFile(Struct, frozen=True, kw_only=True):
    """A file that is not complete on this host."""

    path: str
    have: int  # bytes that were received already


class Inventory(Struct, frozen=True, kw_only=True):
    """The files of a manifest that a host lacks."""

    directory: str  # of the model
    missing: list[MissingFile] = []
    free: int = 0  # bytes on the directory's disk


class ReceivedFile(Struct, frozen=True, kw_only=True):
    """A file that is complete now."""

    path: str
    bytes: int  # received this time


class ByteStream(Protocol):
    """A stream of bytes, such as stdin."""

    def read(self, count: int, /) -> bytes: ...


def manifest(
    path: Path, place: str, progress: Callable[[int], None] = lambda _: None, *, needed: bool = False
) -> Manifest:
    """The manifest of a directory: all its files, or (`needed`) only those that serving reads.

    Args:
        progress: called with the number of bytes read since the last call.
    """
    files = [
        ModelFile(path=file.relative_to(path).as_posix(), bytes=file.stat().st_size, sha256=digest(file, progress))
        for file in (needed_files(path) if needed else files_of(path))
        if not file.name.endswith(".part")
    ]
    if not files:
        raise ClusterError(f"{path} has no files" + (" that serving reads." if needed else "."))
    return Manifest(place=place, files=files)


def digest(file: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, in hexadecimal."""
    state = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            state.update(block)
            progress(len(block))
    return state.hexdigest()


def directory_of(place: str) -> Path:
    """The directory of a model on this host.

    Raises:
        ConfigError: `place` is not of the form that `Manifest.place` describes.
    """
    if place.startswith("hub:"):
        name, at, revision = place.removeprefix("hub:").partition("@")
        if name.count("/") != 1 or not at or not revision.isalnum():
            raise ConfigError(f"{place!r} is not hub:OWNER/NAME@REVISION.")
        return hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    return Path.home() / place  # an absolute path stays as it is


def inventory(wanted: Manifest) -> Inventory:
    """The files that are missing here or differ, by size and checksum."""
    directory = directory_of(wanted.place)
    missing = []
    for entry in wanted.files:
        file = _inside(directory, entry.path)
        if file.is_file() and file.stat().st_size == entry.bytes and digest(file) == entry.sha256:
            continue
        part = _part(file)
        have = part.stat().st_size if part.is_file() else 0
        missing.append(MissingFile(path=entry.path, have=have if have <= entry.bytes else 0))
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    return Inventory(directory=str(directory), missing=missing, free=shutil.disk_usage(existing).free)


def take(place: str, entry: ModelFile, have: int, stream: ByteStream) -> ReceivedFile:
    """Receive the rest of a file.

    Args:
        have: bytes that were received already.

    Raises:
        ClusterError: the stream ended early (received bytes are kept), or the checksum is wrong (they are deleted).
    """
    directory = directory_of(place)
    file = _inside(directory, entry.path)
    part = _part(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with part.open("r+b" if part.exists() else "w+b") as out:
        out.truncate(have)
        out.seek(have)
        left = entry.bytes - have
        while left:
            block = stream.read(min(left, BLOCK))
            if not block:
                raise ClusterError(
                    f"{entry.path} was interrupted after {entry.bytes - left} of {entry.bytes} bytes.",
                    remedy="Run the same command again: it goes on from there.",
                )
            _write(out, block)
            left -= len(block)
    if digest(part) != entry.sha256:
        part.unlink()
        raise ClusterError(
            f"{entry.path} arrived with a wrong checksum and was thrown away.",
            remedy="Run the same command again. If it comes again, the disk or the memory of a host is faulty.",
        )
    part.replace(file)
    return ReceivedFile(path=entry.path, bytes=entry.bytes - have)


def _write(out: BinaryIO, block: bytes) -> None:
    out.write(block)
    out.flush()


def finish(wanted: Manifest) -> Inventory:
    """End a transfer: make a hub snapshot the current one of its repository. Returns what is still missing."""
    directory = directory_of(wanted.place)
    if wanted.place.startswith("hub:"):
        refs = directory.parent.parent / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(directory.name)
    return inventory(wanted)


def _inside(directory: Path, path: str) -> Path:
    """The path of a manifest's file.

    Raises:
        ConfigError: it would be outside the model's directory.
    """
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or path.startswith("/"):
        raise ConfigError(f"{path!r} is not a file of a model.")
    return directory.joinpath(*parts)


def _part(file: Path) -> Path:
    return file.with_name(file.name + ".part")


def missing_shards(path: Path, names: Sequence[str]) -> list[str]:
    """The weight files in a model's index that are not among `names`."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    return sorted(set(json.loads(index.read_text())["weight_map"].values()) - set(names))
