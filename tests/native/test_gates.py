"""Kernels of kern/gates.h against float64."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Float, Int, Int64, Pointer, call, decode, encode, pointer, smallest, unaligned

KINDS = [F32, F16, BF16]
SILU, GELU, GELU_TANH, SWIGLU_OAI, SIGMOID = range(5)
ALPHA, LIMIT = float(np.float32(1.702)), 7.0


class Gate(ctypes.Structure):
    _fields_ = [
        ("gate", Pointer),
        ("up", Pointer),
        ("out", Pointer),
        ("rows", Int64),
        ("width", Int64),
        ("gate_stride", Int64),
        ("up_stride", Int64),
        ("out_stride", Int64),
        ("alpha", Float),
        ("limit", Float),
        ("type", Int),
        ("activation", Int),
    ]


def gate(g, u, kind, activation):
    rows, width = g.shape
    out = np.zeros((rows, width), g.dtype)
    strides = [0 if a is None else a.strides[0] // a.itemsize for a in (g, u, out)]
    args = Gate(pointer(g), pointer(u), pointer(out), rows, width, *strides, ALPHA, LIMIT, kind, activation)
    assert call("kern_gate", args) == 0
    return out


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def reference(g, u, activation):
    """The value, and the argument of the exponential in it: its rounding is what the result's error grows with."""
    if activation == SILU:
        return g * sigmoid(g) * u, np.abs(g)
    if activation == SIGMOID:
        return sigmoid(g) * u, np.abs(g)
    if activation == GELU:
        tail = np.vectorize(math.erfc)(-g / math.sqrt(2.0)) / 2
        return g * tail * u, g * g / 2
    if activation == GELU_TANH:
        y = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        return g * sigmoid(y) * u, np.abs(y)
    g, u = np.minimum(g, LIMIT), np.clip(u, -LIMIT, LIMIT)
    return g * sigmoid(ALPHA * g) * (u + 1), np.abs(ALPHA * g)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", range(5))
@settings(max_examples=30)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 100),
    offset=st.integers(0, 7),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
    with_up=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gates(kind, activation, rows, width, offset, scale, with_up, seed):
    random = np.random.default_rng(seed)
    both = unaligned(encode(random.normal(size=(rows, 2 * width)) * scale, kind), offset)
    g, u = both[:, :width], both[:, width:] if with_up else None
    out = decode(gate(g, u, kind, activation), kind)
    plain = 0.0 if activation == SWIGLU_OAI else 1.0
    ups = np.full(g.shape, plain) if u is None else decode(u, kind)
    wanted, argument = reference(decode(g, kind), ups, activation)
    bound = np.abs(wanted) * ((8 * argument + 32) * EPS[F32] + EPS[kind]) + smallest(kind)
    bound += np.abs((1 if activation == SIGMOID else decode(g, kind)) * ups) * 1e-37  # sigmoids below that vanish
    if activation == SWIGLU_OAI:
        bound += np.abs(decode(g, kind)) * EPS[F32] * 2  # u + 1 rounds
    assert (np.abs(out - wanted) <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", range(5))
def test_gates_at_the_ends(kind, activation):
    g = encode(np.array([[3e4, -3e4, np.nan, np.inf, 0.0, 1.0]]), kind)
    u = encode(np.array([[1.0, 1.0, 1.0, 1.0, np.nan, np.nan]]), kind)
    out = decode(gate(g, u, kind, activation), kind)[0]
    top = {SWIGLU_OAI: 2 * LIMIT * sigmoid(ALPHA * LIMIT), SIGMOID: 1.0}.get(activation, np.inf)
    assert out[1] == 0
    assert out[3] == pytest.approx(top, rel=2 * EPS[kind])
    assert np.isnan(out[[2, 4, 5]]).all()
    assert out[0] == pytest.approx(min(top, decode(g, kind)[0, 0]), rel=2 * EPS[kind])
