"""Reads the small files of a model's directory, which a stranger may have written.

A file must be a regular file of a plausible size in the directory; its JSON must be one object of finite numbers, not
nested too deeply. Errors name the file and the field.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import ModelError, ModelUnsupported

MIB = 1 << 20
MAX_CONFIG = 8 * MIB  # bytes of a file of settings; the largest known, with a quantisation per layer, have 2 MB
MAX_TOKENIZER = 128 * MIB  # bytes of tokenizer.json; vocabularies of 262,144 tokens take 33 MB
MAX_INDEX = 64 * MIB  # bytes of an index of weights; of the largest known models 9 MB
INDEX = "model.safetensors.index.json"
MAX_DEPTH = 32  # levels of nesting; the largest known have 8
NO_LIMIT = frozenset({"time_step_limit"})
"""Fields in which Mamba models write a bare `Infinity` for no limit."""

KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip
SETTINGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json", "hf_quant_config.json",
)  # fmt: skip
"""Files of settings that phalanx or its libraries read, if a model has them."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")
ARGUMENTS = frozenset({"tokenizer_config.json", "special_tokens_map.json"})
"""Settings that transformers passes to a tokenizer's class, which opens a vocabulary that is given as a path."""
NEVER_OPENED = frozenset({"tokenizer_file", "special_tokens_map_file", "chat_template", "added_tokens_decoder"})
"""Those of them that are not checked: the first two often have a path on the author's machine, and transformers takes
the model's own files."""
REPLACE = "Download or copy the model again."
PERMIT = "Give this user the right to read it (`chmod`), and to enter the directories above it."
LFS = b"version https://git-lfs"
"""Begins the small files that stand for large ones in a clone without Git LFS."""


def check_directory(path: Path) -> None:
    """Check that everything in a model's directory that a library may open is a regular file of the directory.

    Otherwise a link in a downloaded archive could make a secret of this machine a chat template, and a pipe could block
    a start for ever. Links into the blobs of the hub's cache are allowed.

    Raises:
        ModelUnsupported: names the file and its kind.
    """
    root = path.resolve()
    for folder in (root, root / "additional_chat_templates"):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not entry.name.startswith("."):
                _check_entry(entry, root)


def belongs_to(target: Path, model: Path) -> bool:
    """Whether a file lies in a model's directory or, for a snapshot of the hub's cache, among the cache's blobs.

    Args:
        target: without links, as `Path.resolve` returns it.
    """
    root = model.resolve()
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    return any(target.is_relative_to(home) for home in homes)


def _check_entry(entry: Path, root: Path) -> None:
    try:
        mode = entry.stat().st_mode
        target = entry.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise ModelUnsupported(f"{entry} cannot be read: {reason}.", remedy=REPLACE) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelUnsupported(f"{entry} is {_kind(mode)}, not a file.", remedy=REPLACE)
    if not belongs_to(target, root):
        raise ModelUnsupported(
            f"{entry} is a link that leads out of the model's directory, to {target}.",
            remedy="If you made it, put the file itself there; else do not use this model.",
        )


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def check_settings(path: Path) -> None:
    """Check a model's files of settings, and those of its vocabulary, before a library reads them.

    Raises:
        ModelUnsupported: a file of settings is not a readable JSON object; names it and the field. Or one of the others
            is not a file, or is too large.
    """
    for name in SETTINGS:
        with contextlib.suppress(FileNotFoundError):
            settings = read_json(path / name)
            if name in ARGUMENTS:
                _check_arguments(path / name, settings)
    with contextlib.suppress(FileNotFoundError):
        read_text(path / "chat_template.jinja")
    for name in VOCABULARIES:
        with contextlib.suppress(FileNotFoundError):
            read_file(path / name, MAX_TOKENIZER)


def _check_arguments(file: Path, settings: dict[str, Any]) -> None:
    """Refuse a path to a file: its lines could become tokens, which every client may read."""
    for name, value in settings.items():
        if name in NEVER_OPENED or name.endswith(("_token", "_tokens")):
            continue
        values = value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
        for part in values:
            if isinstance(part, str) and _is_file(part):
                raise ModelUnsupported(
                    f"{file}: {name} names {part!r}, a file of this machine.",
                    remedy="Remove the field, or do not use this model.",
                )


def _is_file(name: str) -> bool:
    try:
        return Path(name).exists() and not Path(name).is_dir()
    except OSError:  # too long for a path
        return False


def open_file(file: Path, error: type[ModelError] = ModelUnsupported) -> BinaryIO:
    """Open a regular file. Anything else, such as a pipe, is refused without waiting for it.

    Raises:
        FileNotFoundError: there is no such file, or no such directory.
        ModelError: of class `error`: the file is of another kind, or cannot be read.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise FileNotFoundError(*problem.args) from problem
    except OSError as problem:
        remedy = PERMIT if isinstance(problem, PermissionError) else REPLACE
        raise error(f"{file} cannot be read: {problem.strerror}.", remedy=remedy) from problem
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise error(f"{file} is {_kind(mode)}, not a file.", remedy=REPLACE)
    return os.fdopen(descriptor, "rb")


def read_file(file: Path, limit: int, error: type[ModelError] = ModelUnsupported) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError, ModelError: as `open_file`, or it is too large.
    """
    with open_file(file, error) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = b"" if size > limit else stream.read(limit + 1)
    if size > limit or len(data) > limit:
        raise error(f"{file} has {size} bytes; {limit} is the most for it.", remedy=REPLACE)
    if data.startswith(LFS):
        raise pointer(file, error)
    return data


def pointer(file: Path, error: type[ModelError] = ModelUnsupported) -> ModelError:
    """The error of a file that is a pointer of Git LFS."""
    return error(
        f"{file} is a pointer of Git LFS, not the file itself.",
        remedy=f"Run `git lfs install`, then `git lfs pull` in {file.parent}; or download the model again.",
    )


def read_text(file: Path, limit: int = MAX_CONFIG) -> str:
    """The content of a file as UTF-8.

    Raises:
        FileNotFoundError, ModelUnsupported: as `read_file`, or it is not UTF-8.
    """
    try:
        return read_file(file, limit).decode()
    except UnicodeDecodeError as problem:
        raise ModelUnsupported(f"{file} is not UTF-8: {problem}.", remedy=REPLACE) from problem


def read_json(file: Path, limit: int = MAX_CONFIG) -> dict[str, Any]:
    """The object in a JSON file. Python's dialect, as the libraries read it: but numbers are finite.

    Raises:
        FileNotFoundError, ModelUnsupported: as `read_text`, or it is not a JSON object, is nested too deeply, or has a
            number that is not finite; names the field.
    """
    text = read_text(file, limit)
    if not text.strip():
        raise ModelUnsupported(f"{file} is empty.", remedy=REPLACE)
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as problem:
        raise ModelUnsupported(f"{file} is not JSON: {problem}", remedy=REPLACE) from problem
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{file} is not a JSON object, but a {type(value).__name__}.", remedy=REPLACE)
    _check_values(file, value)
    return value


def _check_values(file: Path, value: dict[str, Any]) -> None:
    """Check depth and numbers, level by level."""
    level: list[tuple[str, Any]] = [("", value)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, item in level:
            if isinstance(item, dict):
                below += item.items()
            elif isinstance(item, list):
                below += ((name, part) for part in item)
            elif isinstance(item, float) and not math.isfinite(item) and (name not in NO_LIMIT or item != math.inf):
                raise ModelUnsupported(f"{file}: {name} is {item}, not a finite number.", remedy=REPLACE)
        level = below
    if level:
        raise _too_deep(file)


def _too_deep(file: Path) -> ModelUnsupported:
    return ModelUnsupported(f"{file} is nested more than {MAX_DEPTH} levels deep.", remedy=REPLACE)
