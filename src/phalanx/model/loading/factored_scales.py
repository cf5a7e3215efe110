"""Keeps scales of GGUF's Q4_K in memory as small as they are in a file: an int8 of each group times a float16 of eight.

A directory has their products, in float32, which MLX reads everywhere; they are a third of a matrix of 4 bits. With
factors (`kern_factored` in native/include/kern/quant.h) products have the same bits.
"""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
from mlx.nn.layers.base import Module

from phalanx.kernels import install
from phalanx.model.loading.huge_pages import HugePages


def factor_scales(model: Module, repacked: Collection[str]) -> None:
    """Replace scales and biases by their factors, in modules where all have some.

    Args:
        repacked: names of the parameters that are repacked; no others are replaced.
    """
    wide = {}
    for path, module in model.named_modules():
        numbers = [module.get(field) for field in ("scales", "biases")]
        if f"{path}.scales" in repacked and all(one is not None and one.dtype == mx.float32 for one in numbers):
            if numbers[0].shape[-1] % 8 == 0:
                wide[path] = module
    pages = HugePages(
        {
            f"{path}.{field}": module[field].size * 10 // 8
            for path, module in wide.items()
            for field in ("scales", "biases")
        }
    )
    for path, module in wide.items():
        factors = {}
        for field in ("scales", "biases"):
            *rows, groups = module[field].shape
            factors[field] = pages.buffer(f"{path}.{field}", (*rows, groups * 10 // 8), mx.uint8)
        if all(install.factor(module[field], out) for field, out in factors.items()):
            module.update(factors)
