"""Model files on their way into this host: what is here, taking in what is not, checking what came (L2, model push).

A file grows as NAME.part and gets its name when its checksum is right, so an interrupted transfer goes on where it
ended and a half file is never taken for a whole one. Does not know where files come from.
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


class Parcel(Struct, frozen=True, kw_only=True):
    """A file of a model."""

    path: str  # relative to the model's directory, with /
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    """A model: where it belongs and what it consists of."""

    place: str  # absolute, or below the home directory, or `hub:OWNER/NAME@REVISION`
    parcels: list[Parcel]


class Missing(Struct, frozen=True, kw_only=True):
    """A file that is not whole here, and how many of its bytes are."""

    path: str
    have: int


class Inventory(Struct, frozen=True, kw_only=True):
    """What a host lacks of a manifest."""

    directory: str
    missing: list[Missing] = []
    free: int = 0  # bytes on that disk


class Taken(Struct, frozen=True, kw_only=True):
    """A file that is whole now."""

    path: str
    bytes: int  # that came this time


class Reader(Protocol):
    """A stream of bytes."""

    def read(self, count: int, /) -> bytes: ...


def manifest(
    path: Path, place: str, progress: Callable[[int], None] = lambda _: None, *, needed: bool = False
) -> Manifest:
    """Everything a directory holds, or only what serving reads of it. `progress` hears of bytes read."""
    parcels = [
        Parcel(path=file.relative_to(path).as_posix(), bytes=file.stat().st_size, sha256=digest(file, progress))
        for file in (needed_files(path) if needed else files_of(path))
        if not file.name.endswith(".part")
    ]
    if not parcels:
        raise ClusterError(f"{path} has no files" + (" that serving reads." if needed else "."))
    return Manifest(place=place, parcels=parcels)


def digest(file: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of a file, in hexadecimal."""
    state = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            state.update(block)
            progress(len(block))
    return state.hexdigest()


def directory_of(place: str) -> Path:
    """Where a model belongs on this host.

    Raises:
        ConfigError: the place is not one.
    """
    if place.startswith("hub:"):
        name, at, revision = place.removeprefix("hub:").partition("@")
        if name.count("/") != 1 or not at or not revision.isalnum():
            raise ConfigError(f"{place!r} is not hub:OWNER/NAME@REVISION.")
        return hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    return Path.home() / place  # an absolute place stays one


def inventory(wanted: Manifest) -> Inventory:
    """What is missing here, by size and checksum."""
    directory = directory_of(wanted.place)
    missing = []
    for parcel in wanted.parcels:
        file = _inside(directory, parcel.path)
        if file.is_file() and file.stat().st_size == parcel.bytes and digest(file) == parcel.sha256:
            continue
        part = _part(file)
        have = part.stat().st_size if part.is_file() else 0
        missing.append(Missing(path=parcel.path, have=have if have <= parcel.bytes else 0))
    standing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    return Inventory(directory=str(directory), missing=missing, free=shutil.disk_usage(standing).free)


def take(place: str, parcel: Parcel, have: int, stream: Reader) -> Taken:
    """Take in the rest of a file.

    Args:
        have: bytes that are here already.

    Raises:
        ClusterError: the stream ended early (what came stays), or the checksum is wrong (nothing stays).
    """
    directory = directory_of(place)
    file = _inside(directory, parcel.path)
    part = _part(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with part.open("r+b" if part.exists() else "w+b") as out:
        out.truncate(have)
        out.seek(have)
        left = parcel.bytes - have
        while left:
            block = stream.read(min(left, BLOCK))
            if not block:
                raise ClusterError(
                    f"{parcel.path} was interrupted after {parcel.bytes - left} of {parcel.bytes} bytes.",
                    remedy="Run the same command again: it goes on from there.",
                )
            _write(out, block)
            left -= len(block)
    if digest(part) != parcel.sha256:
        part.unlink()
        raise ClusterError(
            f"{parcel.path} arrived with a wrong checksum and was thrown away.",
            remedy="Run the same command again. If it comes again, the disk or the memory of a host is faulty.",
        )
    part.replace(file)
    return Taken(path=parcel.path, bytes=parcel.bytes - have)


def _write(out: BinaryIO, block: bytes) -> None:
    out.write(block)
    out.flush()


def finish(wanted: Manifest) -> Inventory:
    """All files are here: make a hub's snapshot the one that its name stands for; what is still missing."""
    directory = directory_of(wanted.place)
    if wanted.place.startswith("hub:"):
        refs = directory.parent.parent / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(directory.name)
    return inventory(wanted)


def _inside(directory: Path, path: str) -> Path:
    """A file of a manifest; never outside its directory."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or path.startswith("/"):
        raise ConfigError(f"{path!r} is not a file of a model.")
    return directory.joinpath(*parts)


def _part(file: Path) -> Path:
    return file.with_name(file.name + ".part")


def missing_shards(path: Path, names: Sequence[str]) -> list[str]:
    """Weight files that a model's index names and that are not among `names`."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    return sorted(set(json.loads(index.read_text())["weight_map"].values()) - set(names))
