"""Matrices whose rows are repacked (kern_repack) against the same ones that do not."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, F16, F32, Array, Int, Int64, Pointer, call, encode, library, pointer, unaligned
from quant import (
    AFFINE,
    EXACT,
    FACTORED,
    FAST,
    FORMATS,
    MXFP4,
    NVFP4,
    Dequantize,
    Matmul,
    Matrices,
    matmul,
    random_matrices,
    repacked,
    repacks,
)

KINDS = [F32, F16, BF16]
REPACKING = library.kern_isa() in (b"avx512", b"avx512bf16")
REPACKED = [
    (mode, bits, group) for mode, bits, group in FORMATS if mode in (MXFP4, NVFP4) or (mode, 32 % bits) == (AFFINE, 0)
]
"""Formats whose codes do not cross words."""
repacking = pytest.mark.skipif(not REPACKING, reason="rows are not repacked with this instruction set")
few = settings(max_examples=6, deadline=None)


class RepackArguments(ctypes.Structure):
    _fields_ = [("data", Pointer), ("panels", Int64), ("columns", Int64), ("element_bytes", Int)]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@given(panels=st.integers(0, 5), columns=st.integers(0, 70), offset=st.integers(0, 3))
@few
def test_turning_puts_sixteen_rows_beside_each_other(dtype, panels, columns, offset):
    rows = np.random.default_rng(0).integers(0, 200, (panels, 16, columns)).astype(dtype)
    data = unaligned(rows, offset)
    assert call("kern_repack", RepackArguments(pointer(data), panels, columns, data.itemsize)) == 0
    assert np.array_equal(data.reshape(panels, columns, 16), rows.swapaxes(1, 2))


def test_elements_of_other_sizes_are_refused():
    data = np.zeros((16, 2), np.uint64)
    assert call("kern_repack", RepackArguments(pointer(data), 1, 2, 8)) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_what_may_lie_repacked(format):
    mode, bits, group = format
    for rows in (16, 48, 20):
        w = random_matrices(np.random.default_rng(0), mode, bits, group, 1, rows, 128)
        assert repacks(w) == (REPACKING and format in REPACKED and rows % 16 == 0)


@repacking
@pytest.mark.parametrize("precision", [EXACT, FAST])
@pytest.mark.parametrize("format", REPACKED)
@given(
    x_type=st.sampled_from(KINDS),
    out_type=st.sampled_from([F32, BF16]),
    scale_type=st.sampled_from(KINDS),
    rows=st.sampled_from([8, 9, 15, 17, 31, 40]),
    sixteens=st.integers(1, 7) | st.just(40),
    groups=st.integers(1, 60),
    offset=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@few
def test_products_have_the_bits_of_many_rows(
    format, precision, x_type, out_type, scale_type, rows, sixteens, groups, offset, seed
):
    """Others are repacked for eight rows of x and more; here the same comes out, for fewer as well."""
    random = np.random.default_rng(seed)
    mode, bits, group = format
    width = max(group, 32) * groups
    w = random_matrices(random, mode, bits, group, 1, 16 * sixteens, width, scale_type)
    x = unaligned(encode(random.normal(size=(1, rows, width)), x_type), offset)
    wanted = matmul(w, x, x_type, out_type, precision=precision)
    lying = repacked(w, offset)
    for some in (rows, *range(1, 8)):
        found = matmul(lying, x[:, :some].copy(), x_type, out_type, precision=precision)
        assert np.array_equal(found, wanted[:, :some])


@repacking
@pytest.mark.parametrize("precision", [EXACT, FAST])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_that_many_rows_meet_and_few(precision, kind):
    random = np.random.default_rng(0)
    counts = [1, 40, 0, 4, 5, 16, 3, 600]
    w = random_matrices(random, AFFINE, 4, 64, len(counts), 64, 256)
    rhs = random.permutation(np.repeat(np.arange(len(counts), dtype=np.uint32), counts))
    lhs = np.arange(len(rhs), dtype=np.uint32)
    x = encode(random.normal(size=(len(rhs), 1, 256)), kind)
    found = matmul(repacked(w), x, kind, F32, precision=precision, lhs=lhs, rhs=rhs)
    for matrix in np.flatnonzero(counts):
        alone = random_matrices(np.random.default_rng(0), AFFINE, 4, 64, 1, 64, 256)
        for name in ("codes", "scales", "biases", "values"):
            setattr(alone, name, getattr(w, name)[matrix : matrix + 1].copy())
        rows = np.repeat(x[rhs == matrix].swapaxes(0, 1), 8, 1)  # as many as are repacked
        assert np.array_equal(matmul(alone, rows, kind, F32, precision=precision)[0, ::8], found[rhs == matrix][:, 0])


@repacking
@pytest.mark.parametrize("precision", [EXACT, FAST])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("rows", [1, 3, 30])
@pytest.mark.parametrize("kind", [F32, BF16])
def test_what_is_no_number_or_far_from_one(precision, bad, rows, kind):
    """Such rows of x are multiplied as floats, which take rows of w as they are."""
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, 4, 32, 2, 96, 96)
    x = random.normal(size=(2, rows, 96))
    x[:, 0, 70] = bad
    x = encode(x, kind)
    pick = np.array([1, 0], np.uint32)
    found, wanted = (
        matmul(some, x, kind, F32, precision=precision, lhs=pick, rhs=pick).astype(np.float32)
        for some in (repacked(w), w)
    )
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted))
    some = np.isfinite(wanted)
    assert np.allclose(found[some], wanted[some], rtol=1e-3, atol=1e-3)


@repacking
@pytest.mark.parametrize("format", REPACKED)
def test_decoded_rows(format):
    random = np.random.default_rng(0)
    mode, bits, group = format
    w = random_matrices(random, mode, bits, group, 1, 48, 256, F16)
    indices = random.integers(0, 48, 20, dtype=np.uint32)
    for picked in (None, indices):
        count = 48 if picked is None else len(picked)
        found, wanted = np.zeros((count, 256), np.float32), np.zeros((count, 256), np.float32)
        for some, out in ((repacked(w, 1), found), (w, wanted)):
            assert call("kern_dequantize", Dequantize(some.struct(), pointer(picked), pointer(out), count, F32)) == 0
        assert np.array_equal(found, wanted)


def test_what_cannot_lie_repacked_is_refused():
    x, out = np.zeros((1, 1, 96), np.float32), np.zeros((1, 1, 96), np.float32)

    def status(w, transpose):
        args = (w.struct(), pointer(x), pointer(out), None, None, 1, 1, 1, 1, transpose, F32, F32, EXACT)
        return call("kern_quant_matmul", Matmul(*args))

    random = np.random.default_rng(0)
    w = repacked(random_matrices(random, AFFINE, 4, 32, 1, 96, 96))
    assert (status(w, 1), status(w, 0)) == (0 if REPACKING else 1, 1)
    assert status(repacked(random_matrices(random, AFFINE, 3, 32, 1, 96, 96)), 1) == 1
    short = random_matrices(random, AFFINE, 4, 32, 1, 20, 96)
    short.repacked = True
    assert status(short, 1) == 1
    assert call("kern_dequantize", Dequantize(short.struct(), None, pointer(out), 20, F32)) == 1


# -- scales as factors -----------------------------------------------------------------------------------------------


class FactorArguments(ctypes.Structure):
    _fields_ = [("numbers", Pointer), ("out", Pointer), ("panels", Int64), ("columns", Int64), ("exact", Int)]


def factors(numbers: Array) -> Array | None:
    """Repacked numbers [..., rows, columns] as factors; None if some have none."""
    *matrices, rows, columns = numbers.shape
    out = np.zeros((*matrices, rows, columns * 10 // 8), np.uint8)
    args = FactorArguments(pointer(numbers), pointer(out), numbers.size // columns // 16, columns)
    assert call("kern_factor", args) == 0
    return out if args.exact else None


def products(random, shape, most=63) -> Array:
    """Numbers as Q4_K has them: whole ones of `most` at most, 8 of which share a float16. Some are 0, or subnormal."""
    *matrices, rows, columns = shape
    units = (random.normal(size=(*matrices, rows, columns // 8, 1)) * 10.0 ** random.integers(-7, 1)).astype(np.float16)
    units[random.random(units.shape) < 0.1] = 0
    whole = random.integers(-1 if most > 63 else 0, most + 1, (*matrices, rows, columns // 8, 8))
    return (units.astype(np.float32) * whole.astype(np.float32)).reshape(shape)


def factored(w: Matrices) -> Matrices:
    """The same repacked matrices with factors."""
    scales, biases = factors(w.scales), factors(w.biases)
    assert scales is not None and biases is not None
    return replace(w, scales=scales, biases=biases, scale_type=FACTORED)


@repacking
@pytest.mark.parametrize("precision", [EXACT, FAST])
@pytest.mark.parametrize("bits", [2, 4, 8])
@given(
    x_type=st.sampled_from(KINDS),
    rows=st.sampled_from([1, 2, 7, 8, 9, 17]),
    sixteens=st.integers(1, 7),
    eights=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@few
def test_products_with_factors_have_the_bits_of_those_with_floats(
    bits, precision, x_type, rows, sixteens, eights, seed
):
    random = np.random.default_rng(seed)
    width = 256 * eights
    w = random_matrices(random, AFFINE, bits, 32, 2, 16 * sixteens, width)
    w.scales, w.biases = (products(random, w.scales.shape, most) for most in (63, 64))
    lying = repacked(w)
    x = encode(random.normal(size=(2, rows, width)), x_type)
    x[0, 0, 3] = encode(np.array(np.inf if seed % 3 == 0 else 1.0), x_type)
    pick = np.array([1, 0], np.uint32)
    found, wanted = (
        matmul(some, x, x_type, F32, precision=precision, lhs=pick, rhs=pick) for some in (factored(lying), lying)
    )
    assert np.array_equal(found, wanted, equal_nan=True)
    one, also = (replace(some, values=w.values[:1]) for some in (factored(lying), lying))
    out = [np.zeros((16 * sixteens, width), np.float32) for _ in range(2)]
    for some, to in zip((one, also), out, strict=True):
        assert call("kern_dequantize", Dequantize(some.struct(), None, pointer(to), len(to), F32)) == 0
    assert np.array_equal(*out) and (out[0].any() or not w.scales[0].any())


def test_only_such_numbers_have_factors():
    random = np.random.default_rng(0)
    numbers = products(random, (2, 16, 24)).swapaxes(1, 2).copy()  # two panels of sixteen rows
    numbers[0, :8, 0] = np.float32(np.float16(-3e-3))  # one unit each
    found = factors(numbers.reshape(32, 24))
    assert found is not None
    blocks = found.reshape(2, 3, 160)
    whole, units = blocks[..., :128].view(np.int8).reshape(2, 3, 8, 16), blocks[..., 128:].view(np.float16)
    assert np.array_equal((whole * units[:, :, None].astype(np.float32)).reshape(2, 24, 16), numbers)
    for value in (np.nextafter(numbers[1, 5, 7], np.float32(1)), 1e-3, np.nan, np.inf):
        wrong = numbers.copy()
        wrong[1, 5, 7] = value
        assert factors(wrong.reshape(32, 24)) is None
    args = FactorArguments(None, None, 1, 12)
    assert call("kern_factor", args) == 1


def test_factors_are_refused_where_they_cannot_be():
    x, out = np.zeros((1, 1, 256), np.float32), np.zeros((1, 1, 96), np.float32)
    w = replace(random_matrices(np.random.default_rng(0), AFFINE, 4, 32, 1, 96, 256), scale_type=FACTORED)
    for some in (w, replace(w, repacked=True, group=64)):  # 4 groups of 64
        args = Matmul(some.struct(), pointer(x), pointer(out), None, None, 1, 1, 1, 1, 1, F32, F32, EXACT)
        assert call("kern_quant_matmul", args) == 1
        assert call("kern_dequantize", Dequantize(some.struct(), None, pointer(out), 1, F32)) == 1
