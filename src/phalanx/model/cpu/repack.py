"""Chooses the weights to repack in memory: sixteen rows interleaved, as the native kernels multiply them.

Integer products need the codes of many rows side by side. Interleaving them takes as long as multiplying some rows of
activations (docs/log/kernels-quantised.md), so the loader does it once, after it has read a tensor. Only weights of
layers that do nothing but multiply by them, or look rows up, are repacked. Does not read files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from phalanx.kernels import install
from phalanx.model.cpu.weight_only_16bit import WideQuantizedEmbedding
from phalanx.model.summed_layers import SummedQuantizedLinear

FIELDS = ("weight", "scales", "biases")


class RepackedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A quantised embedding whose rows are repacked."""

    row_dtype: mx.Dtype | None
    """The dtype of dequantised rows; None for that of the scales, as in MLX."""

    def __call__(self, x: mx.array) -> mx.array:
        native = install.operations()
        assert native is not None  # weights are repacked only for the native kernels
        return native.dequantize_rows(
            self["weight"],
            self["scales"],
            self.get("biases"),
            x,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=self.row_dtype,
        )


_MULTIPLIES: tuple[Callable[..., Any], ...] = (
    nn.QuantizedLinear.__call__,
    SummedQuantizedLinear.__call__,
    QuantizedSwitchLinear.__call__,
)
"""`__call__` of classes that do nothing but multiply by all of their weights, transposed."""

_EMBEDDINGS = {nn.QuantizedEmbedding: None, WideQuantizedEmbedding: mx.float32}
"""Class of an embedding -> the dtype of its dequantised rows."""


def repackable(model: Module, computed: Callable[[str], bool]) -> set[str]:
    """Names of the parameters to repack after reading. Their embeddings become `RepackedEmbedding`.

    Args:
        computed: whether mlx-lm computes a parameter of this name instead of reading it. Such a parameter may share its
            memory with another one, so it is not repacked.
    """
    names: set[str] = set()
    for path, module in model.named_modules():
        multiplies = type(module).__call__ in _MULTIPLIES and module.get("global_scale") is None
        if not multiplies and type(module) not in _EMBEDDINGS:
            continue
        of_module = {f"{path}.{field}" if path else field for field in FIELDS if module.get(field) is not None}
        if any(map(computed, of_module)) or not _repacks(module):
            continue
        names |= of_module
        if not multiplies:
            module.row_dtype = _EMBEDDINGS[type(module)]
            module.__class__ = RepackedEmbedding
    return names


def _repacks(module: Any) -> bool:
    """Whether the native kernels take repacked weights of this shape and format."""
    rows, words = module["weight"].shape[-2:]
    return install.repacks(rows, words * 32 // module.bits, module.mode, module.group_size, module.bits)
