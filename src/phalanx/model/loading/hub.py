"""Downloads a model from the hub, and says in words why it could not."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import errors as hub
from huggingface_hub import snapshot_download

from phalanx.errors import ModelNotFound
from phalanx.mlx_lm_adapter import import_utils

PATTERNS: list[str] = import_utils().DEFAULT_ALLOW_PATTERNS
"""Files of a repository that mlx-lm downloads."""


def download(model: str, revision: str | None, *, trust_remote_code: bool) -> Path:
    """The directory of a hub id; taken from the hub's cache when there is no network.

    Raises:
        ModelNotFound: says whether the repository, the permission or the network is at fault.
    """
    patterns = [pattern for pattern in PATTERNS if trust_remote_code or not pattern.endswith(".py")]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise explain(model, revision, error) from error


def explain(model: str, revision: str | None, error: Exception) -> ModelNotFound:
    """Map an error of the hub\'s client. Specific errors come first, because some are subclasses of others."""
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
