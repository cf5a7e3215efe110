"""Directories of models imported from files of other programs, each named by a hash of its content.

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

ORIGIN = "imported.json"
"""In an imported model's directory, also where it was copied to another host."""
FILES = ".files.json"
"""Beside it: the files on this host that the model was made from."""
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
    """The source of an imported model, and the cost of the import."""

    sha256: str  # of the file; of several, that of their digests
    hub: str = ""  # repository:quantisation
    requantised: Mapping[str, float] = {}  # tensor -> its largest error


def files_of_model(file: Path) -> list[Path]:
    """The files of a model, by one of them: more than one if its name says so."""
    return [file.with_name(name) for name in part_names(file.name)]


def states_of(files: Sequence[Path]) -> tuple[FileState, ...]:
    """Files as they are now.

    Raises:
        OSError: one is not there.
    """
    states = ((_text(file), file.stat()) for file in files)
    return tuple(FileState(path, state.st_size, state.st_ctime_ns) for path, state in states)


def _text(path: Path) -> str:
    """A file's whole path, which may have bytes that are not UTF-8."""
    return str(path.resolve()).encode(errors="backslashreplace").decode()


def recorded_files(directory: Path) -> tuple[FileState, ...]:
    """The files that a model was made from, as they were; none if it came from the hub or another host."""
    try:
        return msgspec.json.decode((directory / FILES).read_bytes(), type=tuple[FileState, ...])
    except (OSError, ValueError):
        return ()


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
    """The source of a model; None if it was just removed, or was not imported."""
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
    return next((directory for directory, _ in imported_models() if recorded_files(directory) == now), None)


def without_file(file: Path) -> str:
    """The remedy for a missing GGUF file, which may have been deleted after its import."""
    path = _text(file)
    names = (folder.name for folder, _ in imported_models() if path in [at.file for at in recorded_files(folder)])
    return f"It was imported as {name}: use this name." if (name := next(names, "")) else "Check the path."


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


def begun_import(name: str) -> Path | None:
    """The folder of an unfinished import, by the name that goes on with it."""
    path = _text(Path(name).expanduser())
    for folder, origin in imported_models(begun=True):
        if name == origin.hub or path in [at.file for at in recorded_files(folder)]:
            return folder
    return None


def source_of(directory: Path) -> str:
    """By what name a model was imported: that of a file, or of the hub's; "" if it was copied from another host."""
    files, origin = recorded_files(directory), origin_of(directory)
    return files[0].file if files else origin.hub if origin else ""


def directory_for(stem: str, sha256: str) -> Path:
    """The directory of a model that is to be imported."""
    words = re.sub(r"[^\w.-]", "_", stem).lstrip(".-").encode()[:NAME_BYTES].decode(errors="ignore") or "model"
    return imports_folder() / f"{words}-{sha256[:NAME_DIGITS]}"


def begun_directory(directory: Path) -> Path:
    """The folder of a directory's import until it is finished."""
    return directory.with_name(f"{BEGUN}{directory.name}")


def record(directory: Path, origin: Origin, files: Sequence[FileState]) -> None:
    """Write what a model is made from.

    Raises:
        OSError: the directory cannot be written.
    """
    for name, content in ((FILES, files), (ORIGIN, origin)):
        written = directory / f".{name}.new"
        written.write_bytes(msgspec.json.encode(content))
        written.replace(directory / name)
