"""Builds a model with mlx-lm, lazily, and records which of its parameters are unchanged tensors of a file.

mlx-lm knows the architectures, the quirks of their checkpoints and their quantisation. A parameter that it passes on
unchanged can be read from the file in parts. The identity of arrays tells a renamed tensor from a computed one.
"""

from __future__ import annotations

import difflib
import glob
import logging
import pkgutil
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models as architectures
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from phalanx.errors import ModelError, ModelUnsupported, WeightsError
from phalanx.mlx_lm_adapter import import_utils
from phalanx.model.loading.config_forms import translate
from phalanx.model.loading.plausible import check_sizes
from phalanx.model.loading.tied_head import difference, without_copied_head
from phalanx.model.loading.weight_files import PATTERN, describe, some, weight_files
from phalanx.model.loading.weights import TensorInfo
from phalanx.text.model_files import read_json

lm = import_utils()
log = logging.getLogger("phalanx.load")

DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "F16": mx.float16,
    "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64,
    "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
"""The MLX dtypes of safetensors dtypes. A tensor of any other dtype is left to MLX."""

OBJECTS = ("text_config", "quantization", "quantization_config", "rope_scaling", "rope_parameters")
"""Fields of config.json that are objects, or absent."""

BUILD_ERRORS = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, ImportError, AssertionError,
    OSError, SystemExit,
)  # fmt: skip
"""Errors that mlx-lm and MLX can raise while they build a model from an unknown config.json. (A model file that lacks a
library of its own ends the process.)"""


@dataclass(frozen=True, slots=True)
class LazyModel:
    """A model whose weights are lazy: only headers were read."""

    model: Module
    config: dict[str, Any]
    origins: dict[str, TensorInfo]
    """The file tensor of each parameter that mlx-lm passed on unchanged."""


def build(
    path: Path, config: Mapping[str, Any], headers: Mapping[str, TensorInfo], *, trust_remote_code: bool
) -> LazyModel:
    """Build the model of a directory; all its parameters and all tensors of the files must match.

    Args:
        config: its config.json, from `check_config`.

    Raises:
        ModelUnsupported: the weights cannot be those of such a model, or mlx-lm does not know the configuration.
        WeightsError: tensors are missing, surplus or of the wrong shape.
    """
    check_sizes(path / "config.json", config, headers)
    if warning := weight_files(path)[1]:
        log.warning("%s", warning)
    hook = _SanitizeHook(path, config, {info.file for info in headers.values()})
    try:
        model, built = lm.load_model(
            path, lazy=True, strict=True, model_config=translate(config, headers), get_model_classes=hook.classes,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    except BUILD_ERRORS as error:
        raise _translate(path, config, error) from error
    if hook.original is not None:
        model.__class__ = hook.original
    origins = {}
    for name, array in tree_flatten(model.parameters()):
        info = headers.get(hook.names.get(id(array), ""))
        if info is not None and array.dtype == DTYPES.get(info.dtype) and tuple(array.shape) == info.shape:
            origins[name] = info
    if warning := difference(model, config, headers, origins):
        log.warning("%s: %s", path, warning)
    return LazyModel(model, built, origins)


class _SanitizeHook:
    """Records the names of a checkpoint's arrays before the model's `sanitize` renames them, and drops a copied head.

    Args:
        path: the model's directory.
        config: its config.json.
        files: those with its weights. Where mlx-lm loads others as well, these are loaded here.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], files: Collection[Path]) -> None:
        self._config = config
        self._files = () if len(files) == len(list(path.glob(PATTERN))) else sorted(files)
        self.names: dict[int, str] = {}
        self.original: type[Module] | None = None
        self._alive: list[mx.array] = []  # keeps the arrays alive, so that their ids stay unique

    def classes(self, config: dict[str, Any]) -> tuple[type[Module], Any]:
        """For mlx-lm's loader: the model class, with a `sanitize` that first records its argument."""
        original, arguments = lm._get_classes(config)
        self.original = original

        def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if self._files:
                weights = _load(self._files)
            self._alive = list(weights.values())
            self.names = {id(array): name for name, array in weights.items()}
            inherited = getattr(original, "sanitize", None)
            sanitized: dict[str, mx.array] = weights if inherited is None else inherited(model, weights)
            return without_copied_head(model, sanitized, self._config)

        namespace = {"sanitize": sanitize, "__module__": original.__module__}
        return type(original.__name__, (original,), namespace), arguments


def _load(files: Iterable[Path]) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for file in files:
        found = mx.load(str(file))
        assert isinstance(found, dict)
        tensors |= found
    return tensors


def check_config(path: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Read and check config.json before mlx-lm builds the model.

    Raises:
        ModelUnsupported: it is missing or not JSON, mlx-lm does not know the architecture, or the repository brings
            code that the user does not trust.
    """
    file = path / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError as error:
        what, remedy = describe(path, "config.json")
        raise ModelUnsupported(what, remedy=remedy) from error
    if glob.escape(str(path)) != str(path):
        raise ModelUnsupported(
            f"mlx-lm cannot load from {path}, whose name has one of the characters [ * ?.",
            remedy="Rename it, or name a link to it.",
        )
    for name in OBJECTS:
        if config.get(name) and not isinstance(config[name], dict):
            raise ModelUnsupported(
                f"{file}: {name} is a {type(config[name]).__name__}; it must be an object.",
                remedy="Download config.json again.",
            )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelUnsupported(f"{file} names no model_type.", remedy="Convert the model with `mlx_lm.convert`.")
    if config.get("model_file") is not None:
        if not trust_remote_code:
            raise ModelUnsupported(
                f"{path.name} brings its own Python file ({config['model_file']!r}).",
                remedy="Run it with --trust-remote-code if you trust it.",
            )
        return config
    known = known_architectures()
    if model_type not in known:
        nearest = difflib.get_close_matches(model_type, known, n=4, cutoff=0.5)
        raise ModelUnsupported(
            f"mlx-lm has no architecture {model_type!r}" + (f"; nearest: {', '.join(nearest)}." if nearest else "."),
            remedy="Check model_type in config.json, or use a newer phalanx.",
        )
    return config


def known_architectures() -> list[str]:
    """Values of `model_type` that have a model file in mlx-lm."""
    return sorted({module.name for module in pkgutil.iter_modules(architectures.__path__)} | set(lm.MODEL_REMAPPING))


def _translate(path: Path, config: Mapping[str, Any], error: BaseException) -> ModelError:
    """Map an error of mlx-lm's loader to one of phalanx's, which lists only the first eight names."""
    if (method := _foreign_quantization(config)) is not None:
        return ModelUnsupported(
            f"{path.name} is quantised with {method!r} (quantization_config in config.json), which mlx-lm cannot read "
            f"for {config['model_type']!r}: {' '.join(str(error).split())[:200]}",
            remedy="Use the model in 16 bits, or one that `mlx_lm.convert -q` has quantised.",
        )
    if isinstance(error, TypeError) and (lacking := MISSING.search(str(error))) is not None:
        return ModelUnsupported(
            f"{path / 'config.json'} lacks {lacking[1]}, which a model of type {config['model_type']!r} needs.",
            remedy="Download config.json again, or check its model_type.",
        )
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


def _foreign_quantization(config: Mapping[str, Any]) -> str | None:
    """The method of a quantisation that is not mlx-lm's own; None without one."""
    for part in (config, config.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(found, Mapping) and not config.get("quantization"):
            return str(found.get("quant_method", "an unnamed method"))
    return None


MISSING = re.compile(r"__init__\(\) missing \d+ required \S+ arguments?: (.+)")
_MISMATCH = "config.json and the weights do not belong together, or a file is missing: download the model again."
