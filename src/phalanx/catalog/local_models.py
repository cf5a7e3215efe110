"""The models on this machine's disk: found by name, described from their small files, removed. Loads no weights.

Models lie in the hub's cache, some in phalanx's own (`imports.py`), and one comes with phalanx. Directories are the
user's: they are described by their path, but neither listed nor removed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from phalanx.catalog.gguf_names import is_gguf_path, split_quant
from phalanx.catalog.imports import (
    begun_import,
    imported_file,
    imported_from_hub,
    imported_models,
    imported_name,
    imports_folder,
    origin_of,
    source_of,
    without_file,
)
from phalanx.catalog.packaged import PACKAGE
from phalanx.catalog.short_names import DEMO, PACKAGED, SHORT_NAMES, did_you_mean, repository_of, shortest
from phalanx.demo import MODEL_DIR
from phalanx.environment import cache_dir, hub_cache, memory_guard_override_gb
from phalanx.errors import ModelError, ModelNotFound
from phalanx.memory import guard_bytes, read_machine
from phalanx.text.model_files import INDEX, MAX_INDEX, read_file, read_json

NEEDED = (
    "model*.safetensors", "model*.safetensors.index.json", "*.json", "*.jsonl", "*.txt", "*.jinja", "*.py",
    "tokenizer.model", "tiktoken.model", "*.tiktoken",
)  # fmt: skip
"""The files in a model's directory that serving reads: those that mlx-lm downloads from a repository."""
HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
WORD = re.compile(r"[\w.+-]{1,64}")
MAX_CONTEXT = 1 << 31  # tokens; larger numbers are not a context's length
PART = ".part"
"""Suffix of a file that is not downloaded to its end."""


class LocalModel(Struct, frozen=True, kw_only=True):
    """A model on this disk, as its small files describe it."""

    name: str  # the shortest that means it
    repository: str = ""  # of the hub
    path: Path
    bytes: int  # of its weights
    family: str = ""
    bits: str = ""  # per weight, such as 4 or 16
    context: int = 0  # tokens; 0: config.json does not say
    used: float = 0.0  # when weights were last read, in seconds since 1970
    lacks: str = ""  # a file that is missing: the download or the import is incomplete

    @property
    def fits(self) -> bool:
        """Whether the weights fit into this machine's memory beside the guard, when no other program is running."""
        machine = read_machine()
        return self.bytes + guard_bytes(machine, memory_guard_override_gb()) <= machine.total


def packaged_directory() -> Path:
    """The directory of the model that comes from a package."""
    return cache_dir() / PACKAGE.replace("==", "-")


def repository_folder(repository: str) -> Path:
    """The folder of a repository in the hub's cache."""
    return hub_cache() / f"models--{repository.replace('/', '--')}"


def repository_in(folder: Path) -> str:
    """The repository of a folder in the hub's cache."""
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def cached_snapshot(repository: str, revision: str | None = None) -> Path | None:
    """The directory of a revision in the hub's cache; without one, of `main`, else of the newest.

    A cache that was copied by hand may lack `refs`, or have a line end there: the hub's client then finds nothing.
    """
    folder = repository_folder(repository)
    snapshots = folder / "snapshots"
    names = [revision or "main"]
    try:
        names.append((folder / "refs" / names[0]).read_text().strip())
    except (OSError, ValueError):
        pass
    for name in names:
        if name and (snapshots / name / "config.json").is_file():
            return snapshots / name
    if revision not in (None, "main") or not snapshots.is_dir():
        return None
    found = [path for path in snapshots.iterdir() if (path / "config.json").is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def path_of(name: str) -> Path:
    """A name as a path, whose `~` is the home directory.

    Raises:
        ModelNotFound: no file can have this path.
    """
    try:
        path = Path(name).expanduser()
        (path / "config.json").is_file()  # too long a name raises OSError
    except PermissionError as error:
        raise ModelNotFound(
            f"{name} cannot be read: {error.strerror}.",
            remedy="Give this user access to it and to the directories above it, or name another one.",
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(
            f"{name[:80]!r} is not a path: {getattr(error, 'strerror', None) or error}.",
            remedy="Give a directory, a hub id (owner/name), or a short name such as `smollm2`.",
        ) from error
    return path


class Meaning(Struct, frozen=True):
    """The meaning of a model's name: a directory or a file, or a repository of the hub."""

    kind: Literal["demo", "packaged", "directory", "file", "imported", "hub"]
    path: Path = Path()
    repository: str = ""


def meaning_of(name: str) -> Meaning:
    """The meaning of a name, also of a model that is not on this machine. An ambiguous name has the first meaning.

    Raises:
        ModelNotFound: of `path_of`.
    """
    if name == DEMO:
        return Meaning("demo", MODEL_DIR)
    if name == PACKAGED:
        return Meaning("packaged", packaged_directory())
    if name in SHORT_NAMES:
        return Meaning("hub", repository=SHORT_NAMES[name])
    path = path_of(name)
    if name and path.is_dir():
        return Meaning("directory", path)
    if name and path.exists():
        return Meaning("file", path)
    if (imported := imported_name(name)) is not None:
        return Meaning("imported", imported)
    return Meaning("hub", repository=repository_of(name))


def directory_of(name: str, revision: str | None = None) -> Path | None:
    """The directory of a model by its name; None if it is not on this machine.

    Raises:
        ModelNotFound: of `path_of`.
    """
    meant = meaning_of(name)
    if meant.kind == "file":
        return imported_file(meant.path)
    if meant.kind == "hub":
        cached = cached_snapshot(meant.repository, revision) if HUB_ID.fullmatch(meant.repository) else None
        return cached or imported_from_hub(meant.repository)
    return meant.path.absolute() if (meant.path / "config.json").is_file() else None


def own_name(name: str) -> str:
    """The name of the model that a GGUF file was imported as; other names are their own.

    Raises:
        ModelNotFound: of `path_of`.
    """
    meant = meaning_of(name)
    made = imported_file(meant.path) if meant.kind == "file" else None
    return name if made is None else made.name


def find(name: str) -> LocalModel:
    """The model of this name.

    Raises:
        ModelNotFound: it is not on this machine, or cannot be a name.
    """
    path, repository = directory_of(name), repository_of(name)
    if path is not None:
        in_cache = path.is_relative_to(hub_cache())
        if path.parent == imports_folder():
            return _imported(path)
        return describe_model(shortest(repository) if in_cache else name, path, repository if in_cache else "")
    if (part := begun_import(repository)) is not None:
        return _begun_import(part)
    if HUB_ID.fullmatch(repository) and (begun := _begun(repository)) is not None:
        return begun
    raise ModelNotFound(f"{name} is not on this machine.", remedy=_how_to_find(name))


def _how_to_find(name: str) -> str:
    """The remedy for a model that is not on this machine."""
    here = "`phalanx list` shows what is here."
    is_file = path_of(name).is_file()  # a GGUF file, to be imported
    if is_gguf_path(name) and not is_file:
        return f"{without_file(path_of(name))} {here}"
    if question := did_you_mean(name):
        return question + here
    is_hub_id = HUB_ID.fullmatch(split_quant(repository_of(name))[0]) is not None
    if not is_file and (name.startswith(("/", ".", "~")) or not is_hub_id):
        return f"Check the name; a directory of a model has a config.json. {here}"
    return f"Run `phalanx pull {name}`; {here}"


def local_models() -> Iterator[LocalModel]:
    """All models that phalanx finds by name; imported ones and those of the hub's cache in the order of their names."""
    yield find(DEMO)
    if directory_of(PACKAGED) is not None:
        yield find(PACKAGED)
    yield from (_imported(directory) for directory, _ in imported_models())
    yield from (_begun_import(folder) for folder, _ in imported_models(begun=True))
    cache = hub_cache()
    for folder in sorted(cache.glob("models--*")) if cache.is_dir() else ():
        repository = repository_in(folder)
        with suppress(ModelNotFound):  # it was removed just now, or its name is none of the hub's
            yield find(repository)


def downloaded_folder(name: str) -> Path:
    """The folder of everything that a pull of this name has written.

    Raises:
        ModelNotFound: the model is not on this machine.
        ModelError: it was not downloaded.
    """
    model = find(name)
    if name == PACKAGED:
        return packaged_directory()
    if model.path.parent == imports_folder():
        return model.path
    if model.repository:
        return repository_folder(model.repository)
    remedy = "It is a part of phalanx, and stays." if name == DEMO else "Delete the directory itself."
    raise ModelError(f"{name} was not downloaded: it lies in {model.path}.", remedy=remedy)


def remove(name: str) -> int:
    """Delete a model that was downloaded. Returns the bytes that this freed.

    Raises:
        ModelNotFound, ModelError: of `downloaded_folder`, or a file cannot be deleted.
    """
    folder = downloaded_folder(name)
    freed = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    doomed = folder.with_name(f".removed-{folder.name}")
    if folder.is_symlink():
        raise ModelError(
            f"{folder} is a link, to {folder.resolve()}.", remedy="Delete the link and the directory yourself."
        )
    try:
        shutil.rmtree(doomed, ignore_errors=True)  # of an earlier try
        folder.rename(doomed)  # at once: nothing half-deleted bears the name
        shutil.rmtree(doomed)
    except OSError as error:
        raise ModelError(f"{error.filename or folder} cannot be deleted: {error.strerror}.") from error
    return freed


def lacking(path: Path) -> str:
    """The first file that a model's directory lacks of those that its lists name; "" if it is whole.

    The lists are the hub's of a snapshot, where its client has kept it, and the index of the weights.
    """
    names: set[str] = set()
    if path.parent.name == "snapshots":
        tree = path.parent.parent / "trees" / f"{path.name}.json"
        names |= {name for name in _names(tree, "files") if _is_read(name)}
    names |= set(_names(path / INDEX, "weight_map", values=True))
    if not any(name.endswith(".safetensors") for name in names) and not any(path.glob("model*.safetensors")):
        names.add("model.safetensors")
    return next((name for name in sorted(names) if not (path / name).is_file()), "")


def _is_read(name: str) -> bool:
    """Whether every server reads this file: Python files are for those that trust them."""
    return "/" not in name and not name.endswith(".py") and any(fnmatchcase(name, pattern) for pattern in NEEDED)


def _names(file: Path, field: str, *, values: bool = False) -> list[str]:
    """Names in an object of a JSON file; none if it has no such object, or cannot be read."""
    try:
        found = json.loads(read_file(file, MAX_INDEX))[field]
        return [str(name) for name in (found.values() if values else found)]
    except (OSError, ModelError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _begun(repository: str) -> LocalModel | None:
    """A download that has begun, but has no config.json yet."""
    parts = sorted(repository_folder(repository).glob(f"blobs/*{PART}"))
    if not parts:
        return None
    size = sum(part.stat().st_size for part in parts)
    path = repository_folder(repository)
    return LocalModel(name=shortest(repository), repository=repository, path=path, bytes=size, lacks="config.json")


def _imported(path: Path) -> LocalModel:
    origin = origin_of(path)
    return describe_model(origin.hub if origin and origin.hub else path.name, path, "")


def _begun_import(path: Path) -> LocalModel:
    """An unfinished import: its downloaded files and the files made of them so far."""
    size = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    return LocalModel(name=source_of(path), path=path, bytes=size, lacks="model.safetensors")


def describe_model(name: str, path: Path, repository: str) -> LocalModel:
    """A model's directory, as its small files describe it."""
    try:
        config = read_json(path / "config.json")
    except (FileNotFoundError, ModelError):
        config = {}
    files = [file.stat() for file in path.glob("*.safetensors") if file.is_file()]
    return LocalModel(
        name=name,
        repository=repository,
        path=path,
        bytes=sum(file.st_size for file in files),
        family=_word(config.get("model_type")),
        bits=_word(_bits(config)),
        context=_context(config),
        used=max((max(file.st_atime, file.st_mtime) for file in files), default=0.0),
        lacks=lacking(path),
    )


def _word(value: object) -> str:
    """A setting that is shown in lists; empty where a stranger's file has something else than a word."""
    return str(value) if WORD.fullmatch(str(value)) and isinstance(value, (str, int)) else ""


def _bits(config: Mapping[str, Any]) -> str:
    for part in (config.get("quantization"), config.get("quantization_config")):
        if isinstance(part, Mapping):
            method = part.get("quant_method")
            return str(part.get("bits") or {"mxfp4": 4, "fp8": 8}.get(str(method)) or method or "")
    kind = config.get("torch_dtype") or config.get("dtype")
    return {"float32": "32"}.get(str(kind), "16") if config else ""


def _context(config: Mapping[str, Any]) -> int:
    for part in (config, config.get("text_config")):
        found = part.get("max_position_embeddings") if isinstance(part, Mapping) else None
        if type(found) is int and 0 < found < MAX_CONTEXT:
            return found
    return 0
