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


WEIGHT_VIEWS = {
    "repacked": lambda w: w.T,
    "as axes": lambda w: mx.transpose(w, (1, 0)),
    "swapped": lambda w: mx.swapaxes(w, 0, 1),
    "repacked twice": lambda w: w.T.T[:10, :20].T,
    "not repacked": lambda w: mx.transpose(w, (0, 1))[:20],
    "a repacked part": lambda w: w[3:13, :20].T,
    "a repacked part of the columns": lambda w: w[:, 7:27].T,
    "every second": lambda w: w[::2, :20].T,
    "backwards": lambda w: w[::-1, :20].T,
    "a repeated row": lambda w: mx.broadcast_to(w[:1, :20], (6, 20)).T,
    "a repeated column": lambda w: mx.broadcast_to(w[:20, :1], (20, 6)),
    "one row": lambda w: w[:1].T[:20],
    "one column": lambda w: w[:20, :1],
    "of three axes": lambda w: mx.transpose(w.reshape(4, 10, 20), (2, 1, 0))[:, :, 0],
}
"""[40, 20 or 40] -> [20, n]"""


@pytest.mark.parametrize("view", WEIGHT_VIEWS)
@pytest.mark.parametrize("computed", ["weight", "view", "nothing"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_any_view_is_a_weight(view, computed, bias, dtype):
    width = 40 if view in ("a repacked part of the columns", "one row") else 20
    w = (mx.arange(40 * width).reshape(40, width) % 17).astype(dtype)
    if computed == "weight":
        mx.eval(w)
    b = WEIGHT_VIEWS[view](w)
    if computed == "view":
        mx.eval(b)
    x, added = mx.arange(60).reshape(3, 20).astype(dtype) % 5, mx.arange(b.shape[1]).astype(dtype)
    found = ops.matmul(x, b, added) if bias else ops.matmul(x, b)
    wanted = x.astype(mx.float32) @ b.astype(mx.float32) + (added if bias else 0)
    assert mx.array_equal(found, wanted.astype(dtype))


ROW_VIEWS = {
    "whole": lambda x: x[:, :20],
    "repacked": lambda x: x[:20, :8].T,
    "every second row": lambda x: x[::2, 4:24],
    "every second column": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1, 19::-1],
    "rows backwards": lambda x: x[::-1, :20],
    "a repeated row": lambda x: mx.broadcast_to(x[:1, :20], (6, 20)),
    "a repeated column": lambda x: mx.broadcast_to(x[:, :1], (40, 20)),
    "a repeated block": lambda x: mx.broadcast_to(x[None, :4, :20], (3, 4, 20)),
    "heads": lambda x: x.reshape(5, 8, 2, 20).swapaxes(1, 2),
    "a part of heads": lambda x: x.reshape(5, 8, 40)[1:4, 2:5, 20:],
    "one": lambda x: x[7, 3:23],
    "one, backwards": lambda x: x[7, 22:2:-1],
    "none": lambda x: x[:0, :20],
}
"""[40, 40] -> [..., 20]"""


@pytest.mark.parametrize("view", ROW_VIEWS)
@pytest.mark.parametrize("computed", [False, True])
def test_any_view_is_multiplied(view, computed):
    x = ROW_VIEWS[view]((mx.arange(1600).reshape(40, 40) % 13).astype(mx.float32))
    w = (mx.arange(140).reshape(7, 20) % 5).astype(mx.float32)
    mx.eval(w, *([x] if computed else []))
    assert mx.array_equal(ops.matmul(x, w.T), x @ w.T)
    assert mx.array_equal(ops.matmul(x.astype(mx.float16), w.T.astype(mx.float16)), (x @ w.T).astype(mx.float16))


def test_a_weight_is_read_as_it_lies(tmp_path):
    """A layer's product is one operation: no view of the weight, no questions about layouts."""
    x, w = mx.random.normal((1, 20)), mx.random.normal((7, 20)).astype(mx.float16)
    mx.eval(w)
    mx.export_to_dot(str(tmp_path / "graph.dot"), ops.matmul(x, w.T))
    graph = (tmp_path / "graph.dot").read_text()
    assert "KernMatmul" in graph and "Transpose" not in graph and "Contiguous" not in graph


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"b is \[k, n\]"):
        ops.matmul(mx.zeros((2, 3)), mx.zeros((4, 5)))
    with pytest.raises(ValueError, match="floating types only"):
        ops.matmul(mx.zeros((2, 3), mx.int32), mx.zeros((3, 4), mx.int32))


def test_gather_mm():
    a, b = mx.random.normal((6, 1, 8)), mx.random.normal((4, 5, 8))
    lhs, rhs = mx.array([[0, 1, 5], [2, 2, 3]]), mx.array([[3, 0, 3], [1, 0, 0]])
    repacked = b.swapaxes(-1, -2)
    assert near(ops.gather_mm(a, repacked, lhs, rhs), mx.gather_mm(a, repacked, lhs, rhs))
