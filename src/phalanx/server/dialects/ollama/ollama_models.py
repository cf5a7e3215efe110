"""The served model as Ollama's clients see it: `/api/version`, `tags`, `ps`, `show`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from phalanx.server.fields.timestamps import iso_time
from phalanx.server.outputs.shapes import OutputShapes
from phalanx.types import ModelInfo

API_VERSION = "0.13.5"
"""The version of Ollama whose API this is; clients refuse older ones."""
NEVER = "2318-01-01T00:00:00Z"
"""When a model is unloaded that stays: as far off as Ollama itself says, whose durations end after 292 years."""
REFUSED: Mapping[str, str] = {
    "/api/embed": "This server's model writes text; it makes no embeddings.",
    "/api/embeddings": "This server's model writes text; it makes no embeddings.",
    **{
        f"/api/{action}": f"This server has one model, which was chosen at its start; it cannot {action}."
        for action in ("pull", "push", "create", "copy", "delete")
    },
}
"""Path -> why nothing is done there."""


class OllamaModel(Struct, frozen=True, kw_only=True):
    """The served model."""

    name: str
    info: ModelInfo
    shapes: OutputShapes
    auto_tools: bool
    since: int  # when it was loaded, in seconds since 1970
    template: str = ""  # of chats


def version() -> dict[str, Any]:
    """`GET /api/version`"""
    return {"version": API_VERSION}


def tags(models: Sequence[OllamaModel]) -> dict[str, Any]:
    """`GET /api/tags`: a model per name."""
    return {"models": [{**_card(model), "modified_at": iso_time(model.since)} for model in models]}


def running(models: Sequence[OllamaModel]) -> dict[str, Any]:
    """`GET /api/ps`. Where the weights lie (`size_vram`) is not known here."""
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
        "details": _details(model.info),
        "template": model.template,
        "capabilities": list(_capabilities(model)),
        "model_info": {
            "general.architecture": kind,
            "general.basename": model.name,
            f"{kind}.context_length": model.info.max_model_len,
            f"{kind}.vocab_size": model.info.vocab_size,
        },
    }


def _capabilities(model: OllamaModel) -> Iterator[str]:
    yield "completion"
    if model.shapes.tools is not None and model.auto_tools:
        yield "tools"
    if model.shapes.reasoning is not None:
        yield "thinking"


def _card(model: OllamaModel) -> dict[str, Any]:
    info = model.info
    stands_for = (model.name, info.model_type, info.dtype, info.quantization, info.weights_bytes, info.vocab_size)
    return {
        "name": model.name,
        "model": model.name,
        "size": info.weights_bytes,
        "digest": hashlib.sha256(repr(stands_for).encode()).hexdigest(),
        "details": _details(info),
    }


def _details(info: ModelInfo) -> dict[str, Any]:
    """The number of parameters is not known here."""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.model_type,
        "families": [info.model_type],
        "parameter_size": "",
        "quantization_level": info.dtype if info.quantization == "none" else info.quantization,
    }
