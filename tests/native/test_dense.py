"""Products of dense matrices (kern/dense.h, and the BLAS entry MLX uses) against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Float, Int, Int64, Pointer, call, decode, encode, library, pointer, unaligned

KINDS = [F32, F16, BF16]


class Gemm(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("a", "b", "bias", "out")),
        *((name, Int64) for name in ("m", "n", "k", "a_stride", "b_stride", "out_stride")),
        ("alpha", Float),
        ("beta", Float),
        *((name, Int) for name in ("a_transposed", "b_transposed", "type", "b_type", "bias_type")),
    ]


class Gather(ctypes.Structure):
    _fields_ = [
        ("one", Gemm),
        ("pairs", Int64),
        ("lhs", Pointer),
        ("rhs", Pointer),
        *((name, Int64) for name in ("lhs_count", "rhs_count", "a_matrix", "b_matrix", "out_matrix")),
    ]


def bound(a, b, kind, extra=0.0):
    """How far rounding may take a product: of the sum, whatever its order, and of the result."""
    k = a.shape[-1]
    size = np.abs(a) @ np.abs(b) + extra
    tiny = 2.0**-24 if kind == F16 else 1e-37
    return (k + 4) * EPS[F32] * size + (1 + k * EPS[F32]) * EPS[kind] * size + tiny


shapes = st.tuples(
    st.sampled_from([1, 2, 3, 5, 8, 9, 13, 40]), st.integers(1, 70), st.sampled_from([1, 7, 16, 33, 256, 300])
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b_kind", KINDS)
@settings(max_examples=25)
@given(
    shape=shapes,
    a_transposed=st.booleans(),
    b_transposed=st.booleans(),
    bias_kind=st.sampled_from([None, *KINDS]),
    beta=st.sampled_from([0.0, 0.5]),
    gap=st.integers(0, 5),
    offset=st.integers(0, 3),
    scale=st.sampled_from([1e-3, 1.0, 6.0]),
    seed=st.integers(0, 1000),
)
def test_gemm(kind, b_kind, shape, a_transposed, b_transposed, bias_kind, beta, gap, offset, scale, seed):
    m, n, k = shape
    random = np.random.default_rng(seed)

    def matrix(rows, columns, transposed, of):
        stored = random.normal(size=(columns, rows + gap) if transposed else (rows, columns + gap)) * scale
        held = unaligned(encode(stored, of), offset)
        seen = decode(held, of)
        return held, (seen[:, :rows].T if transposed else seen[:, :columns])

    a, exact_a = matrix(m, k, a_transposed, kind)
    b, exact_b = matrix(k, n, b_transposed, b_kind)
    old = encode(random.normal(size=(m, n + gap)), kind)
    out = old.copy()
    bias = None if bias_kind is None else encode(random.normal(size=n), bias_kind)
    args = Gemm(
        pointer(a), pointer(b), pointer(bias), pointer(out), m, n, k, a.shape[1], b.shape[1], n + gap, 0.75, beta,
        a_transposed, b_transposed, kind, b_kind, bias_kind or F32,
    )  # fmt: skip
    assert call("kern_gemm", args) == 0
    kept, shift = beta * decode(old, kind)[:, :n], 0.0 if bias is None else decode(bias, bias_kind)
    wanted = 0.75 * exact_a @ exact_b + kept + shift
    error = np.abs(decode(out, kind)[:, :n] - wanted)
    assert (error <= bound(exact_a, exact_b, kind, np.abs(kept) + np.abs(shift))).all()
    assert (out[:, n:] == old[:, n:]).all()


@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("b_transposed", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row_and_column(m, b_transposed, bad):
    a, b = np.ones((m, 40), np.float32), np.ones((40, 40), np.float32)
    a[m - 1, 39] = bad
    b[3, 3] = np.nan
    out = np.zeros((m, 40), np.float32)
    args = Gemm(pointer(a), pointer(b), None, pointer(out), m, 40, 40, 40, 40, 40, 1.0, 0.0, 0, b_transposed)
    assert call("kern_gemm", args) == 0
    wanted = np.full((m, 40), 40.0)
    wanted[m - 1] = bad
    wanted[:, 3] = np.nan
    assert np.array_equal(out, wanted, equal_nan=True)


def test_the_result_does_not_depend_on_threads():
    random = np.random.default_rng(1)
    a, b = (random.normal(size=(96, 700)).astype(np.float32) for _ in range(2))
    results = []
    for threads in (1, 2, 5):
        library.kern_set_threads(threads)
        out = np.zeros((96, 96), np.float32)
        call("kern_gemm", Gemm(pointer(a), pointer(b), None, pointer(out), 96, 96, 700, 700, 700, 96, 1.0, 0.0, 0, 1))
        results.append(out)
    library.kern_set_threads(0)
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()


@pytest.mark.parametrize("order", [101, 102])
@pytest.mark.parametrize("trans_a", [111, 112])
@pytest.mark.parametrize("trans_b", [111, 112])
def test_the_blas_entry(order, trans_a, trans_b):
    random = np.random.default_rng(2)
    a, b = random.normal(size=(9, 30)), random.normal(size=(30, 17))
    c = random.normal(size=(9, 17)).astype(np.float32)
    layout = "C" if order == 101 else "F"
    stored = [
        np.array(x.T if trans == 112 else x, np.float32, order=layout) for x, trans in ((a, trans_a), (b, trans_b))
    ]
    strides = [x.shape[1] if order == 101 else x.shape[0] for x in stored]
    out = np.array(c, order=layout)
    library.cblas_sgemm(
        order, trans_a, trans_b, 9, 17, 30, Float(2.0), Pointer(pointer(stored[0])), strides[0],
        Pointer(pointer(stored[1])), strides[1], Float(3.0), Pointer(pointer(out)), 17 if order == 101 else 9,
    )  # fmt: skip
    assert np.allclose(out, 2 * a @ b + 3 * c, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b_kind", KINDS)
@pytest.mark.parametrize("b_transposed", [0, 1])
def test_gather(kind, b_kind, b_transposed):
    random = np.random.default_rng(3)
    m, n, k, pairs = 2, 19, 37, 23
    a = encode(random.normal(size=(6, m, k)), kind)
    b = encode(random.normal(size=(4, n, k) if b_transposed else (4, k, n)), b_kind)
    lhs, rhs = random.integers(0, 6, pairs).astype(np.uint32), random.integers(0, 3, pairs).astype(np.uint32)
    out = np.zeros((pairs, m, n), a.dtype)
    one = Gemm(
        pointer(a), pointer(b), None, pointer(out), m, n, k, k, b.shape[2], n, 1.0, 0.0, 0, b_transposed, kind, b_kind
    )
    args = Gather(one, pairs, pointer(lhs), pointer(rhs), 6, 4, m * k, n * k, m * n)
    assert call("kern_gather_gemm", args) == 0
    exact_b = decode(b, b_kind).swapaxes(1, 2) if b_transposed else decode(b, b_kind)
    for p in range(pairs):
        x, w = decode(a, kind)[lhs[p]], exact_b[rhs[p]]
        assert (np.abs(decode(out, kind)[p] - x @ w) <= bound(x, w, kind)).all()


def test_a_gather_beyond_its_matrices_is_refused():
    a = b = out = np.zeros((1, 4, 4), np.float32)
    index = np.array([1], np.uint32)
    one = Gemm(pointer(a), pointer(b), None, pointer(out), 4, 4, 4, 4, 4, 4, 1.0)
    assert call("kern_gather_gemm", Gather(one, 1, pointer(index), pointer(index), 1, 1, 16, 16, 16)) == 1
