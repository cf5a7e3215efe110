"""Imports each GGUF model once, by its content and by one process at a time; an interrupted import can continue.

An unfinished import lies in a folder of its own (`catalog/imports.py`), which becomes the model's directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from phalanx.catalog.gguf_names import stem_of
from phalanx.catalog.imports import (
    FileState,
    Origin,
    begun_directory,
    directory_for,
    files_of_model,
    imported_content,
    imported_file,
    imported_models,
    imports_folder,
    origin_of,
    record,
    recorded_files,
    states_of,
)
from phalanx.catalog.local_models import LocalModel, describe_model
from phalanx.catalog.pull_progress import PullProgress, Report, quiet
from phalanx.errors import ModelError, ModelUnsupported, WeightsError
from phalanx.model.gguf.gguf_import import CHUNK, WEIGHTS, convert, describe, shown_bytes
from phalanx.model.gguf.gguf_parts import open_model
from phalanx.text.model_files import open_file

SOURCE = "source"
"""In the folder of an unfinished import: the files that were downloaded for it."""


def import_gguf(file: Path, report: Report = quiet) -> Path:
    """The directory of the model in a file, which is imported unless it has been before.

    Args:
        file: or one of the several files of a model.

    Raises:
        ModelError: a file is missing, is damaged, is not taken over, or the disk is too small; says why.
    """
    with explained(str(file)):
        if (known := imported_file(file)) is not None:
            return known
        files = files_of_model(file)
        check_files(files)
        states = states_of(files)
        sha256 = ""
        for folder, made in imported_models(begun=True):
            if (recorded := recorded_files(folder)) == states:
                sha256 = made.sha256
            elif [at.file for at in recorded] == [at.file for at in states]:  # their content is gone: nothing goes on
                shutil.rmtree(folder, ignore_errors=True)
        sha256 = sha256 or content_of([_sha256(file, report) for file in files])

        def build(folder: Path) -> Mapping[str, float]:
            errors = convert(file, folder, report)
            if states_of(files) != states:
                raise WeightsError(f"{file} changed while it was imported.", remedy="Import it again.")
            return errors

        return import_once(stem_of(file.name), Origin(sha256=sha256), states, build, report)


def import_once(
    stem: str,
    origin: Origin,
    files: tuple[FileState, ...],
    build: Callable[[Path], Mapping[str, float]],
    report: Report = quiet,
) -> Path:
    """The directory of a model, which is built unless there is one of the same content.

    Args:
        stem: begins the directory's name.
        files: of this host, which `build` reads; none if it downloads them.
        build: makes the model in a folder, which may have what an earlier call made of the same files; returns the
            errors of tensors that were quantised again.

    Raises:
        ModelError: of `build`. The unfinished import stays if another call can finish it.
        OSError: something cannot be read or written; the same holds.
    """
    directory = directory_for(stem, origin.sha256)
    if (same := imported_content(origin.sha256)) is not None:
        return _remembered(same, origin, files)
    with _alone(directory.name, report):
        if (same := imported_content(origin.sha256)) is not None:
            return _remembered(same, origin, files)
        folder = begun_directory(directory)
        if origin_of(folder) != origin or recorded_files(folder) != files:  # the file has changed meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        record(folder, origin, files)
        try:
            errors = build(folder)
        except (ModelError, OSError) as error:
            is_begun = (folder / WEIGHTS).exists() or (folder / SOURCE).exists()
            if isinstance(error, (WeightsError, ModelUnsupported)) or not is_begun:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder / SOURCE, ignore_errors=True)
        record(folder, replace(origin, requantised=errors), files)
        shutil.rmtree(directory, ignore_errors=True)  # without a record that can be read
        folder.rename(directory)
    return directory


def check_files(files: Sequence[Path], sizes: Sequence[int] = ()) -> int:
    """Check that a model can be imported. Returns the bytes that its weights will have.

    Args:
        sizes: of the whole files, if these are only their beginnings.

    Raises:
        ModelError: a file is missing or damaged, or the model is not taken over.
        OSError: a file cannot be read.
    """
    with open_model(files, sizes) as model, tempfile.TemporaryDirectory() as scratch:
        return describe(model, files[0], Path(scratch)).nbytes


def preview(file: Path) -> LocalModel:
    """The model that an import of the file would make.

    Raises:
        ModelError: it cannot be imported; says why.
    """
    files = files_of_model(file)
    with explained(str(file)), open_model(files) as model, tempfile.TemporaryDirectory() as scratch:
        size = describe(model, file, Path(scratch)).nbytes
        return replace(describe_model(str(file), Path(scratch), ""), path=file, bytes=size, lacks="")


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn system errors into errors that name the model."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ModelError(
            f"{name} could not be imported: {where}{error.strerror or error}.",
            remedy="Check the file and the room on the disk, or set XDG_CACHE_HOME to another directory; then import "
            "it again. The import continues where it stopped.",
        ) from error


def content_of(sha256: Sequence[str]) -> str:
    """The digest of a model's content, from the digests of its files."""
    return sha256[0] if len(sha256) == 1 else hashlib.sha256("".join(sha256).encode()).hexdigest()


def _sha256(file: Path, report: Report) -> str:
    digest = hashlib.sha256()
    with open_file(file, WeightsError) as stream:
        done = shown_bytes(report, f"reading {file.name}", file, os.fstat(stream.fileno()).st_size)
        while data := stream.read(CHUNK):
            digest.update(data)
            done(len(data))
    return digest.hexdigest()


@contextlib.contextmanager
def _alone(name: str, report: Report) -> Iterator[None]:
    """Wait until no other process of this machine imports the same model."""
    locks = imports_folder() / ".locks"
    imports_folder().parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # as `own_cache` wants it
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(PullProgress("waiting for another import of this model"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remembered(directory: Path, origin: Origin, files: tuple[FileState, ...]) -> Path:
    """A model that is found by these files or this name of the hub from now on, without reading it again."""
    known, known_files = origin_of(directory) or origin, recorded_files(directory)
    now, now_files = replace(known, hub=origin.hub or known.hub), files or known_files
    if (now, now_files) != (known, known_files):  # the ranks of a server come here at the same time, with nothing new
        with contextlib.suppress(OSError):  # the folder may be read-only
            record(directory, now, now_files)
    return directory
