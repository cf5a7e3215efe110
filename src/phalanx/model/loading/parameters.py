"""Decides for every parameter of a rank where it comes from and in which form it is kept.

The plan is in the order of the files, so that they are read from start to end. `stage_cut.py` and `shard.py` decide
which layers and rows a rank owns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from phalanx.model.cpu.repack import repackable
from phalanx.model.loading.lazy_model import LazyModel
from phalanx.model.loading.shard import Split
from phalanx.model.loading.weights import Cut, TensorInfo

LARGE_ACTIVATIONS = ("gemma", "gpt_oss")
"""Starts of the types of models whose hidden states exceed 65,504, the largest float16."""


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """One parameter: its source in the files, and the form in which it is kept."""

    name: str
    size: int  # elements
    dtype: mx.Dtype  # as kept
    stored: int  # bytes as stored: in memory besides the result while it is cast
    nbytes: int  # bytes as kept
    source: TensorInfo | None  # None: mlx-lm computes it
    cut: Cut | None  # the rows of the source to keep; None: all
    repacked: bool  # repack it after reading

    @property
    def may_shrink(self) -> bool:
        """Whether it may be replaced by its factors (`factored_scales.py`)."""
        return self.repacked and self.dtype == mx.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kept part of the source."""
        assert self.source is not None
        return self.source.shape if self.cut is None else self.cut.shape(self.source.shape)


def plan_parameters(
    built: LazyModel,
    parts: Split,
    target: mx.Dtype | None,
    kept_16bit: set[str],
    ranks: int,
    absent: Collection[str] = (),
) -> list[ModelParameter]:
    """Source and dtype of every parameter, in the order of the files; computed ones come last.

    Args:
        target: dtype to which floating parameters are cast; None: no cast.
        kept_16bit: names of parameters that are not cast in any case.
        absent: names of parameters that are not read at all. They are not repacked either.
    """
    castable = _cast_predicate(built.model, target)
    unread = {*absent, *parts.computed}
    repacking = repackable(built.model, lambda name: name in unread or name not in built.origins)
    entries = []
    for name, array in tree_flatten(built.model.parameters()):
        floating = mx.issubdtype(array.dtype, mx.floating)
        kept = target if target is not None and floating and castable(name) else array.dtype
        kept = array.dtype if name in kept_16bit else kept
        source = None if name in parts.computed else built.origins.get(name)
        cut = None if source is None else parts.cuts.get(name)
        split_up = name in parts.computed or name in parts.cuts
        stored = array.nbytes * (ranks if source is None and split_up else 1)
        nbytes = array.size * kept.size
        entries.append(ModelParameter(name, array.size, kept, stored, nbytes, source, cut, repacked=name in repacking))
    return sorted(entries, key=_file_position)


def _file_position(entry: ModelParameter) -> tuple[bool, str, int]:
    source = entry.source
    return (True, "", 0) if source is None else (False, str(source.file), source.start)


def _cast_predicate(model: Module, target: mx.Dtype | None) -> Callable[[str], bool]:
    """Whether to cast a floating parameter to the target. A model can exempt parameters from 16 bits."""
    if target == mx.float32:
        return lambda name: True
    own = getattr(model, "cast_predicate", None) or (lambda name: True)
    return lambda name: bool(own(name)) and not name.endswith(".global_scale")


def gpu_dtype(parameters: Mapping[str, mx.array], model_type: str) -> mx.Dtype | None:
    """The dtype to which `auto` casts on a GPU; None: each parameter keeps its own.

    Imported GGUF files have norms of 32 bits, and many have such scales. Either makes activations and KV float32, twice
    as large as they need to be. Scales are better rounded to float16, whose mantissa has three bits more, than to
    bfloat16, unless activations do not fit.
    """
    sizes: Counter[mx.Dtype] = Counter()
    wide = []
    for name, array in parameters.items():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
            wide += [name] if array.dtype == mx.float32 else []
    found = sizes.most_common(1)[0][0] if sizes else mx.float32
    if any(name.endswith(".scales") for name in wide):
        found = mx.float16
    elif found == mx.float32 or not any(name.endswith("norm.weight") for name in wide):
        return None
    return mx.bfloat16 if found == mx.float16 and model_type.startswith(LARGE_ACTIVATIONS) else found


def main_dtype(plan: list[ModelParameter]) -> mx.Dtype:
    """The floating dtype of most elements; float32 of a model without any."""
    sizes: Counter[mx.Dtype] = Counter()
    for entry in plan:
        if mx.issubdtype(entry.dtype, mx.floating):
            sizes[entry.dtype] += entry.size
    return sizes.most_common(1)[0][0] if sizes else mx.float32
