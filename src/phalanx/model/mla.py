"""Latent attention (MLA) for short queries: the tokens of a verification are attended to like single ones.

mlx-lm's blocks take the absorbed path, which works on the latent cache as it is, for one token per row only; for more
they expand the whole cache into heads, which is right for a long chunk and costs many times the attention itself for
a few tokens (3,578 ms against 163 at 5 tokens behind 4,096). The blocks here hand few tokens per row
to mlx-lm's own code as that many rows of one token which share a cache. Does not know plans or who drafts.
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
"""Blocks called as (x, mask, cache) that take the absorbed path for single tokens."""

LONGEST = 17
"""Tokens of a short query: y and as many drafts as can be asked for."""


def absorb_short_queries(model: Module) -> int:
    """Let the latent attention of a model that is loaded take short queries so; how many blocks that are."""
    found = [module for module in model.modules() if class_key(module) in BLOCKS]
    classes = {type(module): _short_queries(type(module)) for module in found}
    for module in found:
        module.__class__ = classes[type(module)]
    return len(found)


def _short_queries(cls: type[Module]) -> type[Module]:
    """The block with another way to call it; its state stays as it is."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows, length, width = x.shape
        if not 1 < length <= LONGEST or cache is None or not isinstance(mask, mx.array):
            whole: mx.array = cls.__call__(self, x, mask, cache)
            return whole
        seen = mx.broadcast_to(mask, (rows, 1, length, mask.shape[-1])).reshape(rows * length, 1, 1, -1)
        singles = _SingleTokens(cache, rows, length)
        flat = cls.__call__(self, x.reshape(rows * length, 1, width), seen, singles)
        several: mx.array = flat.reshape(rows, length, -1)
        return several

    return type(f"Short{cls.__name__}", (cls,), {"__call__": call, "__module__": cls.__module__})


class _SingleTokens:
    """A cache seen as rows of one token each: token i of row r is row `r * length + i`, at its own position."""

    def __init__(self, cache: Any, rows: int, length: int) -> None:
        self._cache = cache
        self._rows = rows
        self._length = length
        first = mx.array(cache.offset)
        starts = mx.broadcast_to(first.reshape(-1, 1), (rows, 1))
        self.offset = (starts + mx.arange(length, dtype=starts.dtype)).reshape(-1)  # [rows * length]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append what each token adds, [rows * length, heads, 1, dim]; all keys and values, for every token."""
        fetched = self._cache.update_and_fetch(self._together(keys), self._together(values))
        return self._for_each(fetched[0]), self._for_each(fetched[1])

    def _together(self, new: mx.array) -> mx.array:
        heads, dim = new.shape[1], new.shape[3]
        return new.reshape(self._rows, self._length, heads, dim).swapaxes(1, 2)

    def _for_each(self, cached: mx.array) -> mx.array:
        if self._rows == 1:
            return mx.broadcast_to(cached, (self._length, *cached.shape[1:]))
        return mx.repeat(cached, self._length, axis=0)
