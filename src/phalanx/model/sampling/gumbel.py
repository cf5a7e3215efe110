"""Keyed Gumbel noise: a number for every (seed, choice, position, token), with no state and no stream (design: Keyed
sampling).

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) used by
index: token t of the stream that starts at a key gets the stream's t-th output, so that noise for a few candidates
costs only those. Integer arithmetic decides everything but the last two logarithms. Knows no logits and no requests.
"""

from __future__ import annotations

import hashlib
import struct

import mlx.core as mx
import numpy as np

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
BITS = 31  # of the 64 are used: a signed conversion to float is several times faster than an unsigned one
TINY = 1e-30


def gumbel_key(seed: int, choice: int, index: int) -> int:
    """The 64-bit key of one position of one choice.

    A cryptographic hash, so that neighbouring seeds, choices and positions have nothing in common.

    Args:
        seed: 0 <= seed < 2**64.
        choice: index among the request's n.
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
        float32, finite, in about [-3.1, 22.2]: P(noise > g) keeps its relative precision up to the top.
    """
    bits = _splitmix(keys, tokens) >> (64 - BITS)
    uniform = (bits.astype(mx.int32).astype(mx.float32) + 0.5) * 2.0**-BITS
    uniform = mx.minimum(uniform, 1.0 - 2.0**-24)  # rounding may have reached 1, whose logarithm is infinite
    return -mx.log(_exponential(uniform))


def _exponential(uniform: mx.array) -> mx.array:
    """-log(1 - uniform), precise for the smallest values, which decide who wins; half the time of `log1p` on a CPU.

    Kahan's correction: what rounding 1 - u loses is put back as the ratio u / (1 - (1 - u)). `TINY` makes the ratio of
    two zeros 1 and changes nothing else.
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
