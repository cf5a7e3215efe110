"""A host's side of `model push`: lists which files are missing, receives them, verifies them.

A file is received as NAME.part and renamed once its checksum is right, so an interrupted transfer continues where it
ended, and an incomplete file is never taken for a complete one. Writes below a
model's directory follow no link: another user may have put it there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO, Protocol

from msgspec import Meta, Struct

from phalanx.catalog.local_models import PART, repository_folder
from phalanx.cluster.library import files_of, needed_files
from phalanx.environment import hub_cache
from phalanx.errors import ClusterError, ConfigError, WeightsError
from phalanx.text.model_files import INDEX, MAX_INDEX, REPLACE, belongs_to, read_json

BLOCK = 1 << 20  # bytes


class ModelFile(Struct, frozen=True, kw_only=True):
    """A file of a model."""

    path: str  # relative to the model's directory, with /
    bytes: Annotated[int, Meta(ge=0)]
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True):
    """A model: its place on hosts, and its files."""

    place: str  # an absolute path, a path below the home directory, or `hub:OWNER/NAME@REVISION`
    files: list[ModelFile]


class MissingFile(Struct, frozen=True, kw_only=True):
    """A file that is not complete on this host."""

    path: str
    have: Annotated[int, Meta(ge=0)]  # bytes that were received already


class Inventory(Struct, frozen=True, kw_only=True):
    """The files of a manifest that a host lacks."""

    directory: str  # of the model
    missing: list[MissingFile] = []
    free: int = 0  # bytes on the directory's disk


class ReceivedFile(Struct, frozen=True, kw_only=True):
    """A file that is complete now."""

    path: str
    bytes: int  # received this time


class ByteSource(Protocol):
    """A stream of bytes, such as stdin."""

    def read(self, count: int, /) -> bytes: ...


def manifest(
    path: Path, place: str, progress: Callable[[int], None] = lambda _: None, *, needed: bool = False
) -> Manifest:
    """The manifest of a directory: all its files, or (`needed`) only those that serving reads.

    Args:
        progress: called with the number of bytes read since the last call.

    Raises:
        ClusterError: there are no files, one cannot be read, or one is a link that leads out of the model.
    """
    files = [
        ModelFile(
            path=file.relative_to(path).as_posix(),
            bytes=file.stat().st_size,
            sha256=_digest_of_own(file, path, progress),
        )
        for file in (needed_files(path) if needed else files_of(path))
        if not file.name.endswith(PART)
    ]
    if not files:
        raise ClusterError(f"{path} has no files" + (" that serving reads." if needed else "."))
    return Manifest(place=place, files=files)


def _digest_of_own(file: Path, model: Path, progress: Callable[[int], None]) -> str:
    """The digest of a model's file, which a link may not fetch from elsewhere. The hub's links lead to `blobs`.

    Raises:
        ClusterError: names the file.
    """
    target = file.resolve()
    if not belongs_to(target, model):
        raise ClusterError(
            f"{file} is a link that leads out of the model, to {target}.", remedy="Put the file itself in its place."
        )
    try:
        with file.open("rb") as stream:
            return digest(stream, progress)
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror}.") from error


def digest(stream: BinaryIO, progress: Callable[[int], None] = lambda _: None) -> str:
    """SHA-256 of the rest of a stream, in hexadecimal."""
    state = hashlib.sha256()
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
        return hub_cache() / _one_name(repository_folder(name).name) / "snapshots" / revision
    for part in PurePosixPath(place).parts:
        if part != "/":
            _one_name(part)
    return Path.home() / place  # an absolute path stays as it is


def _one_name(part: str) -> str:
    """A part of a path.

    Raises:
        ConfigError: it leads elsewhere, or could not be shown.
    """
    if part in ("", ".", "..") or "/" in part or not part.isprintable():
        raise ConfigError(f"{part!r} is not a name of a file or folder.")
    return part


def inventory(wanted: Manifest) -> Inventory:
    """The files that are missing here or differ, by size and checksum."""
    directory = directory_of(wanted.place)
    missing = []
    for entry in wanted.files:
        file = directory.joinpath(*_parts(entry.path))
        if _is_complete(file, entry):
            continue
        have = _own_size(_part(file))
        missing.append(MissingFile(path=entry.path, have=have if have <= entry.bytes else 0))
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    return Inventory(directory=str(directory), missing=missing, free=shutil.disk_usage(existing).free)


def _is_complete(file: Path, entry: ModelFile) -> bool:
    """Whether a file is the one of the manifest. Links are followed: the hub's files are links."""
    try:
        if not file.is_file() or file.stat().st_size != entry.bytes:
            return False
        with file.open("rb") as stream:
            return digest(stream) == entry.sha256
    except OSError:
        return False


def _own_size(part: Path) -> int:
    """Bytes received so far; 0 unless it is an ordinary file without other links."""
    with contextlib.suppress(OSError):
        found = part.lstat()
        return found.st_size if _is_own(found) else 0
    return 0


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def take(place: str, entry: ModelFile, have: int, stream: ByteSource) -> ReceivedFile:
    """Receive the rest of a file.

    Args:
        have: bytes that were received already.

    Raises:
        ConfigError: no file of a model has this name.
        ClusterError: the stream ended early (received bytes are kept), the checksum is wrong or the disk is full (they
            are deleted), or a link is in the way.
    """
    directory, (*folders, name) = directory_of(place), _parts(entry.path)
    if not 0 <= have <= entry.bytes:
        raise ConfigError(f"{entry.path}: {have} bytes were received already, of {entry.bytes}.")
    with _errors_name_file(directory / entry.path), _folder(directory, folders) as folder:
        part = f"{name}{PART}"
        with _open_part(part, folder) as out:
            out.truncate(have)
            out.seek(have)
            _receive(out, entry, have, stream, part, folder)
            out.seek(0)
            if digest(out) != entry.sha256:
                os.unlink(part, dir_fd=folder)
                raise ClusterError(
                    f"{entry.path} arrived with a wrong checksum and was thrown away.",
                    remedy="Run the same command again. If it comes again, the disk or the memory of a host is faulty.",
                )
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)  # a link of this name is replaced, not followed
    return ReceivedFile(path=entry.path, bytes=entry.bytes - have)


def _receive(out: BinaryIO, entry: ModelFile, have: int, stream: ByteSource, part: str, folder: int) -> None:
    """Write the rest of a stream, `entry.bytes` at most in all."""
    left = entry.bytes - have
    while left:
        block = stream.read(min(left, BLOCK))
        if not block:
            raise ClusterError(
                f"{entry.path} was interrupted after {entry.bytes - left} of {entry.bytes} bytes.",
                remedy="Run the same command again: it goes on from there.",
            )
        try:
            rest = memoryview(block)
            while rest:
                rest = rest[out.write(rest) :]
        except OSError as error:
            os.unlink(part, dir_fd=folder)
            raise ClusterError(
                f"{socket.gethostname()} cannot store {entry.path}: {error.strerror} after {entry.bytes - left} of "
                f"{entry.bytes} bytes, which were deleted again.",
                remedy="Make room on its disk, then run the same command again.",
            ) from error
        left -= len(block)


@contextlib.contextmanager
def _folder(directory: Path, names: Sequence[str]) -> Iterator[int]:
    """A descriptor of a folder below a model's directory; folders that are missing are made, links not followed."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _open_part(name: str, folder: int) -> BinaryIO:
    """Open a partly received file, or a new one, without a buffer: an error of `write` is of its own bytes.

    A link of this name is removed; its target stays as it is.
    """
    with contextlib.suppress(FileNotFoundError):
        if not _is_own(os.stat(name, dir_fd=folder, follow_symlinks=False)):
            os.unlink(name, dir_fd=folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "r+b", buffering=0)


@contextlib.contextmanager
def _errors_name_file(file: Path) -> Iterator[None]:
    """Turn errors of the system into `ClusterError`, which names host and file."""
    try:
        yield
    except OSError as error:
        link = error.errno in (errno.ELOOP, errno.ENOTDIR)
        raise ClusterError(
            f"{socket.gethostname()} cannot write {file}: {error.strerror}"
            + (f" ({error.filename})." if error.filename else "."),
            remedy="Links inside a model's directory are not followed there: remove the link."
            if link
            else "Look at that folder's owner, its permissions and the space on its disk.",
        ) from error


def finish(wanted: Manifest) -> Inventory:
    """End a transfer: make a hub snapshot the current one of its repository. Returns what is still missing."""
    directory = directory_of(wanted.place)
    if wanted.place.startswith("hub:"):
        repository = directory.parent.parent
        with _errors_name_file(repository / "refs" / "main"), _folder(repository, ["refs"]) as refs:
            with _open_part(f"main{PART}", refs) as out:
                out.truncate(0)
                out.write(directory.name.encode())
            os.rename(f"main{PART}", "main", src_dir_fd=refs, dst_dir_fd=refs)
    return inventory(wanted)


def _parts(path: str) -> tuple[str, ...]:
    """The parts of the path of a manifest's file.

    Raises:
        ConfigError: it would be outside the model's directory, hidden, or one that is received at the moment.
    """
    parts = tuple(path.split("/"))
    if any(part.startswith(".") or not part or not part.isprintable() for part in parts) or path.endswith(PART):
        raise ConfigError(f"{path!r} is not a file of a model.")
    return parts


def _part(file: Path) -> Path:
    return file.with_name(file.name + PART)


def missing_shards(path: Path, names: Sequence[str]) -> list[str]:
    """The weight files in a model's index that are not among `names`.

    Raises:
        ModelError: the index cannot be read; names it.
    """
    index = path / INDEX
    if not index.is_file():
        return []
    files = read_json(index, MAX_INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise WeightsError(f"{index} is damaged: it has no weight_map of names.", remedy=REPLACE)
    return sorted(set(files.values()) - set(names))
