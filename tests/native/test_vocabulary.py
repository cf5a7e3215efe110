"""Kernels of kern/vocabulary.h against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Int, Int64, Pointer, call, decode, encode, pointer, smallest, unaligned

KINDS = [F32, F16, BF16]
WIDTHS = st.one_of(st.integers(1, 300), st.sampled_from([8191, 8192, 8193, 20_000]))


class Peaks(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("sums", Pointer),
        ("values", Pointer),
        ("indices", Pointer),
        ("rows", Int64),
        ("width", Int64),
        ("x_stride", Int64),
    ]


def peaks(x):
    found = [np.zeros(len(x), dtype) for dtype in (np.float32, np.float32, np.uint32)]
    args = Peaks(pointer(x), *map(pointer, found), *x.shape, x.strides[0] // x.itemsize)
    assert call("kern_peaks", args) == 0
    return found


class ArgPartition(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("out", Pointer),
        ("rows", Int64),
        ("width", Int64),
        ("kth", Int64),
        ("x_stride", Int64),
        ("type", Int),
    ]


def arg_partition(x, kind, kth):
    out = np.zeros(x.shape, np.uint32)
    args = ArgPartition(pointer(x), pointer(out), *x.shape, kth, x.strides[0] // x.itemsize, kind)
    return call("kern_arg_partition", args), out


class LongRow(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("out", Pointer),
        ("rows", Int64),
        ("width", Int64),
        ("x_stride", Int64),
        ("type", Int),
    ]


def long_row(name, x, kind, dtype, width=1):
    rows = x.shape[0]
    out = np.zeros((rows, width), dtype)
    args = LongRow(pointer(x), pointer(out), rows, x.shape[1], x.strides[0] // x.itemsize, kind)
    assert call(name, args) == 0
    return out


def values(seed, rows, width, kind, offset, scale, hidden):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, width + 3)) * scale
    x[random.random(x.shape) < hidden] = -np.inf
    x[:, width // 2] = scale
    return unaligned(encode(x, kind), offset)[:, :width]


rows_of_logits = {
    "rows": st.integers(1, 3),
    "width": WIDTHS,
    "offset": st.integers(0, 7),
    "scale": st.sampled_from([0.1, 3.0, 200.0]),
    "hidden": st.sampled_from([0.0, 0.5]),
    "seed": st.integers(0, 1000),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(**rows_of_logits)
def test_softmax_and_logsumexp(kind, rows, width, offset, scale, hidden, seed):
    x = values(seed, rows, width, kind, offset, scale, hidden)
    exact = decode(x, kind)
    peak = exact.max(-1, keepdims=True)
    powers = np.exp(exact - peak)
    total = powers.sum(-1, keepdims=True)
    # x - peak rounds, the exponential is good to 4 units, and a sum of n to n; below e^-87 it may vanish
    distance = np.where(np.isneginf(exact), 0.0, peak - exact)
    lost = (2 * np.minimum(distance, 90.0) + 2 * width + 16) * EPS[F32]
    out = decode(long_row("kern_softmax", x, kind, x.dtype, width), kind)
    wanted = powers / total
    assert (np.abs(out - wanted) <= wanted * (lost + EPS[kind] * (1 + lost)) + smallest(kind)).all()
    out = decode(long_row("kern_logsumexp", x, kind, x.dtype), kind)
    wanted = peak + np.log(total)
    assert (np.abs(out - wanted) <= lost.max() + np.abs(wanted) * (2 * EPS[F32] + EPS[kind]) + smallest(kind)).all()


@pytest.mark.parametrize("width", [3, 20_000])
def test_logits_that_are_no_numbers(width):
    x = np.zeros((4, width), np.float32)
    x[0, 1], x[1, 1], x[2] = np.nan, np.inf, -np.inf
    soft, sums = long_row("kern_softmax", x, F32, np.float32, width), long_row("kern_logsumexp", x, F32, np.float32)
    assert np.isnan(soft[0]).all()
    assert np.isnan(soft[1, 1])
    assert np.isnan(soft[2]).all()
    assert (soft[3] == np.float32(1 / width)).all()
    assert np.isnan(sums[0])
    assert (sums[1:3, 0] == [np.inf, -np.inf]).all()


@settings(max_examples=25)
@given(**rows_of_logits)
def test_exp_mass_is_an_exact_sum(rows, width, offset, scale, hidden, seed):
    x = values(seed, rows, width, F32, offset, scale, hidden)
    x = -np.abs(x)
    out = long_row("kern_exp_mass", x, F32, np.int64)[:, 0]
    exact = np.exp(x.astype(float)) * 2.0**40
    assert (np.abs(out - exact.sum(-1)) <= exact.sum(-1) * 8 * EPS[F32] + width).all()
    backwards = long_row("kern_exp_mass", np.ascontiguousarray(x[:, ::-1]), F32, np.int64)[:, 0]
    assert (out == backwards).all()


@settings(max_examples=25)
@given(**rows_of_logits)
def test_peaks(rows, width, offset, scale, hidden, seed):
    x = values(seed, rows, width, F32, offset, scale, 0.0)
    x[:, width // 3 :][:, : width // 3] = x[:, : len(x[0, width // 3 :][: width // 3])]  # equal ones
    sums, tops, indices = peaks(x)
    exact = x.astype(float)
    assert (np.abs(sums - exact.sum(-1)) <= np.abs(exact).sum(-1) * (width / 8 + 16) * EPS[F32]).all()
    assert (tops == x.max(-1)).all() and (indices == x.argmax(-1)).all()
    x[np.random.default_rng(seed).random(x.shape) < hidden] = -np.inf
    sums, tops, indices = peaks(x)
    assert (tops == x.max(-1)).all() and (indices == x.argmax(-1)).all()
    assert (np.isneginf(sums) == np.isneginf(x).any(-1)).all()


@pytest.mark.parametrize("at", [0, 5, 8191, 8192, 19_999])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_no_sum_hides_what_is_no_number(at, wrong):
    x = np.full((3, 20_000), -np.inf, np.float32)
    x[0], x[1, 7], x[2] = 0.5, 1.0, 0.25
    x[0, at] = x[2, at] = wrong
    sums, tops, indices = peaks(x)
    assert not np.isfinite(sums[[0, 2]]).any() and not np.isneginf(sums).all()
    assert np.isneginf(sums[1]) and (tops[1], indices[1]) == (1.0, 7)
    assert np.isneginf(peaks(np.full((1, 9), -np.inf, np.float32))[1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(**rows_of_logits, kth=st.floats(0, 1, exclude_max=True), holes=st.booleans())
def test_arg_partition_puts_the_smallest_first(kind, rows, width, offset, scale, hidden, seed, kth, holes):
    x = values(seed, rows, width, kind, offset, scale, hidden)
    x[:, : width // 3] = x[:, width // 3 : width // 3 * 2]  # equal ones
    if holes:
        x[:, 0] = encode(np.array([np.nan, -0.0, 0.0, -np.nan])[seed % 4 :][:1], kind)
    at = int(kth * width)
    status, out = arg_partition(x, kind, at)
    assert status == 0
    assert (np.sort(out, -1) == np.arange(width)).all()
    for row, found in zip(decode(x, kind), out, strict=True):
        order = np.lexsort((np.arange(width), row))  # NaN last
        assert set(found[:at]) == set(order[:at]) and found[at] == order[at]


@pytest.mark.parametrize("kth", [-1, 4])
def test_arg_partition_outside_of_a_row_is_refused(kth):
    assert arg_partition(np.zeros((1, 4), np.float32), F32, kth)[0] == 1


def test_rows_are_the_same_bits_alone_and_together():
    x = np.random.default_rng(0).normal(size=(5, 20_001)).astype(np.float32)
    together = long_row("kern_softmax", x, F32, np.float32, 20_001)
    for row in range(5):
        alone = long_row("kern_softmax", x[row : row + 1].copy(), F32, np.float32, 20_001)
        assert (alone[0] == together[row]).all()


# -- as sampling uses them -------------------------------------------------------------------------------------------
