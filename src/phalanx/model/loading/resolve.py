"""Finds the directory of a model by its name: the bundled model, a path, or a hub id. Reads no weights.

The hub's client (`hub.py`) is imported for a hub id only: a model in a directory does not wait for it.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.errors import ModelNotFound
from phalanx.speculation_config import DraftModelSpeculation
from phalanx.text.model_files import check_directory

DEMO = "demo"


def resolve(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The directory of a model. A hub id is downloaded, or found in the hub's cache if there is no network.

    Args:
        model: `demo`, a directory, or a hub id such as `mlx-community/Qwen3-4B-4bit`.
        revision: branch, tag or commit, for a hub id.
        trust_remote_code: whether to download a hub repository's Python files as well.

    Raises:
        ModelNotFound: says whether the path, the repository, the access or the network is the problem.
        ModelUnsupported: the directory has something else than files, or a link that leads out of it.
    """
    if model == DEMO:
        return MODEL_DIR
    path = Path(model).expanduser()
    if model and path.is_dir():
        check_directory(path)
        return path if path.name not in ("", "..") else path.resolve()  # errors name the model
    if path.is_file():
        raise ModelNotFound(f"{model} is a file.", remedy="Name the directory that holds config.json and the weights.")
    if model == "" or model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model:
        raise ModelNotFound(f"No such directory: {model!r}.", remedy="Check the path, or give a hub id (owner/name).")
    hub = importlib.import_module("phalanx.model.loading.hub")
    downloaded: Path = hub.download(model, revision, trust_remote_code=trust_remote_code)
    check_directory(downloaded)
    return downloaded


def resolve_models(config: EngineConfig) -> Path:
    """The directory of the model that is served. A draft model is downloaded too: the ranks may have no network.

    Raises:
        ModelNotFound, ModelUnsupported: as `resolve`.
    """
    trust = config.trust_remote_code
    if isinstance(config.speculative_config, DraftModelSpeculation):
        draft = config.speculative_config
        resolve(draft.model, revision=draft.revision, trust_remote_code=trust)
    return resolve(config.model, revision=config.revision, trust_remote_code=trust)
