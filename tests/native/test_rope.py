"""Kernels of kern/rope.h against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Float, Int, Int64, Pointer, call, decode, encode, pointer, smallest

KINDS = [F32, F16, BF16]


class Rope(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("out", Pointer),
        ("offsets", Pointer),
        ("freqs", Pointer),
        ("rows", Int64),
        ("heads", Int64),
        ("positions", Int64),
        ("dim", Int64),
        ("dims", Int64),
        ("x_strides", Int64 * 3),
        ("out_strides", Int64 * 3),
        ("offset_stride", Int64),
        ("scale", Float),
        ("type", Int),
        ("traditional", Int),
        ("wavelengths", Int),
    ]


def strides(array):
    return (Int64 * 3)(*(s // array.itemsize for s in array.strides[:3]))


def rope(x, offsets, freqs, dims, kind, *, scale=1.0, traditional=False, wavelengths=False):
    rows, heads, positions, dim = x.shape
    out = np.zeros(x.shape, x.dtype)
    args = Rope(
        x=pointer(x),
        out=pointer(out),
        offsets=pointer(offsets),
        freqs=pointer(freqs),
        rows=rows,
        heads=heads,
        positions=positions,
        dim=dim,
        dims=dims,
        x_strides=strides(x),
        out_strides=strides(out),
        offset_stride=int(len(offsets) > 1),
        scale=scale,
        type=kind,
        traditional=traditional,
        wavelengths=wavelengths,
    )
    assert call("kern_rope", args) == 0
    return out


def reference(x, offsets, freqs, dims, scale, traditional, wavelengths):
    """In float64 from the angles' exact products; also how large the pairs are."""
    places = (np.broadcast_to(offsets, x.shape[0])[:, None] + np.arange(x.shape[2])) * float(np.float32(scale))
    angles = places[:, None, :, None] * (1.0 / freqs.astype(float) if wavelengths else freqs.astype(float))
    first, second = (x[..., 0:dims:2], x[..., 1:dims:2]) if traditional else np.split(x[..., :dims], 2, axis=-1)
    repacked = first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)
    out, size, angle = x.copy(), np.zeros_like(x), np.zeros_like(x)
    for part, values in enumerate(repacked):
        where = slice(part, dims, 2) if traditional else slice(part * dims // 2, (part + 1) * dims // 2)
        out[..., where] = values
        size[..., where] = np.hypot(first, second)
        angle[..., where] = np.abs(angles)
    return out, size, angle


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("traditional", [False, True])
@settings(max_examples=40)
@given(
    rows=st.integers(1, 3),
    heads=st.integers(1, 4),
    positions=st.integers(1, 5),
    dim=st.integers(2, 80),
    part=st.floats(0.0, 1.0),
    furthest=st.sampled_from([3, 1000, 200_000]),
    scale=st.sampled_from([1.0, 0.25]),
    wavelengths=st.booleans(),
    one_offset=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rope(kind, traditional, rows, heads, positions, dim, part, furthest, scale, wavelengths, one_offset, seed):
    random = np.random.default_rng(seed)
    dims = max(2, int(dim * part) // 2 * 2)
    freqs = (1e4 ** (-np.arange(0, dims, 2) / dims)).astype(np.float32)
    if wavelengths:
        freqs = (1.0 / freqs).astype(np.float32)
    offsets = random.integers(0, furthest, 1 if one_offset else rows).astype(np.int32)
    x = encode(random.normal(size=(rows, positions, heads, dim)), kind).swapaxes(1, 2)
    how = {"scale": scale, "traditional": traditional, "wavelengths": wavelengths}
    out = decode(rope(x, offsets, freqs, dims, kind, **how), kind)
    wanted, size, angle = reference(decode(x, kind), offsets, freqs, dims, **how)
    # an angle takes up to three roundings and its reduction one more; sine and cosine are good to 4 of them
    bound = size * ((4 * angle + 8) * EPS[F32]) + np.abs(wanted) * EPS[kind] + smallest(kind)
    assert (np.abs(out - wanted) <= bound).all()
    assert (out[..., dims:] == decode(x, kind)[..., dims:]).all()


@pytest.mark.parametrize("traditional", [False, True])
def test_an_infinite_wavelength_turns_nothing(traditional):
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 20)).astype(np.float32)
    freqs = np.array([1.0, 10.0] + [np.inf] * 8, np.float32)
    out = rope(x, np.array([5], np.int32), freqs, 20, F32, traditional=traditional, wavelengths=True)
    still = slice(4, 20) if traditional else [*range(2, 10), *range(12, 20)]
    assert (out[..., still] == x[..., still]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_pair(bad):
    x = np.ones((1, 1, 1, 32), np.float32)
    x[..., 3] = bad
    out = rope(x, np.array([5], np.int32), np.ones(16, np.float32), 32, F32)
    assert not np.isfinite(out[0, 0, 0, [3, 19]]).any()
    assert np.isfinite(np.delete(out[0, 0, 0], [3, 19])).all()
