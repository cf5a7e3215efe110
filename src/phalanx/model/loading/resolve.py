"""Finds the directory of a model by its name: the bundled model, a path, or a hub id. Reads no weights."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import errors as hub
from huggingface_hub import snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from phalanx.demo import MODEL_DIR
from phalanx.errors import ModelNotFound

DEMO = "demo"


def resolve(model: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """The directory of a model. A hub id is downloaded, or found in the hub's cache if there is no network.

    Args:
        model: `demo`, a directory, or a hub id such as `mlx-community/Qwen3-4B-4bit`.
        revision: branch, tag or commit, for a hub id.
        trust_remote_code: whether to download a hub repository's Python files as well.

    Raises:
        ModelNotFound: says whether the path, the repository, the access or the network is the problem.
    """
    if model == DEMO:
        return MODEL_DIR
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        raise ModelNotFound(f"{model} is a file.", remedy="Name the directory that holds config.json and the weights.")
    if model == "" or model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model:
        raise ModelNotFound(f"No such directory: {model!r}.", remedy="Check the path, or give a hub id (owner/name).")
    patterns = [p for p in DEFAULT_ALLOW_PATTERNS if trust_remote_code or not p.endswith(".py")]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise explain(model, revision, error) from error


def explain(model: str, revision: str | None, error: Exception) -> ModelNotFound:
    """Map an error of the hub's client. Specific errors come first, because some are subclasses of others."""
    no_directory = f"There is no directory {model!r}, and"
    match error:
        case hub.HFValidationError():
            return ModelNotFound(
                f"{no_directory} it is not a hub id.", remedy="Give a directory, owner/name, or `demo`."
            )
        case hub.GatedRepoError():
            return ModelNotFound(
                f"{model} is a gated repository of the hub and this machine has no access to it.",
                remedy="Accept its terms on its page at the hub, then log in with `hf auth login` (or set HF_TOKEN).",
            )
        case hub.RepositoryNotFoundError():
            return ModelNotFound(
                f"{no_directory} the hub has no such repository (or it is private).",
                remedy="Check the name; for a private one log in with `hf auth login` (or set HF_TOKEN).",
            )
        case hub.RevisionNotFoundError():
            return ModelNotFound(f"{model} has no revision {revision!r}.", remedy="Check --revision.")
        case hub.LocalEntryNotFoundError() | hub.OfflineModeIsEnabled() | ConnectionError() | httpx.TransportError():
            return ModelNotFound(
                f"{no_directory} the hub cannot be reached, nor is the model in its local cache.",
                remedy="Check the network, or copy the model to a directory and give its path.",
            )
        case _:
            return ModelNotFound(
                f"{model} could not be fetched from the hub: {type(error).__name__}: {error}",
                remedy="Try again later, or copy the model to a directory and give its path.",
            )
