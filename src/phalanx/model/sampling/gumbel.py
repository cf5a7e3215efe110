"""Keyed Gumbel noise: a number for every (seed, choice, position, token), without state (design: Keyed sampling).

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), indexed: a
key starts a stream, and token t gets the stream's t-th output, so that noise for a few candidates costs only those. All
arithmetic is on integers up to the last two logarithms.
"""

from __future__ import annotations

import hashlib
import struct

import mlx.core as mx
import numpy as np

GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
BITS = 31  # used of 64: converting signed integers to float is several times faster than unsigned ones
TINY = 1e-30  # makes 0 / 0 a 1, and changes no other ratio


def gumbel_key(seed: int, choice: int, index: int) -> int:
    """The 64-bit key of one output position of one choice.

    It is a cryptographic hash, so that the noise of neighbouring seeds, choices and positions is independent.

    Args:
        seed: 0 <= seed < 2**64.
        choice: index among the request's n choices.
        index: output position, 0-based.
    """
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def gumbel(keys: mx.array, tokens: mx.array) -> mx.array:
    """Standard Gumbel noise.

    Args:
        keys: uint64, from `gumbel_key`; broadcasts against `tokens`, usually [rows, 1].
        tokens: uint64 token ids, [V] or [rows, K].

    Returns:
        float32, finite, in about [-3.1, 22.2]. P(noise > g) is accurate, relative to itself, up to the largest g.
    """
    bits = _splitmix(keys, tokens) >> (64 - BITS)
    uniform = (bits.astype(mx.int32).astype(mx.float32) + 0.5) * 2.0**-BITS
    uniform = mx.minimum(uniform, 1.0 - 2.0**-24)  # rounding can give 1, whose noise would be infinite
    return -mx.log(_exponential(uniform))


def _exponential(uniform: mx.array) -> mx.array:
    """-log(1 - uniform), accurate for small values, which give the largest noise; half the time of `log1p` on a CPU.

    Kahan's correction: the factor u / (1 - (1 - u)) restores what rounding 1 - u loses. `TINY` makes the ratio of two
    zeros 1 and changes nothing else.
    """
    rest = 1.0 - uniform
    return uniform * ((TINY - mx.log(rest)) / ((1.0 - rest) + TINY))


def _splitmix(keys: mx.array, tokens: mx.array) -> mx.array:
    state = keys + (tokens + 1) * _constant(GAMMA)
    state = (state ^ (state >> 30)) * _constant(MIX_1)
    state = (state ^ (state >> 27)) * _constant(MIX_2)
    return state ^ (state >> 31)


def _constant(value: int) -> mx.array:
    return mx.array(np.array(value, dtype=np.uint64))  # through numpy: MLX refuses Python integers from 2**63 on
