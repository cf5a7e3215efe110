"""Where models lie that were imported from files of other programs, each under a name made of its content.

A folder `.part-NAME` holds everything of an import that is not finished. `model/gguf/gguf_import.py` makes both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.catalog.gguf_names import DEFAULTS, part_names, split_quant
from phalanx.environment import cache_dir

ORIGIN = ".origin.json"
"""In an imported model's directory; hidden, as its content is another on each host."""
BEGUN = ".part-"
"""Begins the name of a folder whose import is not finished."""
NAME_DIGITS = 12  # of the SHA-256, in a directory's name
NAME_BYTES = 80  # of a file's name, in a directory's


class FileState(Struct, frozen=True):
    """A file as it was. Any change of its content changes `ctime_ns`, also where a copy keeps the time of another."""

    file: str
    bytes: int
    ctime_ns: int


class Origin(Struct, frozen=True, kw_only=True):
    """What a model was imported from."""

    sha256: str  # of the file; of several, that of their digests
    files: tuple[FileState, ...] = ()  # none if they were downloaded for the import
    hub: str = ""  # repository:quantisation
    requantised: Mapping[str, float] = {}  # tensor -> its largest error

    @property
    def name(self) -> str:
        """The name to import it by."""
        return self.hub or self.files[0].file


def files_of_model(file: Path) -> list[Path]:
    """The files of a model, by one of them: more than one if its name says so."""
    return [file.with_name(name) for name in part_names(file.name)]


def states_of(files: Sequence[Path]) -> tuple[FileState, ...]:
    """Files as they are now.

    Raises:
        OSError: one is not there.
    """
    states = ((file.resolve(), file.stat()) for file in files)
    return tuple(FileState(str(path), state.st_size, state.st_ctime_ns) for path, state in states)


def imports_folder() -> Path:
    """The folder of all imported models."""
    return cache_dir() / "imported"


def imported_models(*, begun: bool = False) -> Iterator[tuple[Path, Origin]]:
    """Every imported model's directory, or those of unfinished imports, and what each is made from."""
    folder = imports_folder()
    for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_wanted = directory.name.startswith(BEGUN if begun else ".") is begun
        if is_wanted and (origin := origin_of(directory)) is not None:
            yield directory, origin


def origin_of(directory: Path) -> Origin | None:
    """What a model is made from; None if it was removed at this moment, or is not an import's."""
    try:
        return msgspec.json.decode((directory / ORIGIN).read_bytes(), type=Origin)
    except (OSError, ValueError):
        return None


def imported_file(file: Path) -> Path | None:
    """The model that this file was imported as; None if it was not, or has changed."""
    try:
        now = states_of(files_of_model(file))
    except OSError:
        return None
    return next((directory for directory, made in imported_models() if made.files == now), None)


def imported_content(sha256: str) -> Path | None:
    """The model whose files have this content."""
    return next((directory for directory, made in imported_models() if made.sha256 == sha256), None)


def imported_name(name: str) -> Path | None:
    """The imported model in a directory of this name."""
    directory = imports_folder() / name
    is_name = re.fullmatch(rf"\w[\w.-]*-[0-9a-f]{{{NAME_DIGITS}}}", name) is not None
    return directory if is_name and (directory / "config.json").is_file() else None


def imported_from_hub(name: str) -> Path | None:
    """The model of a repository that was imported last: of the quantisation that is named, else of the default one,
    else of any."""
    repository, quant = split_quant(name.lower())
    found = []
    for directory, made in imported_models():
        of, label = split_quant(made.hub.lower())
        if of == repository and quant in ("", label):
            found.append((label == DEFAULTS[0].lower(), (directory / ORIGIN).stat().st_mtime_ns, directory))
    return max(found)[-1] if found else None


def begun_import(name: str) -> tuple[Path, Origin] | None:
    """An unfinished import, by the name that goes on with it."""
    path = str(Path(name).expanduser().resolve())
    every = imported_models(begun=True)
    return next((one for one in every if name == one[1].hub or path in [at.file for at in one[1].files]), None)


def directory_for(stem: str, sha256: str) -> Path:
    """The directory of a model that is to be imported."""
    words = re.sub(r"[^\w.-]", "_", stem).lstrip(".-").encode()[:NAME_BYTES].decode(errors="ignore") or "model"
    return imports_folder() / f"{words}-{sha256[:NAME_DIGITS]}"


def begun_directory(directory: Path) -> Path:
    """The folder of a directory's import until it is finished."""
    return directory.with_name(f"{BEGUN}{directory.name}")


def record(directory: Path, origin: Origin) -> None:
    """Write what a model is made from.

    Raises:
        OSError: the directory cannot be written.
    """
    written = directory / f"{ORIGIN}.new"
    written.write_bytes(msgspec.json.encode(origin))
    written.replace(directory / ORIGIN)
