"""A stand-in for GPUs that round the operands of float32 products to TF32 (10 bits of mantissa, 8 of exponent)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest

DROPPED = 23 - 10  # bits of a float32's mantissa


def to_tf32(x: mx.array) -> mx.array:
    """Rounded to the nearest TF32 number; other dtypes unchanged."""
    if x.dtype != mx.float32:
        return x
    bits = x.view(mx.uint32)
    return ((bits + (1 << (DROPPED - 1))) & (0xFFFFFFFF << DROPPED & 0xFFFFFFFF)).view(mx.float32)


@contextmanager
def tf32_products() -> Iterator[None]:
    """Matrix products of several rows round their operands, as MLX's do on newer GPUs; those of one row are exact."""
    stock, stock_addmm, stock_at = mx.matmul, mx.addmm, mx.array.__matmul__

    def rounds(a: mx.array) -> bool:
        return a.ndim > 1 and a.shape[-2] > 1

    def matmul(a: mx.array, b: mx.array, **more: object) -> mx.array:
        return stock(to_tf32(a), to_tf32(b), **more) if rounds(a) else stock(a, b, **more)

    def at(a: mx.array, b: mx.array) -> mx.array:
        return stock(to_tf32(a), to_tf32(b)) if rounds(a) else stock_at(a, b)

    def addmm(c: mx.array, a: mx.array, b: mx.array, *rest: object, **more: object) -> mx.array:
        return stock_addmm(c, *((to_tf32(a), to_tf32(b)) if rounds(a) else (a, b)), *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "matmul", matmul)
        patch.setattr(mx, "addmm", addmm)
        patch.setattr(mx.array, "__matmul__", at)
        yield
