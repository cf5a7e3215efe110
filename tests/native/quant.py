"""Quantised matrices for the tests of kern/quant.h: random codes and scales, and what they mean in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
from kern import F32, Array, Int, Int64, Pointer, call, decode, encode, library, pointer, unaligned

AFFINE, MXFP4, MXFP8, NVFP4 = 0, 1, 2, 3
EXACT, FAST = 0, 1
FACTORED = 8
"""A type of scales."""
FORMATS = [(AFFINE, bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS += [(MXFP4, 4, 32), (MXFP8, 8, 32), (NVFP4, 4, 16)]
"""Mode, bits, group."""


class Quant(ctypes.Structure):
    _fields_ = [
        ("codes", Pointer),
        ("scales", Pointer),
        ("biases", Pointer),
        ("matrices", Int64),
        ("rows", Int64),
        ("width", Int64),
        ("mode", Int),
        ("bits", Int),
        ("group", Int),
        ("scale_type", Int),
        ("repacked", Int),
    ]


class Matmul(ctypes.Structure):
    _fields_ = [
        ("w", Quant),
        ("x", Pointer),
        ("out", Pointer),
        ("lhs", Pointer),
        ("rhs", Pointer),
        ("pairs", Int64),
        ("blocks", Int64),
        ("rows", Int64),
        ("repeat", Int64),
        ("transpose", Int),
        ("x_type", Int),
        ("out_type", Int),
        ("precision", Int),
    ]


class Dequantize(ctypes.Structure):
    _fields_ = [("w", Quant), ("indices", Pointer), ("out", Pointer), ("count", Int64), ("out_type", Int)]


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp8_values() -> Array:
    """E4M3 by its definition."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[code & 127 == 127] = np.nan
    return np.where(code > 127, -size, size)


FP8 = fp8_values()


@dataclass
class Matrices:
    """`matrices` of [rows, width], as a kernel reads them and as float64."""

    mode: int
    bits: int
    group: int
    scale_type: int
    codes: Array  # uint32 [matrices, rows, width * bits / 32]
    scales: Array  # [matrices, rows, width / group]
    biases: Array | None
    values: Array  # float64 [matrices, rows, width]
    scale: Array  # of each element
    size: Array  # |code * scale| + |bias|: what rounding errors are relative to
    repacked: bool = False  # rows of codes, scales and biases: each sixteen lie beside each other

    def struct(self) -> Quant:
        matrices, rows, width = self.values.shape
        return Quant(
            *(pointer(a) for a in (self.codes, self.scales, self.biases)),
            *(matrices, rows, width, self.mode, self.bits, self.group, self.scale_type, self.repacked),
        )


def random_matrices(random, mode, bits, group, matrices, rows, width, scale_type=F32, offset=0) -> Matrices:
    shape = (matrices, rows, width // group)
    codes = random.integers(0, 2**32, (matrices, rows, width * bits // 32), dtype=np.uint32)
    stream = np.unpackbits(codes.view(np.uint8), axis=-1, bitorder="little").reshape(matrices, rows, width, bits)
    numbers = (stream.astype(np.int64) << np.arange(bits)).sum(-1)
    biases, bias = None, np.zeros(shape)
    if mode == AFFINE:
        scales = encode(random.normal(size=shape) / 2**bits, scale_type)
        biases = encode(random.normal(size=shape), scale_type)
        scale, bias = decode(scales, scale_type), decode(biases, scale_type)
        elements = numbers.astype(np.float64)
    elif mode == NVFP4:
        scales = random.integers(0, 127, shape, dtype=np.uint8)
        scale, elements = FP8[scales], FP4[numbers]
    else:
        scales = random.integers(100, 140, shape, dtype=np.uint8)
        scale, elements = 2.0 ** (scales.astype(np.float64) - 127), FP4[numbers] if mode == MXFP4 else FP8[numbers]
        if mode == MXFP8:  # no NaN here: a test of its own has them
            nan = np.isnan(elements)
            codes.view(np.uint8).reshape(elements.shape)[nan] = 0
            elements[nan] = 0.0
    scale, bias = np.repeat(scale, group, -1), np.repeat(bias, group, -1)
    return Matrices(
        *(mode, bits, group, scale_type, unaligned(codes, offset), unaligned(scales, offset)),
        biases=None if biases is None else unaligned(biases, offset),
        values=elements * scale + bias,
        scale=np.abs(scale),
        size=np.abs(elements * scale) + np.abs(bias),
    )


def matmul(
    w: Matrices, x: Array, x_type: int, out_type: int, *, transpose=True, precision=EXACT, lhs=None, rhs=None, repeat=1
):
    """x is [blocks, rows, inner], as the kernel reads it; the result is decoded."""
    blocks, rows, inner = x.shape
    _, outer, width = w.values.shape
    if not transpose:
        outer, width = width, outer
    assert inner == width
    pairs = blocks * repeat if lhs is None else len(lhs)
    out = encode(np.full((pairs, rows, outer), 7.0), out_type)
    args = Matmul(
        *(w.struct(), pointer(x), pointer(out), pointer(lhs), pointer(rhs)),
        *(pairs, blocks, rows, repeat, int(transpose), x_type, out_type, precision),
    )
    assert call("kern_quant_matmul", args) == 0
    return decode(out, out_type)


def repacks(w: Matrices) -> bool:
    """Whether its rows may be repacked on this processor."""
    return bool(library.kern_repacks(ctypes.byref(w.struct())))


def repacked(w: Matrices, offset=0) -> Matrices:
    """The same matrices with their rows repacked."""

    def repack(array: Array | None) -> Array | None:
        if array is None:
            return None
        *matrices, rows, columns = array.shape
        panels = array.reshape(*matrices, rows // 16, 16, columns).swapaxes(-1, -2)
        return unaligned(np.ascontiguousarray(panels).reshape(array.shape), offset)

    return replace(w, codes=repack(w.codes), scales=repack(w.scales), biases=repack(w.biases), repacked=True)
