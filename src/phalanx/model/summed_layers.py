"""Layers of a split model that sum over ranks through a `Reducer`, in place of mlx-lm's unchecked ones.

`loading/parallel.py` puts them into a model, `cpu/` gives them other weights.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

Sum = Callable[[mx.array], mx.array]
"""Sums an array [..., width] over the ranks."""


class SummedLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer with some of the inputs on each rank. The bias is added after the all-reduce."""

    all_sum: Sum

    def __call__(self, x: mx.array) -> mx.array:
        y = self.all_sum(x @ self["weight"].T)
        return y + self["bias"] if "bias" in self else y


class SummedQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """`SummedLinear` with a quantised matrix."""

    all_sum: Sum

    def __call__(self, x: mx.array) -> mx.array:
        y = self.all_sum(
            mx.quantized_matmul(
                x,
                self["weight"],
                scales=self["scales"],
                biases=self.get("biases"),
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
        )
        return y + self["bias"] if "bias" in self else y


class SummedRMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """RMSNorm of a vector split equally over the ranks; computed in float32."""

    all_sum: Sum
    ranks: int

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        squares = self.all_sum(wide.square().sum(axis=-1, keepdims=True))
        scale = mx.rsqrt(squares / (x.shape[-1] * self.ranks) + self.eps)
        normed: mx.array = (wide * scale * self["weight"]).astype(mx.result_type(x, self["weight"]))
        return normed
