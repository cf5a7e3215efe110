"""Where models lie that were imported from files of other programs, each under a name made of its content.

`model/gguf/gguf_import.py` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.environment import cache_dir

ORIGIN = ".origin.json"
"""In an imported model's directory; hidden, as its content is another on each host."""
NAME_DIGITS = 12  # of the SHA-256, in a directory's name


class Origin(Struct, frozen=True):
    """The file that a model was imported from. Its size and time tell whether it has changed since."""

    file: str
    bytes: int
    mtime_ns: int
    sha256: str = ""


def origin_of(file: Path) -> Origin:
    """A file as it is now, without its digest."""
    state = file.stat()
    return Origin(str(file.resolve()), state.st_size, state.st_mtime_ns)


def imports_folder() -> Path:
    """The folder of all imported models."""
    return cache_dir() / "imported"


def imported_models() -> Iterator[tuple[Path, Origin]]:
    """Every imported model's directory, and its file."""
    folder = imports_folder()
    for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            if not directory.name.startswith("."):
                yield directory, msgspec.json.decode((directory / ORIGIN).read_bytes(), type=Origin)
        except (OSError, ValueError):
            continue  # removed at this moment, or not an import's


def imported_file(file: Path) -> Path | None:
    """The model that this file was imported as; None if it was not, or has changed."""
    now = origin_of(file)
    found = ((made.file, made.bytes, made.mtime_ns, directory) for directory, made in imported_models())
    return next((one[3] for one in found if one[:3] == (now.file, now.bytes, now.mtime_ns)), None)


def imported_content(sha256: str) -> Path | None:
    """The model whose file has this content."""
    return next((directory for directory, made in imported_models() if made.sha256 == sha256), None)


def imported_name(name: str) -> Path | None:
    """The imported model of a name of `phalanx list`."""
    directory = imports_folder() / name
    is_name = re.fullmatch(rf"[\w.-]+-[0-9a-f]{{{NAME_DIGITS}}}", name) is not None
    return directory if is_name and (directory / "config.json").is_file() else None


def directory_for(file: Path, sha256: str) -> Path:
    """The directory of a model that is to be imported."""
    stem = re.sub(r"[^\w.-]", "_", file.stem).lstrip(".")[:80] or "model"
    return imports_folder() / f"{stem}-{sha256[:NAME_DIGITS]}"
