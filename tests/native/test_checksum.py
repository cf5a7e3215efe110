"""Kernels of kern/checksum.h against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Int, Int64, Pointer, call, decode, encode, pointer, smallest, unaligned

KINDS = [F32, F16, BF16]


class Load(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("y", "weights", "tag", "wire", "squares")),
        *((name, Int64) for name in ("rows", "width", "y_stride")),
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
    tags = np.array([tag], np.float32)
    buffers = (pointer(a) for a in (y, weights, tags, wire, squares))
    assert call("kern_checksum_load", Load(*buffers, rows, width, y.strides[0] // y.itemsize, kind)) == 0
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
