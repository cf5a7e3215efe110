"""Finds model files on this machine, and computes a digest that compares copies."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from phalanx.catalog.imports import ORIGIN
from phalanx.catalog.local_models import NEEDED, directory_of
from phalanx.cluster.check_results import ModelFacts

DIGESTED = (".json", ".txt", ".jinja", ".model", ".tiktoken")
"""Small files whose content is part of a model's digest. Of weight files, only name and size are."""
NEEDED_BELOW = ("*.py", "additional_chat_templates/*.jinja")
"""As `NEEDED`, for subdirectories."""


def files_of(path: Path) -> list[Path]:
    """A model's files, sorted by name, without hidden ones."""
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    )


def is_needed(name: str) -> bool:
    """Whether serving reads a file of a model: weights, configuration, tokenizer, templates and Python code, but not
    the same weights in other formats, nor documentation.

    Args:
        name: relative to the model's directory, with /.
    """
    inside = len(PurePosixPath(name).parts) > 1
    if name.endswith(".index.json") and not fnmatchcase(name, "model*.safetensors.index.json"):
        return False  # the index of another format
    return any(fnmatchcase(name, pattern) for pattern in (NEEDED_BELOW if inside else NEEDED))


def needed_files(path: Path) -> list[Path]:
    """A model's files that serving reads, sorted by name."""
    return [file for file in files_of(path) if is_needed(file.relative_to(path).as_posix())]


def find_model(model: str) -> ModelFacts | None:
    """The facts about a model that are compared between hosts; None if it is not on this machine."""
    path = directory_of(model)
    if path is None:
        return None
    digest, weights = hashlib.sha256(), 0
    for file in needed_files(path):
        if file.name == ORIGIN:
            continue  # of the same weights from elsewhere
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}\n".encode())
        if file.suffix in DIGESTED:
            digest.update(file.read_bytes())
        elif file.suffix == ".safetensors":
            weights += size
    return ModelFacts(path=str(path), bytes=weights, digest=digest.hexdigest())
