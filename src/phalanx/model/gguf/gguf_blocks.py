"""Turns GGUF's blocks of weights into MLX's quantisation in groups of 32: affine (code * scale + bias), or MXFP4.

Four types are quantised again, to 8 bits: Q2_K, Q6_K, IQ2_XS and IQ2_S scale groups of 16, which MLX does not have, and
too finely for one scale of 32 weights. All others are exact:

- Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: the codes and the scales, of 16 bits, of the file.
- MXFP4: codes and scales of the file, too. Its code 8, which ggml reads as 0, is -0 in MLX.
- Q4_K, Q5_K: the codes of the file; a block's scale times a group's has 17 bits, which float32 holds.
- Q3_K, IQ1, IQ3, IQ4, IQ2_XXS and TQ types: a weight is a small whole number times a unit of its group or block, so it
  has a code of 2, 4 or 8 bits. These are rare: PyPI's `gguf`, which has their large tables, computes the weights.

Layouts: ggml's ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from phalanx.errors import WeightsError
from phalanx.model.gguf.gguf_header import DAMAGED

GROUP = 32
MAX_EXPONENT = 252  # of MXFP4: 6, its largest value, times 2**(253 - 127) is infinite in float32
PIECE = 1 << 17  # bytes of blocks that are computed at once through their weights: a piece fits a cache
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
        found = DIRECT[kind](blocks) if kind in DIRECT else _through_weights(kind, blocks)
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


# -- codes of the file -----------------------------------------------------------------------------------------------


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


# -- codes by the weights ------------------------------------------------------------------------------------------


def _through_weights(kind: str, blocks: Array) -> Groups:
    step = max(1, PIECE // blocks.shape[1])
    pieces = [_fitted(kind, blocks[first : first + step]) for first in range(0, len(blocks), step)]
    codes, scales, biases = (np.concatenate([piece[i] for piece in pieces]) for i in range(3))
    return Groups(codes, scales, biases, max(piece.error for piece in pieces))


def _fitted(kind: str, blocks: Array) -> Groups:
    """The nearest codes to the weights of blocks."""
    row = blocks.reshape(1, -1)  # the library takes 16 rows at a time, which are many calls for short ones
    weights = gguf.quants.dequantize(row, gguf.GGMLQuantizationType[kind]).reshape(-1, GROUP)
    scales, biases = SCALES[kind](blocks, weights)
    scale, bias = (part.astype(np.float32)[:, None] for part in (scales, biases))
    codes = np.rint((weights - bias) / np.where(scale != 0, scale, np.float32(1)))
    error = np.abs(codes * scale + bias - weights).max(initial=0.0)
    return Groups(np.nan_to_num(codes).astype(np.uint8), scales, biases, float(error))


def _even_steps(_: Array, weights: Array) -> tuple[Array, Array]:
    """256 equidistant values from the least to the largest weight of a group, or a little beyond."""
    biases = -_half_from(-weights.min(axis=1))
    return _half_from((weights.max(axis=1) - biases) / np.float32(255)), biases


def _half_from(numbers: Array) -> Array:
    """The least float16 from each number on."""
    near = numbers.astype(np.float16)
    found: Array = np.where(near < numbers, np.nextafter(near, np.float16(np.inf)), near)
    return found


def _unit(at: int, least: int, sign: int = 1) -> Callable[[Array, Array], tuple[Array, Array]]:
    """For weights that are whole numbers from `least` on, times a unit of the block: `sign` times its float16."""

    def scales(blocks: Array, weights: Array) -> tuple[Array, Array]:
        unit = np.float16(sign) * np.repeat(_half(blocks, at), len(weights) // len(blocks))
        return unit, np.float16(least) * unit

    return scales


def _of_groups(blocks: Array, numbers: Array, part: float = 1.0) -> Array:
    """A block's float16 at its start times a number of each of its groups times a power of 2: float32 [groups]."""
    found: Array = (_half(blocks, 0).astype(np.float32)[:, None] * numbers * np.float32(part)).ravel()
    return found


def _in_turn(packed: Array) -> Array:
    """Low and high half of the first byte, then of the next one, along the last axis."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _iq4_xs(blocks: Array, _: Array) -> tuple[Array, Array]:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    unit = _of_groups(blocks, (_in_turn(blocks[:, 4:8]) | (high << 4)).astype(np.float32) - 32)
    return unit, -128 * unit


def _iq3_s(blocks: Array, _: Array) -> tuple[Array, Array]:
    unit = _of_groups(blocks, 2 * _in_turn(blocks[:, 106:110]) + 1)  # odd numbers from -15 to 15
    return 2 * unit, -15 * unit


def _iq3_xxs(blocks: Array, _: Array) -> tuple[Array, Array]:
    unit = _of_groups(blocks, 2 * (blocks[:, 69::4] >> 4) + 1, 0.25)  # up to 62
    return unit, -64 * unit


def _iq2_xxs(blocks: Array, _: Array) -> tuple[Array, Array]:
    unit = _of_groups(blocks, 2 * (blocks[:, 9::8] >> 4) + 1, 0.125)  # up to 43
    return unit, -64 * unit


def _iq1_s(blocks: Array, _: Array) -> tuple[Array, Array]:
    top = blocks[:, 35::2]
    unit = _of_groups(blocks, 2 * (top >> 4 & 7) + 1)  # -1, 0 or 1, and an eighth up or down
    return unit, unit * np.where(top >> 7, np.float32(-1.125), np.float32(-0.875)).ravel()


def _iq1_m(blocks: Array, weights: Array) -> tuple[Array, Array]:
    bits = (blocks[:, 49::2] >> 4).astype(np.uint16) << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(bits, axis=1).view(np.float16).astype(np.float32)
    unit = np.repeat(d / 8, len(weights) // len(blocks))  # odd numbers from -135 to 135
    return 2 * unit, -135 * unit


DIRECT: dict[str, Callable[[Array], Groups]] = {
    "Q4_0": _q4, "Q4_1": _q4_1, "Q5_0": _q5, "Q5_1": _q5_1, "Q8_0": _q8, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "MXFP4": _mxfp4,
}  # fmt: skip
SCALES: dict[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "Q2_K": _even_steps, "Q6_K": _even_steps, "IQ2_XS": _even_steps, "IQ2_S": _even_steps,
    "Q3_K": _unit(108, -128, sign=-1),  # -124 to 128: as negative numbers they fit
    "IQ4_NL": _unit(0, -128), "TQ1_0": _unit(52, -1), "TQ2_0": _unit(64, -1),
    "IQ4_XS": _iq4_xs, "IQ3_S": _iq3_s, "IQ3_XXS": _iq3_xxs, "IQ2_XXS": _iq2_xxs, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
}  # fmt: skip
"""Scales and biases of groups, by blocks and their weights."""
BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q2_K": 8, "Q3_K": 8, "Q6_K": 8,
    "MXFP4": 4, "IQ4_NL": 8, "IQ4_XS": 8, "IQ3_S": 4, "IQ3_XXS": 8, "IQ2_S": 8, "IQ2_XS": 8, "IQ2_XXS": 8, "IQ1_M": 8,
    "IQ1_S": 2, "TQ1_0": 2, "TQ2_0": 2,
}  # fmt: skip
"""Bits of a weight that MLX gets, by the type in the file."""
WIDE = ("Q4_K", "Q5_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S", "IQ1_M")
"""Types whose scales need float32."""


def mode_of(kind: str) -> str:
    """MLX's name of a type's quantisation."""
    return "mxfp4" if kind == "MXFP4" else "affine"


def scales_dtypes(kind: str) -> dict[str, str]:
    """By the parameters of a module beside its codes: their dtypes, in safetensors' words."""
    if kind == "MXFP4":
        return {"scales": "U8"}
    dtype = "F32" if kind in WIDE else "F16"
    return {"scales": dtype, "biases": dtype}
