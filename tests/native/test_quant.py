"""Kernels of kern/quant.h against float64 of the decoded weights."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, call, decode, encode, library, pointer, unaligned
from quant import (
    AFFINE,
    EXACT,
    FAST,
    FORMATS,
    MXFP8,
    Dequantize,
    Matmul,
    matmul,
    random_matrices,
)

KINDS = [F32, F16, BF16]
few = settings(max_examples=4, deadline=None)
seeds = st.integers(0, 1000)
offsets = st.integers(0, 3)
ROWS = [1, 2, 3, 5, 8, 9, 17, 31, 40]
"""Rows of x: each way that the kernels group them."""
INTEGER_PRODUCTS = {b"avx2": 4, b"avx512": 8, b"avx512bf16": 8, b"amx": 8}.get(library.kern_isa(), 0)
"""Codes of up to so many bits are multiplied as integers where precision is fast."""


def rounded(values, kind):
    """Half a step of an element type, and what lies below its range."""
    return np.abs(values) * EPS[kind] + (2.0**-25 if kind == F16 else 2.0**-133)


def exact_bound(w, x, wanted, kind, transpose=True):
    """Each product and sum rounds to float32; so does each decoded weight, whose parts may cancel."""
    size = np.swapaxes(w.size, -1, -2) if transpose else w.size
    return (x.shape[-1] + 16) * EPS[F32] * (np.abs(x) @ size) + rounded(wanted, kind)


def steps(x, group):
    """What rounding each group of activations to int8 changes at most."""
    peaks = np.abs(x.reshape(*x.shape[:-1], x.shape[-1] // group, group)).max(-1)
    return np.repeat(peaks / 127, group, -1) * 0.501


@pytest.mark.parametrize("scale_type", KINDS)
@pytest.mark.parametrize("format", FORMATS)
@few
@given(
    x_type=st.sampled_from(KINDS),
    out_type=st.sampled_from(KINDS),
    rows=st.sampled_from(ROWS),
    outer=st.integers(1, 70),
    groups=st.integers(1, 12),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    offset=offsets,
    seed=seeds,
)
def test_product(format, scale_type, x_type, out_type, rows, outer, groups, scale, offset, seed):
    random = np.random.default_rng(seed)
    mode, bits, group = format
    if out_type == F16 and mode != AFFINE:
        out_type = F32  # scales span the range of float16
    width = group * groups if group >= 32 else 32 * groups
    w = random_matrices(random, mode, bits, group, 1, outer, width, scale_type, offset)
    x = unaligned(encode(random.normal(size=(1, rows, width)) * scale, x_type), offset)
    exact = decode(x, x_type)
    wanted = exact @ np.swapaxes(w.values, -1, -2)
    bound = exact_bound(w, exact, wanted, out_type)
    assert (np.abs(matmul(w, x, x_type, out_type) - wanted) <= bound).all()
    fast = matmul(w, x, x_type, out_type, precision=FAST)
    if bits <= INTEGER_PRODUCTS and mode != MXFP8:
        # codes meet rounded activations, biases their rounded sums; FP4 codes are counted from -6 on
        size = w.size + 12 * w.scale if mode != AFFINE else w.size
        bound = bound + steps(exact, group) @ np.swapaxes(np.abs(w.values), -1, -2)
        bound = bound + (width + 16) * EPS[F32] * ((np.abs(exact) + steps(exact, group)) @ np.swapaxes(size, -1, -2))
    assert (np.abs(fast - wanted) <= bound).all()


@pytest.mark.parametrize("format", FORMATS)
@few
@given(
    kind=st.sampled_from(KINDS),
    rows=st.sampled_from(ROWS),
    inner=st.integers(1, 70),
    groups=st.integers(1, 12),
    offset=offsets,
    seed=seeds,
)
def test_product_without_transposition(format, kind, rows, inner, groups, offset, seed):
    random = np.random.default_rng(seed)
    mode, bits, group = format
    w = random_matrices(random, mode, bits, group, 2, inner, max(group, 32) * groups, F32, offset)
    x = unaligned(encode(random.normal(size=(2, rows, inner)), kind), offset)
    exact = decode(x, kind)
    wanted = exact @ w.values
    out = matmul(w, x, kind, F32, transpose=False)
    assert (np.abs(out - wanted) <= exact_bound(w, exact, wanted, F32, transpose=False)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [EXACT, FAST])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(format, precision, kind):
    """Nor on which size of tile it falls into."""
    random = np.random.default_rng(0)
    mode, bits, group = format
    width = 1216 // group * group
    w = random_matrices(random, mode, bits, group, 1, 70, width, F32)
    x = encode(random.normal(size=(1, 31, width)), kind)
    found = matmul(w, x, kind, F32, precision=precision)
    for shift in (1, 5, 16):
        repacked = matmul(w, np.roll(x, shift, 1), kind, F32, precision=precision)
        assert np.array_equal(np.roll(repacked, -shift, 1), found)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("precision", [EXACT, FAST])
@few
@given(pairs=st.integers(0, 60), rows=st.integers(0, 3), matrices=st.integers(1, 5), seed=seeds)
def test_gather(transpose, precision, pairs, rows, matrices, seed):
    random = np.random.default_rng(seed)
    w = random_matrices(random, AFFINE, 4, 32, matrices, 64, 64)
    x = random.normal(size=(7, rows, 64)).astype(np.float32)
    lhs, rhs = (random.integers(0, n, pairs, dtype=np.uint32) for n in (7, matrices))
    out = matmul(w, x, F32, F32, transpose=transpose, precision=precision, lhs=lhs, rhs=rhs)
    values = np.swapaxes(w.values, -1, -2) if transpose else w.values
    wanted = x.astype(np.float64)[lhs] @ values[rhs]
    assert out.shape == wanted.shape
    bound = 1e-4 + (steps(x, 32)[lhs] @ np.abs(values)[rhs] if precision == FAST else 0.0)
    assert (np.abs(out - wanted) <= bound).all()
    for i in range(min(pairs, 4)):  # as if the pair were alone
        alone = matmul(w, x, F32, F32, transpose=transpose, precision=precision, lhs=lhs[i : i + 1], rhs=rhs[i : i + 1])
        assert np.allclose(alone[0], out[i], atol=1e-4)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("blocks, rows, repeat", [(1, 1, 8), (5, 2, 3), (300, 1, 4), (3, 2, 1), (0, 1, 2)])
def test_blocks_that_meet_several_matrices_in_a_row(transpose, blocks, rows, repeat):
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, 4, 32, 6, 64, 64)
    x = random.normal(size=(blocks, rows, 64)).astype(np.float32)
    lhs, rhs = np.repeat(np.arange(blocks, dtype=np.uint32), repeat), random.integers(0, 6, blocks * repeat, np.uint32)
    named = matmul(w, x, F32, F32, transpose=transpose, lhs=lhs, rhs=rhs)
    assert np.array_equal(matmul(w, x, F32, F32, transpose=transpose, rhs=rhs, repeat=repeat), named)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [100, 1100])
@pytest.mark.parametrize("precision", [EXACT, FAST])
def test_large_products_do_not_depend_on_threads(precision, rows, kind):
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, 4, 64, 1, 200, 1216)
    x = encode(random.normal(size=(1, rows, 1216)), kind)
    threads = library.kern_threads()
    out = []
    for count in (1, 2, 3):
        library.kern_set_threads(count)
        out.append(matmul(w, x, kind, F32, precision=precision))
    library.kern_set_threads(threads)
    assert (out[0] == out[1]).all()
    assert (out[0] == out[2]).all()
    wanted = decode(x, kind) @ np.swapaxes(w.values, -1, -2)
    assert np.abs(out[0] - wanted).max() <= (1e-4 if precision == EXACT else 2e-2) * np.abs(wanted).max()


def alike(precision):
    """Numbers of rows with which a row's product has the same bits: each way of adding up has an order of its own."""
    streaming, repacked = range(1, 8), (*range(8, 14), 16, 20, 21, 24, 25, 31, 33, 40, 512, 520)
    match library.kern_isa():
        case b"amx" if precision == EXACT:
            return [range(1, 5), (5, 6, 8, 15, 16, 17, 33, 40)]
        case b"amx":
            return [streaming, range(8, 13), (13, 16, 20, 40)]
        case b"avx512" | b"avx512bf16":
            return [streaming, repacked]
        case _:
            return [range(1, 9), (20,)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [EXACT, FAST])
def test_a_row_does_not_depend_on_its_batch(precision, kind):
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, 4, 64, 1, 60, 2176)
    x = encode(random.normal(size=(1, 520, 2176)), kind)

    def first(rows):
        return matmul(w, x[:, :rows].copy(), kind, F32, precision=precision)[:, :1]

    for together in alike(precision):
        wanted = first(together[0])
        assert [rows for rows in together if (first(rows) != wanted).any()] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [EXACT, FAST])
def test_matrices_that_many_rows_meet_and_few(precision, kind):
    """As experts do: each with its own number of rows, in one call."""
    random = np.random.default_rng(0)
    counts = [1, 40, 0, 4, 5, 16, 3, 17]
    w = random_matrices(random, AFFINE, 4, 64, len(counts), 70, 256)
    rhs = random.permutation(np.repeat(np.arange(len(counts), dtype=np.uint32), counts))
    lhs = np.arange(len(rhs), dtype=np.uint32)
    x = encode(random.normal(size=(len(rhs), 1, 256)), kind)
    out = matmul(w, x, kind, F32, precision=precision, lhs=lhs, rhs=rhs)
    wanted = decode(x, kind) @ np.swapaxes(w.values, -1, -2)[rhs]
    assert np.abs(out - wanted).max() <= (1e-4 if precision == EXACT else 2e-2) * np.abs(wanted).max()


@pytest.mark.parametrize("kind", [F32, BF16])
@pytest.mark.parametrize("size", [2.0**-90, 2.0**100])
@pytest.mark.parametrize("rows", [1, 7, 20, 31])
def test_no_bit_of_an_activation_is_lost(rows, size, kind):
    """Sums of one product each are exact up to one rounding: with three parts of bfloat16 for x as with x itself."""
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, 4, 32, 1, 20, 64)
    w.codes[...] = 0
    w.codes.view(np.uint8).reshape(20, 32)[:, 0] = 1  # the first element is 1, all others 0
    w.scales[...], w.biases[...] = 1.0, 0.0
    x = encode(random.normal(size=(1, rows, 64)) * size, kind)
    assert (matmul(w, x, kind, F32)[0] == decode(x, kind)[0, :, :1]).all()


@pytest.mark.parametrize("format", FORMATS)
@few
@given(x_type=st.sampled_from(KINDS), rows=st.integers(1, 24), groups=st.integers(1, 12), seed=seeds)
def test_small_beside_large_activations(format, x_type, rows, groups, seed):
    """Activations may be counted in steps of 2**-22 of their group's largest power of two, rarely 2**-21."""
    random = np.random.default_rng(seed)
    mode, bits, group = format
    width = group * groups if group >= 32 else 32 * groups
    w = random_matrices(random, mode, bits, group, 1, 20, width, F32)
    x = encode(random.normal(size=(1, rows, width)) * 10.0 ** random.uniform(-6, 1, (1, rows, width)), x_type)
    exact = decode(x, x_type)
    wanted = exact @ np.swapaxes(w.values, -1, -2)
    step = 2.0**-22 * 1.01
    peaks = np.abs(exact.reshape(1, rows, -1, group)).max(-1)
    bound = step / 2 * np.repeat(peaks, group, -1) @ np.swapaxes(np.abs(w.values), -1, -2)
    assert (np.abs(matmul(w, x, x_type, F32) - wanted) <= bound + exact_bound(w, exact, wanted, F32)).all()


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("outlier", [1, 100, 10000])
@pytest.mark.parametrize("bits", [4, 8])
def test_exact_is_no_worse_than_float32(bits, outlier, rows):
    """Than one product after the other, each rounded to float32: few large activations beside small ones included."""
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, bits, 64, 1, 50, 2048)
    x = random.normal(size=(1, rows, 2048)).astype(np.float32)
    x[..., random.choice(2048, 4)] *= outlier
    wanted = decode(x, F32) @ np.swapaxes(w.values, -1, -2)
    plain = np.cumsum(x[0, :, None] * w.values[0].astype(np.float32), -1, dtype=np.float32)[..., -1]

    def error(found):
        return np.sqrt(np.mean((found - wanted) ** 2))

    assert error(matmul(w, x, F32, F32)) <= error(plain)


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("precision", [EXACT, FAST])
def test_a_row_does_not_depend_on_how_large_its_neighbours_are(precision, rows):
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, 4, 64, 1, 50, 256)
    x = random.normal(size=(1, rows, 256)).astype(np.float32)
    x[0, 1] *= 1e-25
    x[0, 2, 64:128] *= 1e25
    x[0, 3, :64] = 0.0
    found = matmul(w, x, F32, F32, precision=precision)
    for row in range(rows):
        alike = np.repeat(x[:, row : row + 1], 1 if rows < 8 else rows, 1)  # eight rows add up in another order
        assert (matmul(w, alike, F32, F32, precision=precision)[0, 0] == found[0, row]).all()


@pytest.mark.parametrize("precision", [EXACT, FAST])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [3, 30])
@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(precision, transpose, bad, rows, bits, kind):
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, bits, 32, 1, 96, 96)
    x = random.normal(size=(1, rows, 96))
    x[0, 1, 70] = bad
    out = matmul(w, encode(x, kind), kind, F32, transpose=transpose, precision=precision)[0]
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(np.delete(out, 1, 0)).all()


@pytest.mark.parametrize("bad", [0x7F, 0xFF])
def test_fp8_that_is_no_number(bad):
    w = random_matrices(np.random.default_rng(0), MXFP8, 8, 32, 1, 3, 64)
    w.codes.view(np.uint8).reshape(3, 64)[1, 40] = bad
    for rows in (1, 20):
        out = matmul(w, np.ones((1, rows, 64), np.float32), F32, F32)[0]
        assert np.isnan(out[:, 1]).all()
        assert np.isfinite(out[:, [0, 2]]).all()


@pytest.mark.parametrize("kind", [F32, BF16])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("precision", [EXACT, FAST])
def test_extreme_activations(scale, precision, kind):
    random = np.random.default_rng(0)
    w = random_matrices(random, AFFINE, 4, 32, 1, 20, 128)
    for rows in (1, 30):
        x = encode(random.normal(size=(1, rows, 128)) * scale, kind)
        wanted = decode(x, kind) @ np.swapaxes(w.values, -1, -2)
        out = matmul(w, x, kind, F32, precision=precision)
        assert np.abs(out - wanted).max() <= (1e-5 if precision == EXACT else 3e-2) * np.abs(wanted).max() + 1e-35


@pytest.mark.parametrize("format", FORMATS)
@few
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 9),
    groups=st.integers(1, 9),
    count=st.integers(0, 12),
    offset=offsets,
    seed=seeds,
)
def test_dequantize(format, kind, rows, groups, count, offset, seed):
    random = np.random.default_rng(seed)
    mode, bits, group = format
    w = random_matrices(random, mode, bits, group, 1, rows, max(group, 32) * groups, F16, offset)
    indices = random.integers(0, rows, count, dtype=np.uint32) if count else None
    wanted = w.values[0] if indices is None else w.values[0, indices]
    out = encode(np.zeros(wanted.shape), kind)
    args = Dequantize(w.struct(), pointer(indices), pointer(out), len(wanted), kind)
    assert call("kern_dequantize", args) == 0
    size = w.size[0] if indices is None else w.size[0, indices]
    if kind == F16:
        wanted = np.clip(wanted, -1e5, 1e5)  # rounds to Inf
    got, inside = decode(out, kind), np.abs(wanted) < (65504 if kind == F16 else np.inf)
    assert (np.abs(got[~inside]) >= 65504).all()
    assert (np.abs(got - wanted)[inside] <= (2 * EPS[F32] * size + rounded(wanted, kind))[inside]).all()


def test_refusals():
    w = random_matrices(np.random.default_rng(0), AFFINE, 4, 32, 2, 4, 64)
    x, out = np.zeros((3, 1, 64), np.float32), np.zeros((3, 1, 4), np.float32)
    inside, outside = np.array([0, 1, 1], np.uint32), np.array([0, 1, 3], np.uint32)

    def status(quant, lhs, rhs, x_type=F32, repeat=1):
        args = (quant, pointer(x), pointer(out), pointer(lhs), pointer(rhs), 3, 3, 1, repeat, 1, x_type, F32, EXACT)
        return call("kern_quant_matmul", Matmul(*args))

    def changed(**fields):
        quant = w.struct()
        for name, value in fields.items():
            setattr(quant, name, value)
        return quant

    assert status(w.struct(), inside, inside) == 0
    assert status(w.struct(), outside, inside) == 1
    assert status(w.struct(), inside, outside) == 1
    assert status(w.struct(), None, None) == 1  # three pairs, two matrices
    assert status(w.struct(), None, inside, repeat=0) == 1
    assert status(w.struct(), inside, None, repeat=2) == 1  # repeats blocks of x, not matrices
    assert status(w.struct(), inside, inside, x_type=9) == 1
    assert status(changed(bits=7), inside, inside) == 1
    assert status(changed(group=16), inside, inside) == 1
    assert status(changed(mode=9), inside, inside) == 1
    assert status(changed(scale_type=9), inside, inside) == 1


@pytest.mark.parametrize("ahead", [0, 4096])
def test_read_pass(ahead):
    class ReadPass(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("sum", ctypes.c_uint64),
            ("bytes", ctypes.c_int64),
            ("ahead", ctypes.c_int64),
        ]

    data = np.ones(1 << 20, np.uint32)
    args = ReadPass(pointer(data), 0, data.nbytes, ahead)
    assert call("kern_read_pass", args) == 0
    assert args.sum > 0
