"""Keeps weights in 16 bits under float32 activations: the native kernels then read half as many bytes.

Widening a weight to float32 is exact, so a kernel that widens as it reads gives the result of a model cast to float32.
Matrices and scales that only products and look-ups read therefore keep the checkpoint's dtype; the loader casts all
other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from phalanx.model.summed_layers import SummedLinear, SummedQuantizedLinear


class WideEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding of 16-bit rows that returns float32."""

    def __call__(self, x: mx.array) -> mx.array:
        return nn.Embedding.__call__(self, x).astype(mx.float32)  # type: ignore[no-any-return]


class WideQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A quantised embedding with 16-bit scales that dequantises its rows in float32."""

    def __call__(self, x: mx.array) -> mx.array:
        scales, biases = self["scales"][x], self.get("biases")
        affine = self.mode == "affine"  # other modes have 8-bit scales, which are not cast
        rows: mx.array = mx.dequantize(
            self["weight"][x],
            scales=scales.astype(mx.float32) if affine else scales,
            biases=None if biases is None else biases[x].astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return rows.astype(mx.float32)


_CALLS: dict[Callable[..., Any], tuple[str, ...]] = {
    nn.Linear.__call__: ("weight",),
    SummedLinear.__call__: ("weight",),
    nn.QuantizedLinear.__call__: ("scales", "biases"),
    SummedQuantizedLinear.__call__: ("scales", "biases"),
    SwitchLinear.__call__: ("weight",),
    QuantizedSwitchLinear.__call__: ("scales", "biases"),
    MultiLinear.__call__: ("weight",),
    QuantizedMultiLinear.__call__: ("scales", "biases"),
    nn.Embedding.__call__: ("weight",),
    nn.QuantizedEmbedding.__call__: ("scales", "biases"),
}
"""`__call__` of a class -> its parameters that are only multiplied by or looked up."""

_WIDE = {nn.Embedding: WideEmbedding, nn.QuantizedEmbedding: WideQuantizedEmbedding}


def keep_16bit_weights(model: Module) -> set[str]:
    """Names of the parameters that may stay in 16 bits while the model computes in float32.

    Embeddings change their class, so that they return float32.
    """
    names = set()
    for path, module in model.named_modules():
        fields = _CALLS.get(type(module).__call__, ())
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            if type(module) not in _WIDE:
                continue
            module.__class__ = _WIDE[type(module)]
        names |= {f"{path}.{field}" if path else field for field in fields if field in module}
    return names
