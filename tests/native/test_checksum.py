"""Kernels of kern/checksum.h against float64, and the MLX operations against what the reducer does without them."""

from __future__ import annotations

import ctypes

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Float, Int, Int64, Pointer, call, decode, encode, pointer, smallest, unaligned
from phalanx_cpu import ops

from phalanx.dist.checksum import ComposedChecksum

KINDS = [F32, F16, BF16]
TYPES = [mx.float32, mx.float16, mx.bfloat16]


class Load(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("y", "weights", "wire", "squares")),
        *((name, Int64) for name in ("rows", "width", "y_stride")),
        ("tag", Float),
        ("type", Int),
    ]


class Read(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("wire", "weights", "sums", "figures")),
        *((name, Int64) for name in ("rows", "width", "wire_stride")),
        ("type", Int),
    ]


def load(y, weights, tag, kind):
    rows, width = y.shape
    wire, squares = np.zeros((rows, width + (2 if kind == F32 else 3)), y.dtype), np.zeros(rows, np.float32)
    buffers = (pointer(a) for a in (y, weights, wire, squares))
    assert call("kern_checksum_load", Load(*buffers, rows, width, y.strides[0] // y.itemsize, tag, kind)) == 0
    return wire, squares


def read(wire, weights, kind):
    rows, width = wire.shape[0], len(weights)
    figures, sums = np.zeros((rows, 2), np.float32), np.zeros((rows, width), wire.dtype)
    buffers = (pointer(a) for a in (wire, weights, sums, figures))
    assert call("kern_checksum_read", Read(*buffers, rows, width, wire.shape[1], kind)) == 0
    assert np.array_equal(sums.view(np.uint8), np.ascontiguousarray(wire[:, :width]).view(np.uint8))
    return figures


def signs(width, seed=0):
    return np.random.default_rng(seed).choice([-1.0, 1.0], width).astype(np.float32) / np.float32(width**0.5)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    rows=st.integers(1, 4),
    width=st.one_of(st.integers(1, 200), st.just(4096)),
    offset=st.integers(0, 7),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_what_is_loaded_is_read(kind, rows, width, offset, scale, seed):
    y = unaligned(encode(np.random.default_rng(seed).normal(size=(rows, width + 2)) * scale, kind), offset)[:, :width]
    weights = signs(width, seed)
    wire, squares = load(y, weights, 7.0, kind)
    exact = decode(y, kind)
    size = np.abs(exact) @ np.abs(weights.astype(float))
    lost = (width + 2) * EPS[F32] * size
    assert (decode(wire[:, :width], kind) == exact).all()
    assert (decode(wire[:, -1], kind) == 7.0).all()
    checksum = decode(wire[:, width:-1], kind).sum(-1)
    kept = EPS[kind] if kind == F32 else EPS[kind] ** 2  # of the checksum: by one number, by two
    tiny = 2 * smallest(kind)
    assert (np.abs(checksum - exact @ weights.astype(float)) <= lost + size * kept + tiny).all()
    total = (exact**2).sum(-1)
    assert (np.abs(squares - total) <= (width + 2) * EPS[F32] * total + 1e-37).all()
    figures = read(wire, weights, kind)
    assert (np.abs(figures[:, 0]) <= 2 * lost + size * kept + tiny).all()
    assert (figures[:, 1] == 7.0).all()
    wire[0, width // 2] = encode(decode(wire[0, width // 2], kind) + 4 * scale, kind)
    moved = decode(wire[0, width // 2], kind) - exact[0, width // 2]
    seen = read(wire, weights, kind)[0, 0]
    assert (
        abs(abs(seen) - abs(moved * weights[width // 2]))
        <= 2 * lost[0] + (size[0] + 4 * scale) * (kept + EPS[F32]) + tiny
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_spoils_residual_and_tag(kind, bad):
    y = encode(np.ones((2, 40)), kind)
    y[1, 33] = encode(np.array(bad), kind)
    wire, squares = load(y, signs(40), 3.0, kind)
    assert np.isfinite(squares[0])
    assert not np.isfinite(squares[1])
    figures = read(wire, signs(40), kind)
    assert figures[0, 1] == 3.0
    assert np.isnan(figures[1]).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("width", [64, 1000])
def test_operations_give_what_the_reducer_computes(dtype, rows, width):
    y = mx.random.normal((rows, width), key=mx.random.key(1)).astype(dtype)
    weights = mx.array(signs(width))[:, None]
    wire, squares = ops.checksum_load(y, weights, 5.0)
    checksum = y.astype(mx.float32) @ weights
    high = checksum.astype(dtype)
    parts = [y, high] + ([] if dtype == mx.float32 else [(checksum - high).astype(dtype)])
    expected = mx.concatenate([*parts, mx.full((rows, 1), 5.0, dtype)], axis=-1)
    assert wire.shape == expected.shape
    assert wire.dtype == dtype
    assert (wire[:, :width] == y).all()
    assert (wire[:, -1] == 5.0).all()
    sums = [mx.sum(w[:, width:-1].astype(mx.float32), axis=-1) for w in (wire, expected)]
    assert mx.allclose(*sums, rtol=1e-3 if dtype == mx.bfloat16 else 1e-5, atol=1e-5)
    assert mx.allclose(squares, mx.sum(mx.square(y.astype(mx.float32)), axis=-1), rtol=1e-5)
    total, figures = ops.checksum_read(wire + wire, weights)
    assert total.dtype == dtype
    assert (total == y + y).all()
    assert figures.shape == (rows, 2)
    assert figures.dtype == mx.float32
    assert mx.abs(figures[:, 0]).max() < (1e-5 if dtype == mx.float32 else 1e-2)
    assert (figures[:, 1] == 10.0).all()


@pytest.mark.parametrize("sites", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_verdicts(sites, rows):
    """Native and composed ones, on sums that are right and on each kind that is not."""
    random = np.random.default_rng(0)
    limits = np.stack([random.uniform(1e-6, 1e-3, sites), random.uniform(0, 1e-6, sites)], -1)
    magnitudes = random.uniform(0.1, 10, (sites, rows))
    allowed = limits[:, :1] * magnitudes + limits[:, 1:]
    figures = np.stack([allowed * random.uniform(-0.99, 0.99, (sites, rows)), np.full((sites, rows), 6.0)], -1)
    spoiled = [figures.copy() for _ in range(4)]
    spoiled[0][-1, -1, 0] = -1.01 * allowed[-1, -1]
    spoiled[1][-1, -1, 0] = np.nan
    spoiled[2][-1, -1, 1] = 5.0
    spoiled[3][-1, -1, 1] = np.nan
    for judge in (ops.checksum_judge, ComposedChecksum().judge):
        for case in (figures, *spoiled):
            arrays = (mx.array(a.astype(np.float32)) for a in (case.reshape(-1, 2), magnitudes.reshape(-1), limits))
            assert judge(*arrays, 6, 4).tolist() == [0.0] * (sites - 1) + [0.0 if case is figures else 4.0]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="checksum_judge"):
        ops.checksum_judge(mx.zeros((4, 2)), mx.zeros(4), mx.zeros((3, 2)), 1.0, 1.0)
    with pytest.raises(ValueError, match="checksum_judge"):
        ops.checksum_judge(mx.zeros((4, 2)), mx.zeros(4).astype(mx.float16), mx.zeros((2, 2)), 1.0, 1.0)
    with pytest.raises(ValueError, match="checksum"):
        ops.checksum_load(mx.zeros((2, 5)), mx.zeros(4), 1.0)
    with pytest.raises(ValueError, match="checksum"):
        ops.checksum_read(mx.zeros((2, 5)), mx.zeros(4))
