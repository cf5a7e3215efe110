"""Dense products as MLX operations, against MLX's own in float32."""

from __future__ import annotations

import phalanx_cpu  # isort: skip  (before mlx)
import mlx.core as mx
import pytest

ops = phalanx_cpu.ops


def near(found: mx.array, wanted: mx.array, tolerance: float = 1e-4) -> bool:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return bool(mx.allclose(found.astype(mx.float32), wanted.astype(mx.float32), atol=tolerance, rtol=tolerance))


@pytest.mark.parametrize("shape", [(8,), (1, 1, 8), (2, 5, 8), (0, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_matmul(shape, bias):
    x, w, b = mx.random.normal(shape), mx.random.normal((5, 8)), mx.random.normal((5,))
    assert near(ops.matmul(x, w.T, b if bias else None), x @ w.T + (b if bias else 0.0))


@pytest.mark.parametrize("x_type", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("w_type", [mx.float32, mx.float16, mx.bfloat16])
def test_the_type_is_what_mlx_would_give(x_type, w_type):
    x, w = mx.random.normal((3, 16)).astype(x_type), mx.random.normal((4, 16)).astype(w_type)
    assert near(ops.matmul(x, w.T), x @ w.T, 0.1)


def test_views_are_taken_as_they_are():
    x, w = mx.random.normal((16, 3)).T, mx.random.normal((32, 10))
    for view in (w[:16, :4], w.T[:4, :16].T, w.T[2:6, 1:17].T, w[::2, ::3]):
        assert near(ops.matmul(x, view), x @ view)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"b is \[k, n\]"):
        ops.matmul(mx.zeros((2, 3)), mx.zeros((4, 5)))
    with pytest.raises(ValueError, match="floating types only"):
        ops.matmul(mx.zeros((2, 3), mx.int32), mx.zeros((3, 4), mx.int32))


def test_gather_mm():
    a, b = mx.random.normal((6, 1, 8)), mx.random.normal((4, 5, 8))
    lhs, rhs = mx.array([[0, 1, 5], [2, 2, 3]]), mx.array([[3, 0, 3], [1, 0, 0]])
    turned = b.swapaxes(-1, -2)
    assert near(ops.gather_mm(a, turned, lhs, rhs), mx.gather_mm(a, turned, lhs, rhs))
