"""The served model, and others on this disk, as Ollama's clients see them: `/api/version`, `tags`, `ps`, `show`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from phalanx.catalog.local_models import LocalModel
from phalanx.catalog.pull_progress import ASKING, PullProgress
from phalanx.server.fields.timestamps import iso_time
from phalanx.types import ModelInfo

API_VERSION = "0.13.5"
"""The version of Ollama's API; clients refuse older ones."""
NEVER = "2318-01-01T00:00:00Z"
"""`expires_at` of a model that stays loaded, as far off as Ollama's own, whose durations end after 292 years."""
REFUSED: Mapping[str, str] = {
    f"/api/{action}": f"This server has one model, which was chosen at its start; it cannot {action}."
    for action in ("push", "create", "copy")
}
"""Path -> why the server refuses it."""


class OllamaModel(Struct, frozen=True, kw_only=True):
    """The served model."""

    name: str
    info: ModelInfo
    calls_tools: bool
    reasons: bool
    since: int  # when it was loaded, in seconds since 1970
    template: str = ""  # of chats


def version() -> dict[str, Any]:
    """`GET /api/version`"""
    return {"version": API_VERSION}


def tags(models: Sequence[OllamaModel], others: Sequence[LocalModel] = ()) -> dict[str, Any]:
    """`GET /api/tags`: a model per name.

    Args:
        others: on this disk, but not served.
    """
    served = [{**_card(model), "modified_at": iso_time(model.since)} for model in models]
    return {"models": [*served, *map(_local_card, others)]}


def running(models: Sequence[OllamaModel]) -> dict[str, Any]:
    """`GET /api/ps`. `size_vram`, the place of the weights, is not known here."""
    return {
        "models": [
            {**_card(model), "expires_at": NEVER, "context_length": model.info.max_model_len} for model in models
        ]
    }


def show(model: OllamaModel) -> dict[str, Any]:
    """`POST /api/show`"""
    kind = model.info.model_type
    return {
        "modified_at": iso_time(model.since),
        "details": _details_of(model.info),
        "template": model.template,
        "capabilities": list(_capabilities(model)),
        "model_info": {
            "general.architecture": kind,
            "general.basename": model.name,
            f"{kind}.context_length": model.info.max_model_len,
            f"{kind}.vocab_size": model.info.vocab_size,
        },
    }


def show_local(model: LocalModel) -> dict[str, Any]:
    """`POST /api/show` of a model that is not served, from its small files."""
    kind = model.family
    return {
        "modified_at": iso_time(int(model.used)),
        "details": _local_details(model),
        "template": "",
        "capabilities": ["completion"],
        "model_info": {
            "general.architecture": kind,
            "general.basename": model.name,
            f"{kind}.context_length": model.context,
        },
    }


HERE: Sequence[PullProgress] = (PullProgress(ASKING), PullProgress("success"))
"""`POST /api/pull` of the served model."""


def _local_card(model: LocalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": iso_time(int(model.used)),
        "size": model.bytes,
        "digest": hashlib.sha256(f"{model.name} {model.path.name} {model.bytes}".encode()).hexdigest(),
        "details": _local_details(model),
    }


def _capabilities(model: OllamaModel) -> Iterator[str]:
    yield "completion"
    if model.calls_tools:
        yield "tools"
    if model.reasons:
        yield "thinking"


def _card(model: OllamaModel) -> dict[str, Any]:
    info = model.info
    stands_for = (model.name, info.model_type, info.dtype, info.quantization, info.weights_bytes, info.vocab_size)
    return {
        "name": model.name,
        "model": model.name,
        "size": info.weights_bytes,
        "digest": hashlib.sha256(repr(stands_for).encode()).hexdigest(),
        "details": _details_of(info),
    }


def _details(family: str, quantization: str) -> dict[str, Any]:
    """`details`, without the number of parameters, which is not known here."""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": quantization,
    }


def _details_of(info: ModelInfo) -> dict[str, Any]:
    return _details(info.model_type, info.dtype if info.quantization == "none" else info.quantization)


def _local_details(model: LocalModel) -> dict[str, Any]:
    return _details(model.family, f"{model.bits}-bit" if model.bits else "")
