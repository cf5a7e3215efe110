"""Builds a model with mlx-lm, lazily, and records which of its parameters are unchanged tensors of a file.

mlx-lm knows the architectures, the quirks of their checkpoints and their quantisation. A parameter that it passes on
unchanged can be read from the file in parts. The identity of arrays tells a renamed tensor from a computed one. Does
not know ranks, target dtypes or memory.
"""

from __future__ import annotations

import difflib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models as architectures
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from phalanx.errors import ModelError, ModelUnsupported, WeightsError
from phalanx.mlx_lm_adapter import import_utils
from phalanx.model.loading.weights import TensorInfo, some

lm = import_utils()

DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "F16": mx.float16,
    "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64,
    "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
"""The MLX dtypes of safetensors dtypes. A tensor of any other dtype is left to MLX."""

BUILD_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError, OSError)
"""Errors that mlx-lm and MLX can raise while they build a model from an unknown config.json."""


@dataclass(frozen=True, slots=True)
class LazyModel:
    """A model whose weights are lazy: only headers were read."""

    model: Module
    config: dict[str, Any]
    origins: dict[str, TensorInfo]
    """The file tensor of each parameter that mlx-lm passed on unchanged."""


def build(path: Path, headers: Mapping[str, TensorInfo], *, trust_remote_code: bool) -> LazyModel:
    """Build the model of a directory; all its parameters and all tensors of the files must match.

    Raises:
        ModelUnsupported: mlx-lm does not know the architecture or the configuration.
        WeightsError: tensors are missing, surplus or of the wrong shape.
    """
    hook = _SanitizeHook()
    try:
        model, config = lm.load_model(
            path, lazy=True, strict=True, get_model_classes=hook.classes, trust_remote_code=trust_remote_code
        )
    except BUILD_ERRORS as error:
        raise _translate(path, error) from error
    if hook.original is not None:
        model.__class__ = hook.original
    origins = {}
    for name, array in tree_flatten(model.parameters()):
        info = headers.get(hook.names.get(id(array), ""))
        if info is not None and array.dtype == DTYPES.get(info.dtype) and tuple(array.shape) == info.shape:
            origins[name] = info
    return LazyModel(model, config, origins)


class _SanitizeHook:
    """Records the names of a checkpoint's arrays before the model's `sanitize` renames them."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.original: type[Module] | None = None
        self._alive: list[mx.array] = []  # keeps the arrays alive, so that their ids stay unique

    def classes(self, config: dict[str, Any]) -> tuple[type[Module], Any]:
        """For mlx-lm's loader: the model class, with a `sanitize` that first records its argument."""
        original, arguments = lm._get_classes(config)
        self.original = original

        def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            self._alive = list(weights.values())
            self.names = {id(array): name for name, array in weights.items()}
            inherited = getattr(original, "sanitize", None)
            sanitized: dict[str, mx.array] = weights if inherited is None else inherited(model, weights)
            return sanitized

        namespace = {"sanitize": sanitize, "__module__": original.__module__}
        return type(original.__name__, (original,), namespace), arguments


def check_config(path: Path, *, trust_remote_code: bool) -> None:
    """Check config.json before mlx-lm builds the model.

    Raises:
        ModelUnsupported: it is missing or not JSON, mlx-lm does not know the architecture, or the repository brings
            code that the user does not trust.
    """
    file = path / "config.json"
    if not path.is_dir() or not file.exists():
        raise ModelUnsupported(f"{path} has no config.json.", remedy="It is not a model in mlx-lm's file format.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ModelUnsupported(f"{file} is not JSON: {error}", remedy="Download or copy it again.") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or not model_type:
        raise ModelUnsupported(f"{file} names no model_type.", remedy="Convert the model with `mlx_lm.convert`.")
    if config.get("model_file") is not None:
        if not trust_remote_code:
            raise ModelUnsupported(
                f"{path.name} brings its own Python file ({config['model_file']!r}).",
                remedy="Run it with --trust-remote-code if you trust it.",
            )
        return
    known = known_architectures()
    if model_type not in known:
        nearest = difflib.get_close_matches(model_type, known, n=4, cutoff=0.5)
        raise ModelUnsupported(
            f"mlx-lm has no architecture {model_type!r}" + (f"; nearest: {', '.join(nearest)}." if nearest else "."),
            remedy="Check model_type in config.json, or use a newer phalanx.",
        )


def known_architectures() -> list[str]:
    """Values of `model_type` that have a model file in mlx-lm."""
    return sorted({module.name for module in pkgutil.iter_modules(architectures.__path__)} | set(lm.MODEL_REMAPPING))


def _translate(path: Path, error: Exception) -> ModelError:
    """Map an error of mlx-lm's loader to one of phalanx's, which lists only the first eight names."""
    head, _, names = str(error).partition("\n")
    listed = some(name.strip(" .") for name in names.split(",\n"))
    if head.startswith("Received") and "not in model" in head:
        return WeightsError(f"{path.name} has tensors that its architecture does not: {listed}.", remedy=_MISMATCH)
    if head.startswith("Missing") and "parameters" in head:
        return WeightsError(f"{path.name} lacks tensors: {listed}.", remedy=_MISMATCH)
    if head.startswith("Expected shape"):
        return WeightsError(f"{path.name} has a tensor of another shape than config.json says. {error}",
                            remedy=_MISMATCH)  # fmt: skip
    return ModelUnsupported(
        f"{path.name} cannot be built from its config.json: {type(error).__name__}: {error}",
        remedy="Check config.json, or convert the model with the mlx-lm version phalanx is pinned to.",
    )


_MISMATCH = "config.json and the weights do not belong together, or a file is missing: download the model again."
