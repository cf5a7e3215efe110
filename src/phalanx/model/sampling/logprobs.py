"""Log-probabilities and ranks of tokens under the raw distribution, and the most likely tokens.

Also orders the vocabulary for the sampler's filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from phalanx.kernels import install
from phalanx.types import TokenLogprobs

LAST = 2**64 - 1
"""A key that sorts behind all others."""


def ranked(z: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """The first `width` tokens in the order "value descending, token id ascending".

    Sorts integers that contain both, so that the result does not depend on the sort's stability: the bits of a float
    that is not positive, as an unsigned integer, increase as its value decreases.

    Args:
        z: [R, V] float32, every value <= 0 (-inf included).
        width: 1 <= width <= V.

    Returns:
        Values [R, width] float32 and token ids [R, width] uint64.
    """
    if (native := install.operations()) is not None:
        values, tokens = native.top_k(z, width)
        return values, tokens.astype(mx.uint64)
    ids = mx.arange(z.shape[1], dtype=mx.uint64)
    keys = (z.view(mx.uint32).astype(mx.uint64) << 32) | ids
    keys = mx.sort(fewer_keys(keys, width), axis=-1)[:, :width]
    return (keys >> 32).astype(mx.uint32).view(mx.float32), keys & 0xFFFFFFFF


def fewer_keys(keys: mx.array, width: int) -> mx.array:
    """Fewer keys [R, K], among them the `width` smallest of each row, in the way that suits the device."""
    if mx.default_device() != mx.Device(mx.cpu):
        return narrowed(keys, width)
    return mx.partition(keys, width - 1, axis=-1)[:, :width] if width < keys.shape[1] else keys


def narrowed(keys: mx.array, width: int) -> mx.array:
    """`fewer_keys` for a GPU, whose partition is a sort of the whole vocabulary.

    The `width` smallest keys lie in the `width` blocks with the smallest minima, because no other block has a key below
    any of these minima. So two short sorts replace a long one: for 64 of 152,000 keys, of 2,375 minima and 4,096 keys.

    Args:
        keys: [R, V] uint64; the lower half of a key is its place.

    Returns:
        [R, K]; `keys` itself where narrowing would not halve what is sorted.
    """
    rows, size = keys.shape
    block = 1 << max(1, round(math.log2(size / width) / 2))
    count = -(-size // block)
    if 2 * (count + width * block) > size:
        return keys
    last = mx.array(np.array(LAST, dtype=np.uint64))
    blocks = mx.pad(keys, [(0, 0), (0, count * block - size)], constant_values=last).reshape(rows, count, block)
    smallest = mx.min((blocks >> 32).astype(mx.uint32), axis=-1).astype(mx.uint64)
    order = mx.sort((smallest << 32) | mx.arange(count, dtype=mx.uint64), axis=-1)  # of equals, the first block has
    chosen = (order[:, :width] & 0xFFFFFFFF).astype(mx.int32)  # the smallest key
    return mx.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, width * block)


def log_of_sum(centred: mx.array) -> mx.array:
    """log(sum(exp(row))) of rows whose largest value is 0, [R, 1]."""
    if (native := install.operations()) is not None:
        return native.logsumexp(centred, keepdims=True)
    return mx.log(mx.sum(mx.exp(centred), axis=-1, keepdims=True))


class Scorer:
    """Log-probabilities of one token per row. The caller evaluates `arrays` together with others, then calls `read`.

    Args:
        raw: [R, V] float32, unprocessed logits.
        tokens: [R] integers.
        tops: [R], number of most likely tokens to report for each row.
    """

    def __init__(self, raw: mx.array, tokens: mx.array, tops: Sequence[int]) -> None:
        self._tops = tops
        centred = raw - mx.max(raw, axis=-1, keepdims=True)
        log_total = log_of_sum(centred)
        chosen = mx.expand_dims(tokens.astype(mx.int32), -1)
        value = mx.take_along_axis(centred, chosen, axis=-1)
        earlier = mx.arange(raw.shape[1], dtype=mx.int32) < chosen
        rank = mx.sum((centred > value) | ((centred == value) & earlier), axis=-1)
        self.arrays = [tokens, mx.squeeze(value - log_total, -1), rank]
        if max(tops) > 0:
            values, ids = ranked(centred, min(max(tops), raw.shape[1]))
            self.arrays += [values - log_total, ids]

    def read(self) -> list[TokenLogprobs]:
        """One entry per row. The arrays must have been evaluated."""
        tokens, values, ranks, *top = (np.array(array) for array in self.arrays)
        entries = []
        for row, m in enumerate(self._tops):
            best = list(zip(top[1][row, :m].tolist(), top[0][row, :m].tolist(), strict=True)) if m else []
            entries.append(TokenLogprobs(int(tokens[row]), float(values[row]), int(ranks[row]), best))
        return entries
