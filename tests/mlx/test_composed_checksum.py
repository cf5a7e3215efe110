"""Checksums without native operations: right on devices that round products, and few kernels where they are joined."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest
from support.kernels import compiled, kernels
from support.tf32 import tf32_products

from phalanx.dist.checksum import ComposedChecksum
from phalanx.dist.reduce import FLOOR, tolerance

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
TAG = 3.0


def signs_of(width: int) -> mx.array:
    bits = mx.random.bernoulli(0.5, (width,), key=mx.random.key(width))
    signs = mx.where(bits, 1.0, -1.0) / width**0.5
    mx.eval(signs)
    return signs


def vectors(rows: int, width: int, dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal((rows, width), key=mx.random.key(seed)).astype(dtype)


def passed(checksum: ComposedChecksum, wire: mx.array, signs: mx.array, ranks: int) -> bool:
    """Whether a sum is judged right."""
    _, figures = checksum.decode(wire, signs)
    width = signs.shape[0]
    limits = mx.array([[width * tolerance(width, wire.dtype), FLOOR.get(wire.dtype, 0.0)]])
    return checksum.judge(figures, limits, mx.array(ranks * TAG), 1).item() == 0.0


def summed(checksum: ComposedChecksum, rows: int, width: int, dtype: mx.Dtype, ranks: int = 2) -> mx.array:
    """The sum of encoded vectors of several ranks."""
    signs = signs_of(width)
    wires = [checksum.encode(vectors(rows, width, dtype, rank), signs, mx.array(TAG)) for rank in range(ranks)]
    total = wires[0]
    for wire in wires[1:]:
        total = total + wire
    mx.eval(total)
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (7, 1000), (16, 64)])
def test_right_sums_are_right_on_a_device_that_rounds_products(dtype, rows, width):
    with tf32_products():
        checksum = ComposedChecksum()
        assert passed(checksum, summed(checksum, rows, width, dtype), signs_of(width), ranks=2)


def test_the_stand_in_would_show_a_checksum_that_uses_products():
    """The mutant: the residual of several rows as a matrix product, which is beyond the tolerance in TF32 only."""

    def residual(wire: mx.array, signs: mx.array) -> mx.array:
        weights = mx.concatenate([signs, mx.array([-1.0, 0.0, 0.0])])
        return mx.abs(wire @ weights[:, None])[:, 0]

    width = 4096
    checksum, signs = ComposedChecksum(), signs_of(width)
    wire = summed(checksum, 4, width, mx.float32)
    limit = width * tolerance(width, mx.float32) * wire[:, -2]
    assert (residual(wire, signs) <= limit).all()
    with tf32_products():
        assert not (residual(wire, signs) <= limit).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 5, 63, -4, -3, -2, -1])
@pytest.mark.parametrize("value", ["other", np.nan, np.inf])
def test_one_wrong_element_is_noticed(dtype, at, value):
    checksum, signs = ComposedChecksum(), signs_of(64)
    wire = summed(checksum, 3, 64, dtype)
    if value == "other" and at == -2:
        value = -1.0  # a magnitude is a bound: a larger one is not noticed by itself (`checksum.py`)
    if value == "other" and at == -3 and dtype != mx.float32:
        value = 0.5  # the low part of the checksum is small itself
    wire[1, at] = wire[1, at] + 1.0 if value == "other" else value
    assert not passed(checksum, wire, signs, ranks=2)
    _, figures = checksum.decode(wire, signs)
    if isinstance(value, float) and not np.isfinite(value):
        assert np.isnan(figures[1, 2].item()) or at == -1


@pytest.mark.skipif(not shutil.which("g++"), reason="MLX compiles with g++ on CPUs")
@pytest.mark.parametrize("dtype", [pytest.param(d, marks=() if d == mx.float32 else pytest.mark.soak) for d in DTYPES])
def test_compiled_functions_give_the_same_bits_for_all_shapes(dtype):
    shapes = [(1, 64), (5, 64), (3, 1000), (1, 1000)]

    def results() -> list[mx.array]:
        checksum = ComposedChecksum()
        wires = [summed(checksum, rows, width, dtype) for rows, width in shapes]
        return [*wires, *(checksum.decode(w, signs_of(s[1]))[1] for w, s in zip(wires, shapes, strict=True))]

    plain = results()
    mx.eval(plain)
    with compiled():
        fused = results()
        mx.eval(fused)
    assert all(mx.array_equal(a, b) for a, b in zip(plain, fused, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_functions_have_few_kernels(dtype, tmp_path):
    checksum, signs, y, tag = ComposedChecksum(), signs_of(64), vectors(2, 64, dtype, 0), mx.array(TAG)
    wire = summed(checksum, 2, 64, dtype)
    mx.eval(y)
    encode, decode = (lambda: checksum.encode(y, signs, tag)), (lambda: checksum.decode(wire, signs)[1])
    before = [kernels(call, tmp_path / "graph.dot").total() for call in (encode, decode)]
    with compiled():
        after = [kernels(call, tmp_path / "graph.dot").total() for call in (encode, decode)]
    assert after == [5, 3]
    assert all(n > 2 * m for n, m in zip(before, after, strict=True))
