"""MLA absorption for short queries: makes multi-head latent attention (MLA) verify a few tokens as fast as it decodes.

mlx-lm's blocks use absorption, which works directly on the latent cache, only for one token per row. For more tokens
they expand the whole cache into heads: right for a long chunk, but for a few tokens it costs many times the attention
itself (3,578 ms against 163 for 5 tokens after 4,096). The blocks here pass a few tokens per row to mlx-lm's own code
as rows of one token each that share a cache.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from phalanx.model.modules import class_key

BLOCKS = {
    ("deepseek_v3", "DeepseekV3Attention"),
    ("glm4_moe_lite", "Glm4MoeLiteAttention"),
    ("longcat_flash", "LongcatFlashMLA"),
}
"""Blocks that are called as (x, mask, cache) and use absorption for single tokens."""

MAX_SHORT_QUERY = 17
"""Most tokens of a short query: the last committed token and the largest number of drafts."""


def absorb_short_queries(model: Module) -> int:
    """Make the MLA blocks of a loaded model use absorption for short queries. Returns the number of blocks."""
    modules = [module for module in model.modules() if class_key(module) in BLOCKS]
    classes = {type(module): _short_queries(type(module)) for module in modules}
    for module in modules:
        module.__class__ = classes[type(module)]
    return len(modules)


def _short_queries(cls: type[Module]) -> type[Module]:
    """The block's class with another `__call__`; the state of blocks stays as it is."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows, length, width = x.shape
        if not 1 < length <= MAX_SHORT_QUERY or cache is None or not isinstance(mask, mx.array):
            expanded: mx.array = cls.__call__(self, x, mask, cache)
            return expanded
        visible = mx.broadcast_to(mask, (rows, 1, length, mask.shape[-1])).reshape(rows * length, 1, 1, -1)
        cache_view = _SingleTokens(cache, rows, length)
        flat = cls.__call__(self, x.reshape(rows * length, 1, width), visible, cache_view)
        output: mx.array = flat.reshape(rows, length, -1)
        return output

    return type(f"Short{cls.__name__}", (cls,), {"__call__": call, "__module__": cls.__module__})


class _SingleTokens:
    """A view of a cache as rows of one token each: token i of row r is row `r * length + i`, at its own position."""

    def __init__(self, cache: Any, rows: int, length: int) -> None:
        self._cache = cache
        self._rows = rows
        self._length = length
        first = mx.array(cache.offset)
        starts = mx.broadcast_to(first.reshape(-1, 1), (rows, 1))
        self.offset = (starts + mx.arange(length, dtype=starts.dtype)).reshape(-1)  # [rows * length]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [rows * length, heads, 1, dim]. Returns all keys and values for each of these rows."""
        fetched = self._cache.update_and_fetch(self._together(keys), self._together(values))
        return self._for_each(fetched[0]), self._for_each(fetched[1])

    def _together(self, new: mx.array) -> mx.array:
        heads, dim = new.shape[1], new.shape[3]
        return new.reshape(self._rows, self._length, heads, dim).swapaxes(1, 2)

    def _for_each(self, cached: mx.array) -> mx.array:
        if self._rows == 1:
            return mx.broadcast_to(cached, (self._length, *cached.shape[1:]))
        return mx.repeat(cached, self._length, axis=0)
