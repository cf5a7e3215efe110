"""Turns GGUF's blocks of weights into MLX's quantisation in groups of 32: affine (code * scale + bias), or MXFP4.

Exact: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (scales of 16 bits, as in the file), Q4_K and Q5_K (the product of a block's scale
and a group's has 17 bits, which float32 holds), MXFP4 (the codes and scales of the file; its code 8, which ggml reads
as 0, is -0 in MLX). Q2_K, Q3_K and Q6_K scale groups of 16, which MLX does not have: these are quantised again, to 8
bits. Layouts: ggml's ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.errors import WeightsError
from phalanx.model.gguf.gguf_header import DAMAGED

GROUP = 32
MAX_EXPONENT = 252  # of MXFP4: 6, its largest value, times 2**(253 - 127) is infinite in float32
Array = npt.NDArray[Any]


class Groups(NamedTuple):
    """Groups of weights, in the order of the file."""

    codes: Array  # uint8 [groups, 32]
    scales: Array  # [groups]; float16 or float32, of MXFP4 uint8: the exponent of 2, plus 127
    biases: Array | None  # as scales; None: MXFP4
    error: float = 0.0  # largest difference from the file's weights


def to_groups(tensor: str, kind: str, blocks: Array) -> Groups:
    """Convert blocks.

    Args:
        tensor: its file and name, for errors.
        kind: a key of `BITS`.
        blocks: uint8 [blocks, bytes of a block].

    Raises:
        WeightsError: a scale is not finite, or too large for the product with its codes.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = requantised(DEQUANTIZE[kind](blocks)) if kind in DEQUANTIZE else EXACT[kind](blocks)
    if found.biases is None:
        finite = found.scales.max(initial=0) <= MAX_EXPONENT
    else:
        finite = np.isfinite(found.scales).all() and np.isfinite(found.biases).all()
    if not finite:
        raise WeightsError(f"{tensor} has a scale that is not finite.", remedy=DAMAGED)
    return found


def pack(codes: Array, bits: int) -> Array:
    """Codes as MLX packs them: a row of bits, the lowest first. Returns uint8."""
    if bits == 8:
        return codes
    if bits == 4:
        pairs: Array = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return pairs
    eight = codes.reshape(-1, 8).astype("<u8")
    whole: Array = np.bitwise_or.reduce(eight << (np.arange(8, dtype="<u8") * np.uint64(bits)), axis=1)
    return whole[:, None].view(np.uint8)[:, :bits]


def requantised(weights: Array) -> Groups:
    """The nearest of 256 equidistant values from the least to the largest weight of a group."""
    groups = weights.reshape(-1, GROUP)
    low, high = groups.min(axis=1), groups.max(axis=1)
    scales = (high - low) / np.float32(255)
    steps = (groups - low[:, None]) / np.where(scales > 0, scales, np.float32(1))[:, None]
    codes = np.clip(np.rint(steps), 0, 255)
    error = np.abs(codes * scales[:, None] + low[:, None] - groups).max(initial=0.0)
    return Groups(np.nan_to_num(codes).astype(np.uint8), scales, low, float(error))


# -- exact ---------------------------------------------------------------------------------------------------------


def _half(blocks: Array, at: int) -> Array:
    found: Array = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
    return found[:, 0]


def _nibbles(packed: Array) -> Array:
    """Low halves of all bytes, then the high ones, along the last axis."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4(blocks: Array) -> Groups:
    d = _half(blocks, 0)
    return Groups(_nibbles(blocks[:, 2:18]), d, np.float16(-8) * d)


def _q4_1(blocks: Array) -> Groups:
    return Groups(_nibbles(blocks[:, 4:20]), _half(blocks, 0), _half(blocks, 2))


def _fifth(blocks: Array, at: int) -> Array:
    """Codes of 5 bits: at `at` 4 bytes with the highest bits, then 16 with the others."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    codes: Array = _nibbles(blocks[:, at + 4 : at + 20]) | (high << 4)
    return codes


def _q5(blocks: Array) -> Groups:
    d = _half(blocks, 0)
    return Groups(_fifth(blocks, 2), d, np.float16(-16) * d)


def _q5_1(blocks: Array) -> Groups:
    return Groups(_fifth(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8(blocks: Array) -> Groups:
    d = _half(blocks, 0)
    return Groups(blocks[:, 2:34] ^ 128, d, np.float16(-128) * d)


def _mxfp4(blocks: Array) -> Groups:
    return Groups(_nibbles(blocks[:, 1:17]), blocks[:, 0], None)


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """Scales and minima of the 8 groups in a block, from 12 bytes."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return scales, minima


def _of_super_blocks(blocks: Array, codes: Array) -> Groups:
    scales, minima = _six_bits(blocks[:, 4:16])
    d, dmin = (_half(blocks, at).astype(np.float32)[:, None] for at in (0, 2))
    return Groups(codes.reshape(-1, GROUP), (d * scales).ravel(), (-dmin * minima).ravel())


def _q4_k(blocks: Array) -> Groups:
    return _of_super_blocks(blocks, _nibbles(blocks[:, 16:144].reshape(-1, 4, 32)))


def _q5_k(blocks: Array) -> Groups:
    low = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # bit i belongs to group i
    return _of_super_blocks(blocks, low | (high << 4))


# -- quantised again -----------------------------------------------------------------------------------------------

SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def _pairs_of_bits(packed: Array) -> Array:
    """Codes of 2 bits: of each 32 bytes the lowest bits, then the next ones. uint8 [blocks, 16, 16]."""
    return ((packed.reshape(len(packed), -1, 1, 32) >> SHIFTS) & 3).reshape(-1, 16, 16)


def _q2_k(blocks: Array) -> Array:
    d, dmin = (_half(blocks, at).astype(np.float32)[:, None] for at in (80, 82))
    scales, minima = d * (blocks[:, :16] & 15), dmin * (blocks[:, :16] >> 4)
    weights: Array = scales[..., None] * _pairs_of_bits(blocks[:, 16:80]) - minima[..., None]
    return weights


def _q3_k(blocks: Array) -> Array:
    low, high = _nibbles(blocks[:, 96:104]), blocks[:, None, 104:108]
    scales = (low | (((high >> SHIFTS) & 3).reshape(-1, 16) << 4)).astype(np.int8) - np.int8(32)
    top = ((blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1).reshape(-1, 16, 16)
    codes = (_pairs_of_bits(blocks[:, 32:96]) | (top << 2)).astype(np.int8) - np.int8(4)
    return _of_groups(_half(blocks, 108), scales, codes)


def _q6_k(blocks: Array) -> Array:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    codes = (low | (_pairs_of_bits(blocks[:, 128:192]) << 4)).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _of_groups(_half(blocks, 208), scales, codes)


def _of_groups(d: Array, scales: Array, codes: Array) -> Array:
    weights: Array = (d.astype(np.float32)[:, None] * scales)[..., None] * codes
    return weights


EXACT: dict[str, Callable[[Array], Groups]] = {
    "Q4_0": _q4, "Q4_1": _q4_1, "Q5_0": _q5, "Q5_1": _q5_1, "Q8_0": _q8, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "MXFP4": _mxfp4,
}  # fmt: skip
DEQUANTIZE: dict[str, Callable[[Array], Array]] = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q6_K": _q6_k}
BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q2_K": 8, "Q3_K": 8, "Q6_K": 8,
    "MXFP4": 4,
}  # fmt: skip
"""Bits of a weight that MLX gets, by the type in the file."""


def mode_of(kind: str) -> str:
    """MLX's name of a type's quantisation."""
    return "mxfp4" if kind == "MXFP4" else "affine"


def scales_dtypes(kind: str) -> dict[str, str]:
    """By the parameters of a module beside its codes: their dtypes, in safetensors' words."""
    if kind == "MXFP4":
        return {"scales": "U8"}
    dtype = "F32" if kind.endswith("_K") else "F16"
    return {"scales": dtype, "biases": dtype}
