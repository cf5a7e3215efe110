"""Kernels of kern/norms.h against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Float, Int, Int64, Pointer, call, decode, encode, pointer, smallest, unaligned

KINDS = [F32, F16, BF16]


class RMSNorm(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("weight", Pointer),
        ("out", Pointer),
        ("rows", Int64),
        ("width", Int64),
        ("x_stride", Int64),
        ("out_stride", Int64),
        ("eps", Float),
        ("type", Int),
        ("weight_type", Int),
    ]


class LayerNorm(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("weight", Pointer),
        ("bias", Pointer),
        ("out", Pointer),
        ("rows", Int64),
        ("width", Int64),
        ("x_stride", Int64),
        ("out_stride", Int64),
        ("eps", Float),
        ("type", Int),
        ("weight_type", Int),
    ]


def rms_norm(x, weight, kind, weight_kind, eps):
    rows, width = x.shape
    out = np.zeros_like(x)
    args = RMSNorm(pointer(x), pointer(weight), pointer(out), rows, width, width, width, eps, kind, weight_kind)
    assert call("kern_rms_norm", args) == 0
    return out


def layer_norm(x, weight, bias, kind, weight_kind, eps):
    rows, width = x.shape
    out = np.zeros((rows, width + 3), x.dtype)
    args = LayerNorm(
        *(pointer(p) for p in (x, weight, bias, out)), rows, width, width, width + 3, eps, kind, weight_kind
    )
    assert call("kern_layer_norm", args) == 0
    assert not out[:, width:].any()
    return out[:, :width]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_kind", [*KINDS, None])
@settings(max_examples=30)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 200),
    offset=st.integers(0, 7),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 1000),
)
def test_rms_norm(kind, weight_kind, rows, width, offset, scale, seed):
    random = np.random.default_rng(seed)
    x = unaligned(encode(random.normal(size=(rows, width)) * scale, kind), offset)
    weight = None if weight_kind is None else unaligned(encode(random.normal(size=width), weight_kind), offset)
    out = decode(rms_norm(x, weight, kind, weight_kind or F32, 1e-5), kind)
    exact = decode(x, kind)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    if weight is not None:
        wanted = wanted * decode(weight, weight_kind)
    bound = np.abs(wanted) * ((width + 8) * EPS[F32] + 2 * EPS[kind]) + smallest(kind)
    assert (np.abs(out - wanted) <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rms_norm_passes_on_what_is_no_number(kind, bad):
    x = encode(np.ones((2, 33)), kind)
    x[1, 32] = encode(np.array([bad]), kind)[0]
    out = decode(rms_norm(x, None, kind, F32, 1e-5), kind)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1, 32])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_kind", [*KINDS, None])
@settings(max_examples=30)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 200),
    offset=st.integers(0, 7),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    mean=st.sampled_from([0.0, 1.0, -30.0]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_layer_norm(kind, weight_kind, rows, width, offset, scale, mean, with_bias, seed):
    random = np.random.default_rng(seed)
    x = unaligned(encode(random.normal(size=(rows, width)) * scale + mean, kind), offset)
    scaled = weight_kind is not None
    parts = unaligned(encode(random.normal(size=(2, width)), weight_kind or F32), offset)
    weight, bias = (parts[0] if scaled else None), (parts[1] if with_bias else None)
    out = decode(layer_norm(x, weight, bias, kind, weight_kind or F32, 1e-5), kind)
    exact = decode(x, kind)
    centred = exact - exact.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    factor = decode(parts[0], weight_kind or F32) if scaled else 1.0
    wanted = centred / deviation * factor
    # the mean's error, of at most (width + 1) roundings of the elements, moves every element
    lost = np.abs(exact).mean(-1, keepdims=True) * (width + 1) * EPS[F32] / deviation
    bound = (np.abs(wanted) + np.abs(lost * factor)) * ((width + 8) * EPS[F32] + 1) - np.abs(wanted)
    if with_bias:
        wanted = wanted + decode(parts[1], weight_kind or F32)
    bound = bound + np.abs(wanted) * 2 * EPS[kind] + smallest(kind)
    assert (np.abs(out - wanted) <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_layer_norm_passes_on_what_is_no_number(kind, bad):
    x = encode(np.arange(66).reshape(2, 33), kind)
    x[1, 32] = encode(np.array([bad]), kind)[0]
    out = decode(layer_norm(x, None, None, kind, F32, 1e-5), kind)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
