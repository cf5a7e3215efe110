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
        *((name, Pointer) for name in ("y", "weights", "tag", "wire")),
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
    wire = np.zeros((rows, width + (3 if kind == F32 else 4)), y.dtype)
    tags = np.array([tag], np.float32)
    buffers = (pointer(a) for a in (y, weights, tags, wire))
    assert call("kern_checksum_load", Load(*buffers, rows, width, y.strides[0] // y.itemsize, kind)) == 0
    return wire


def read(wire, weights, kind):
    rows, width = wire.shape[0], len(weights)
    figures, sums = np.zeros((rows, 3), np.float32), np.zeros((rows, width), wire.dtype)
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
    wire = load(y, weights, 7.0, kind)
    exact = decode(y, kind)
    size = np.abs(exact) @ np.abs(weights.astype(float))
    lost = (width + 2) * EPS[F32] * size
    assert (decode(wire[:, :width], kind) == exact).all()
    assert (decode(wire[:, -1], kind) == 7.0).all()
    checksum, magnitude = decode(wire[:, width:-2], kind).sum(-1), decode(wire[:, -2], kind)
    kept = EPS[kind] if kind == F32 else EPS[kind] ** 2  # of the checksum: by one number, by two
    tiny = 2 * smallest(kind)
    assert (np.abs(checksum - exact @ weights.astype(float)) <= lost + size * kept + tiny).all()
    norm = np.sqrt((exact**2).sum(-1)) / width
    assert (np.abs(magnitude - norm) <= ((width + 4) * EPS[F32] + EPS[kind]) * norm + tiny).all()
    figures = read(wire, weights, kind)
    assert (np.abs(figures[:, 0]) <= 2 * lost + size * kept + tiny).all()
    assert (figures[:, 1] == magnitude).all()
    assert (figures[:, 2] == 7.0).all()
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
    wire = load(y, signs(40), 3.0, kind)
    figures = read(wire, signs(40), kind)
    assert np.isfinite(figures[0]).all()
    assert figures[0, 2] == 3.0
    assert np.isnan(figures[1, [0, 2]]).all()
    assert not np.isfinite(figures[1, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_magnitude_that_excuses_everything_spoils_the_tag(kind, bad):
    wire = load(encode(np.ones((2, 40)), kind), signs(40), 3.0, kind)
    wire[1, -2] = encode(np.array(bad), kind)
    figures = read(wire, signs(40), kind)
    assert figures[0, 2] == 3.0
    assert np.isnan(figures[1, 2])


def test_magnitudes_of_many_ranks_fit_into_float16():
    """Where large parts cancel each other the sum is right, and so must be what comes behind it."""
    parts = [load(encode(np.full((1, 256), size), F16), signs(256), 1.0, F16) for size in (3e4, -3e4) * 8]
    wire = encode(sum(decode(part, F16) for part in parts), F16)
    assert np.isfinite(read(wire, signs(256), F16)).all()
