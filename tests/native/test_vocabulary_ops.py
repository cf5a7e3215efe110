"""MLX operations on kern/vocabulary.h against MLX's own, and against what sampling does without them."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from phalanx_cpu import ops

from phalanx.model.sampling.gumbel import gumbel
from phalanx.model.sampling.logprobs import ranked


def logits(rows: int, width: int, seed: int = 0) -> mx.array:
    x = mx.random.normal((rows, width), key=mx.random.key(seed)) * 3
    return x - mx.max(x, axis=-1, keepdims=True)


@pytest.mark.parametrize(("rows", "width"), [(1, 7), (3, 1000), (2, 32_000)])
def test_gumbel_argmax_draws_what_the_sampler_draws(rows, width):
    z = logits(rows, width)
    tokens = mx.arange(width, dtype=mx.uint64)
    for step in range(10):
        keys = mx.array(np.random.default_rng(step).integers(0, 2**64, (rows, 1), np.uint64))
        for floor in (-math.inf, -3.0):
            scores = mx.where(z >= floor, z + gumbel(keys, tokens), -math.inf)
            drawn = ops.gumbel_argmax(z, keys, mx.full((rows, 1), floor))
            best = mx.max(scores, axis=-1)
            reached = mx.take_along_axis(scores, drawn[:, None], axis=-1)[:, 0]
            # logarithms of gumbel.py differ in their last units from ours: the drawn score is the best but for that
            assert mx.all(reached >= best - 1e-5)
            assert (drawn == mx.argmax(scores, axis=-1)).all()


def test_gumbel_argmax_draws_every_token_as_often_as_it_should():
    z = mx.log(mx.array([[0.5, 0.25, 0.125, 0.125]] * 4000))
    keys = mx.array(np.random.default_rng(1).integers(0, 2**64, 4000, np.uint64))
    drawn = np.array(ops.gumbel_argmax(z, keys, mx.full((4000,), -math.inf)))
    shares = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(shares - [0.5, 0.25, 0.125, 0.125]).max() < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize("k", [1, 5, 64, 1024])
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (3, 5000), (2, 40_000)])
@pytest.mark.parametrize("kind", ["plain", "ascending", "ties", "mostly hidden"])
def test_top_k_is_the_order_that_sampling_uses(k, rows, width, kind):
    z = logits(rows, width)
    if kind == "ascending":
        z = mx.sort(z, axis=-1)
    elif kind == "ties":
        z = mx.round(z)
    elif kind == "mostly hidden":
        z = mx.where(mx.arange(width) % 97 == 3, z, -math.inf)
        z = z - mx.max(z, axis=-1, keepdims=True)
    wanted, ids = ranked(z, k)
    found, indices = ops.top_k(z, k)
    assert (found == wanted).all()
    assert (indices == ids).all()


def test_top_k_of_numbers_above_zero():
    x = mx.array([[1.0, -2.0, 3.0, 3.0, 0.0, -math.inf, math.inf]])
    values, indices = ops.top_k(x, 7)
    assert values.tolist() == [[math.inf, 3.0, 3.0, 1.0, 0.0, -2.0, -math.inf]]
    assert indices.tolist() == [[6, 2, 3, 0, 4, 1, 5]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 60), (2, 9000)])
def test_operations_are_those_of_mlx(dtype, shape):
    x = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype) * 4
    tolerance = 1e-5 if dtype == mx.float32 else 0.02
    for ours, theirs in (
        (ops.softmax(x), mx.softmax(x, axis=-1, precise=True)),
        (ops.logsumexp(x), mx.logsumexp(x, axis=-1)),
        (ops.logsumexp(x, keepdims=True), mx.logsumexp(x, axis=-1, keepdims=True)),
    ):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert mx.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    repacked = mx.softmax(x.T, axis=-1, precise=True) if len(shape) == 2 else None
    assert repacked is None or mx.allclose(ops.softmax(x.T), repacked, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("shape", "kth"), [((1, 1, 64), -8), ((2, 3, 60), 5), ((3, 128), 0), ((5,), -1), ((1, 2000), 7)]
)
def test_arg_partition_is_that_of_mlx(dtype, shape, kth):
    x = mx.round(mx.random.normal(shape, key=mx.random.key(1)) * 8).astype(dtype)
    assert mx.array_equal(ops.arg_partition(x, kth), mx.argpartition(x, kth, axis=-1))
    spread = mx.broadcast_to(x[..., :1], shape)[..., ::-1]
    assert mx.array_equal(ops.arg_partition(spread, kth), mx.argpartition(spread, kth, axis=-1))


@pytest.mark.parametrize(("x", "kth"), [(mx.zeros((0,)), 0), (mx.zeros((2, 4)), 4), (mx.zeros((2, 4)), -5)])
def test_arg_partition_outside_of_a_row_is_refused(x, kth):
    with pytest.raises(ValueError, match="arg_partition"):
        ops.arg_partition(x, kth)


@pytest.mark.parametrize("shape", [(1, 5), (3, 32_000)])
def test_peaks_are_those_of_mlx(shape):
    x = mx.round(logits(*shape) * 4)
    for rows in (x, mx.concatenate([x, x + 1], axis=1)[:, 1 : shape[1]], mx.broadcast_to(x[:1], shape)):
        sums, values, indices = ops.peaks(rows)
        assert mx.allclose(sums, rows.sum(-1), rtol=1e-4)
        assert mx.array_equal(values, rows.max(-1)) and mx.array_equal(indices, mx.argmax(rows, axis=-1))


@pytest.mark.parametrize("x", [mx.zeros((3,)), mx.zeros((3, 0)), mx.zeros((3, 4), mx.float16)])
def test_peaks_of_something_else_are_refused(x):
    with pytest.raises(ValueError, match="peaks"):
        ops.peaks(x)
