"""What a step that is dispatched beside the step before costs in memory: MLX copies each cache that is being read.

    python benchmarks/cache_copies.py

Two decode steps of one attention layer write to a cache of 78 MiB and read it. Prints as JSON the peak of memory above
the cache, in MiB, for three orders:

    waiting      the second step is built after the first is computed
    built        it is built while the first is computed, and dispatched after that
    dispatched   it is built and dispatched while the first is computed, as `mlx_lm.generate` does
"""

from __future__ import annotations

import json
from collections.abc import Callable

import mlx.core as mx

HEADS, CAPACITY, LENGTH, DIM = 8, 20_000, 15_000, 128


class Layer:
    """One attention layer, its cache, and a token's query."""

    def __init__(self) -> None:
        self.cache = mx.zeros((1, HEADS, CAPACITY, DIM))
        self.token = mx.random.normal((1, HEADS, 1, DIM))
        mx.eval(self.cache, self.token)

    def step(self, at: int, token: mx.array) -> mx.array:
        """Build a step. Nothing is computed."""
        self.cache[:, :, at : at + 1] = token
        seen = self.cache[:, :, :LENGTH]
        return mx.fast.scaled_dot_product_attention(token, seen, seen, scale=1.0)


def waiting(layer: Layer) -> mx.array:
    first = layer.step(0, layer.token)
    mx.eval(first, layer.cache)
    return layer.step(1, first)


def built(layer: Layer) -> mx.array:
    first = layer.step(0, layer.token)
    mx.async_eval(first, layer.cache)  # type: ignore[no-untyped-call]
    second = layer.step(1, first)
    mx.eval(first)
    return second


def dispatched(layer: Layer) -> mx.array:
    first = layer.step(0, layer.token)
    mx.async_eval(first, layer.cache)  # type: ignore[no-untyped-call]
    second = layer.step(1, first)
    mx.async_eval(second, layer.cache)  # type: ignore[no-untyped-call]
    return second


def extra_mib(order: Callable[[Layer], mx.array]) -> float:
    """Peak memory of two steps, beyond the cache and what was active before."""
    layer = Layer()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(order(layer), layer.cache)
    return round((mx.get_peak_memory() - before) / 2**20, 1)


if __name__ == "__main__":
    print(json.dumps({order.__name__: extra_mib(order) for order in (waiting, built, dispatched)}))
