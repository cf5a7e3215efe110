"""MLX operations on kern/checksum.h against what the reducer computes without them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from phalanx_cpu import ops
from test_checksum import signs

from phalanx.dist.checksum import ComposedChecksum

TYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("width", [64, 1000])
def test_operations_give_the_composed_checksums_results(dtype, rows, width):
    y = mx.random.normal((rows, width), key=mx.random.key(1)).astype(dtype)
    weights = mx.array(signs(width))[:, None]
    wire = ops.checksum_load(y, weights, mx.array(5.0))
    checksum = y.astype(mx.float32) @ weights
    high = checksum.astype(dtype)
    parts = [y, high] + ([] if dtype == mx.float32 else [(checksum - high).astype(dtype)])
    magnitude = (mx.linalg.norm(y.astype(mx.float32), axis=-1, keepdims=True) / width).astype(dtype)
    expected = mx.concatenate([*parts, magnitude, mx.full((rows, 1), 5.0, dtype)], axis=-1)
    assert wire.shape == expected.shape
    assert wire.dtype == dtype
    assert (wire[:, :width] == y).all()
    assert (wire[:, -1] == 5.0).all()
    sums = [mx.sum(w[:, width:-2].astype(mx.float32), axis=-1) for w in (wire, expected)]
    assert mx.allclose(*sums, rtol=1e-3 if dtype == mx.bfloat16 else 1e-5, atol=1e-5)
    assert mx.allclose(wire[:, -2], expected[:, -2], rtol=1e-5 if dtype == mx.float32 else 1e-2)
    total, figures = ops.checksum_read(wire + wire, weights)
    assert total.dtype == dtype
    assert (total == y + y).all()
    assert figures.shape == (rows, 3)
    assert figures.dtype == mx.float32
    assert mx.abs(figures[:, 0]).max() < (1e-5 if dtype == mx.float32 else 1e-2)
    assert (figures[:, 1] == (wire + wire)[:, -2].astype(mx.float32)).all()
    assert (figures[:, 2] == 10.0).all()
    mine, theirs = figures, ComposedChecksum().decode(wire + wire, weights[:, 0])[1]
    assert mx.allclose(mine[:, 1:], theirs[:, 1:], rtol=1e-5)
    assert ComposedChecksum().encode(y, weights[:, 0], mx.array(5.0)).shape == wire.shape


@pytest.mark.parametrize("sites", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_verdicts(sites, rows):
    """Native and composed ones, on sums that are right and on each kind that is not."""
    random = np.random.default_rng(0)
    limits = np.stack([random.uniform(1e-6, 1e-3, sites), random.uniform(0, 1e-6, sites)], -1)
    magnitudes = random.uniform(0.1, 10, (sites, rows))
    allowed = limits[:, :1] * magnitudes + limits[:, 1:]
    residuals = allowed * random.uniform(-0.99, 0.99, (sites, rows))
    figures = np.stack([residuals, magnitudes, np.full((sites, rows), 6.0)], -1)
    spoiled = [figures.copy() for _ in range(5)]
    spoiled[0][-1, -1, 0] = -1.01 * allowed[-1, -1]
    spoiled[1][-1, -1, 0] = np.nan
    spoiled[2][-1, -1, 1] = -1.0
    spoiled[3][-1, -1, 2] = 5.0
    spoiled[4][-1, -1, 2] = np.nan
    for judge in (ops.checksum_judge, ComposedChecksum().judge):
        for case in (figures, *spoiled):
            arrays = (mx.array(a.astype(np.float32)) for a in (case.reshape(-1, 3), limits))
            assert judge(*arrays, mx.array(6.0), 4).tolist() == [0.0] * (sites - 1) + [0.0 if case is figures else 4.0]


def test_a_tag_may_have_to_be_computed():
    wire = ops.checksum_load(mx.ones((3, 8)), mx.ones(8), mx.array(2.0) + 3.0)
    assert (wire[:, -1] == 5.0).all()
    flags = ops.checksum_judge(mx.array([[0.0, 1.0, 5.0]]), mx.ones((1, 2)), mx.array(2.0) + 3.0, 1.0)
    assert flags.tolist() == [0.0]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="checksum_judge"):
        ops.checksum_judge(mx.zeros((4, 3)), mx.zeros((3, 2)), mx.array(1.0), 1.0)
    with pytest.raises(ValueError, match="checksum_judge"):
        ops.checksum_judge(mx.zeros((4, 2)), mx.zeros((2, 2)), mx.array(1.0), 1.0)
    with pytest.raises(ValueError, match="checksum_judge"):
        ops.checksum_judge(mx.zeros((4, 3)), mx.zeros((2, 2)).astype(mx.float16), mx.array(1.0), 1.0)
    with pytest.raises(ValueError, match="checksum"):
        ops.checksum_load(mx.zeros((2, 5)), mx.zeros(4), mx.array(1.0))
    for tag in (mx.array(1), mx.array([1.0, 2.0])):
        with pytest.raises(ValueError, match="the tag"):
            ops.checksum_load(mx.zeros((2, 4)), mx.zeros(4), tag)
        with pytest.raises(ValueError, match="the tag"):
            ops.checksum_judge(mx.zeros((4, 3)), mx.zeros((2, 2)), tag, 1.0)
    with pytest.raises(ValueError, match="checksum"):
        ops.checksum_read(mx.zeros((2, 5)), mx.zeros(4))
