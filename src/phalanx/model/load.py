"""A model from its directory into memory, without ever holding much more than its weights (B1-B5).

mlx-lm knows the architectures, their checkpoints' quirks and their quantisation; it builds the model lazily. Everything
that can go wrong is checked before the first tensor is read; then tensors are read, cast and kept one at a time, in
whatever structure the model has. Does not know ranks yet: a rank will ask for the slices it owns here (DESIGN 6).
"""

from __future__ import annotations

import difflib
import json
import logging
import pkgutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import models as architectures
from mlx_lm.utils import MODEL_REMAPPING, load_model

from phalanx import memory
from phalanx.config import Dtype
from phalanx.errors import ModelError, ModelUnsupported, WeightsError
from phalanx.model.resolve import resolve
from phalanx.model.weights import read_headers, some

__all__ = ["Loaded", "Progress", "load", "resolve"]

log = logging.getLogger("phalanx.load")

Progress = Callable[[str, int, int], None]
"""Called with a phase, bytes done and bytes in all."""
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
CHECK_EVERY = memory.GB // 4  # bytes between two looks at the machine's memory while loading
FOREIGN = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError, OSError)
"""What building a model from somebody's config.json can raise inside mlx-lm and MLX."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model whose weights are in memory."""

    model: Module
    config: dict[str, Any]
    path: Path
    dtype: mx.Dtype
    """Floating dtype of the weights (of most of them, where `auto` left a mixture)."""
    quantization: str
    """"4-bit affine g64", "mxfp4 g32", "none", ..."""
    weights_bytes: int
    load_s: float
    active_bytes: int
    """MLX's active memory after loading."""
    peak_bytes: int
    """MLX's peak memory while loading."""


def load(path: Path, *, dtype: Dtype, guard: int, trust_remote_code: bool, on_progress: Progress) -> Loaded:
    """Load a model.

    Args:
        path: its directory.
        dtype: floating dtype of everything; `auto` is the checkpoint's, except float32 on the CPU.
        guard: bytes of memory that stay free (B2).
        trust_remote_code: whether a `model_file` of the repository may be run.
        on_progress: see `Progress`.

    Raises:
        ModelUnsupported: the architecture or configuration is not one that mlx-lm knows.
        WeightsError: files or tensors are missing, surplus, damaged or of the wrong shape.
        MemoryShortage: the weights do not fit, or memory ran out while loading.
    """
    started = time.perf_counter()
    mx.reset_peak_memory()
    _check_config(path, trust_remote_code)
    stored = sum(info.stop - info.start for info in read_headers(path).values())
    on_progress("reading headers", 0, stored)
    model, config = _build(path, trust_remote_code)
    plan = _plan(model, dtype)
    total = sum(entry.nbytes for entry in plan)
    working = max((entry.stored + entry.nbytes for entry in plan), default=0)
    machine = memory.read_machine()
    log.info(
        "loading %.2f GB of weights from %s (%.2f GB of %.2f GB memory available)",
        total / memory.GB, path, machine.available / memory.GB, machine.physical / memory.GB,
    )  # fmt: skip
    memory.check_fits(f"Loading {path.name}", total + working, machine, guard)
    _materialise(model, plan, total, guard, on_progress)
    loaded = Loaded(
        model=model,
        config=config,
        path=path,
        dtype=_main_dtype(plan),
        quantization=_describe_quantization(model),
        weights_bytes=total,
        load_s=time.perf_counter() - started,
        active_bytes=mx.get_active_memory(),
        peak_bytes=mx.get_peak_memory(),
    )
    log.info(
        "loaded in %.1f s: %s, quantization %s, active memory %.2f GB, peak %.2f GB",
        loaded.load_s, loaded.dtype, loaded.quantization,
        loaded.active_bytes / memory.GB, loaded.peak_bytes / memory.GB,
    )  # fmt: skip
    return loaded


# -- before anything is read ---------------------------------------------------------------------------------------


def _check_config(path: Path, trust_remote_code: bool) -> None:
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
    return sorted({module.name for module in pkgutil.iter_modules(architectures.__path__)} | set(MODEL_REMAPPING))


def _build(path: Path, trust_remote_code: bool) -> tuple[Module, dict[str, Any]]:
    """The model with lazy weights, every tensor accounted for, nothing read but headers."""
    try:
        model, config = load_model(path, lazy=True, strict=True, trust_remote_code=trust_remote_code)
    except FOREIGN as error:
        raise _translate(path, error) from error
    return model, config


def _translate(path: Path, error: Exception) -> ModelError:
    """An error of mlx-lm's loader as one of ours; its messages list every name, ours the first eight."""
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


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter: what it is in the file and what it becomes."""

    name: str
    size: int
    dtype: mx.Dtype
    stored: int  # bytes as stored
    nbytes: int  # bytes as kept


def _plan(model: Module, dtype: Dtype) -> list[_Entry]:
    """The dtype of every parameter, in the model's own order."""
    target = DTYPES.get(dtype)
    if target is None and mx.default_device() == mx.Device(mx.cpu):
        target = mx.float32  # 16-bit kernels are 10-30 times slower there, scales of quantised weights included
    castable = _cast_predicate(model, target)
    entries = []
    for name, array in tree_flatten(model.parameters()):
        floating = mx.issubdtype(array.dtype, mx.floating)
        kept = target if target is not None and floating and castable(name) else array.dtype
        entries.append(_Entry(name, array.size, kept, array.nbytes, array.size * kept.size))
    return entries


def _cast_predicate(model: Module, target: mx.Dtype | None) -> Callable[[str], bool]:
    """Which floating parameters follow the target; those a model wants in float32 are left out of 16 bits."""
    if target == mx.float32:
        return lambda name: True
    own = getattr(model, "cast_predicate", None) or (lambda name: True)
    return lambda name: bool(own(name)) and not name.endswith(".global_scale")


def _materialise(model: Module, plan: list[_Entry], total: int, guard: int, on_progress: Progress) -> None:
    """Read, cast and keep one tensor after the other; the file's version of each is gone before the next."""
    lazy = dict(tree_flatten(model.parameters()))
    done = checked = 0
    for entry in plan:
        array = lazy.pop(entry.name)
        if array.dtype != entry.dtype:
            array = array.astype(entry.dtype)
            model.update(tree_unflatten([(entry.name, array)]))
        mx.eval(array)
        del array
        mx.clear_cache()
        done += entry.nbytes
        on_progress("loading weights", done, total)
        if done - checked >= CHECK_EVERY:
            checked = done
            memory.check_fits("The rest of the weights", total - done, memory.read_machine(), guard)


def _main_dtype(plan: list[_Entry]) -> mx.Dtype:
    sizes: Counter[mx.Dtype] = Counter()
    for entry in plan:
        if mx.issubdtype(entry.dtype, mx.floating):
            sizes[entry.dtype] += entry.size
    return sizes.most_common(1)[0][0] if sizes else mx.float32


def _describe_quantization(model: Module) -> str:
    """How most of the weights are quantised, and in how many ways the rest."""
    kinds: Counter[str] = Counter()
    for _, module in model.named_modules():
        bits, group, mode = (getattr(module, field, None) for field in ("bits", "group_size", "mode"))
        if isinstance(bits, int) and isinstance(group, int) and isinstance(module.get("weight"), mx.array):
            name = f"{bits}-bit affine" if mode in (None, "affine") else str(mode)
            kinds[f"{name} g{group}"] += module["weight"].nbytes
    if not kinds:
        return "none"
    (most, _), *others = kinds.most_common()
    return most + (f" (also {', '.join(kind for kind, _ in others)})" if others else "")
