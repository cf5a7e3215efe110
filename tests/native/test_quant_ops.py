"""Quantised operations of phalanx_cpu.ops against MLX's own."""

from __future__ import annotations

import math

import phalanx_cpu  # before mlx.core

# isort: split
import mlx.core as mx
import numpy as np
import pytest

ops = phalanx_cpu.ops
MODES = [("affine", 64, 4), ("affine", 32, 8), ("affine", 128, 3), ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]


def quantised(shape, mode="affine", group=64, bits=4):
    w, scales, *biases = mx.quantize(mx.random.normal(shape), group, bits, mode=mode)
    return w, scales, biases[0] if biases else None


def close(ours, stock):
    assert ours.shape == stock.shape
    assert ours.dtype == stock.dtype
    scale = max(mx.abs(stock).max().item(), 1.0) if stock.size else 1.0
    ours, stock = (np.array(a.astype(mx.float32)) for a in (ours, stock))
    assert np.allclose(ours, stock, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("form", MODES)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("x_shape", [(256,), (1, 256), (3, 5, 256), (2, 1, 11, 256)])
def test_quantized_matmul(form, transpose, x_shape):
    mode, group, bits = form
    x = mx.random.normal(x_shape)
    w = quantised((96, 256) if transpose else (256, 128), *form)
    args = (x, *w, transpose, group, bits, mode)
    close(ops.quantized_matmul(*args), mx.quantized_matmul(*args))


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("x_batch", [(3,), (2, 1), (2, 3)])
@pytest.mark.parametrize("w_batch", [(3,), (2, 1), (2, 3)])
def test_batched_weights(transpose, x_batch, w_batch):
    x = mx.random.normal((*x_batch, 4, 128))
    w = quantised((*w_batch, 48, 128) if transpose else (*w_batch, 128, 64))
    close(ops.quantized_matmul(x, *w, transpose), mx.quantized_matmul(x, *w, transpose))


def test_views():
    x = mx.random.normal((3, 5, 128)).swapaxes(0, 1)[::2]
    w = [a[:, 1:5] for a in quantised((2, 8, 3, 128))]
    w = [a[0].swapaxes(0, 1) for a in w]
    assert w[0].shape == (3, 4, 16)
    close(ops.quantized_matmul(x, *w), mx.quantized_matmul(x, *w))


@pytest.mark.parametrize("x_type", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("scale_type", [mx.float32, mx.float16, mx.bfloat16])
def test_types(x_type, scale_type):
    w, scales, biases = quantised((32, 128))
    args = (mx.random.normal((2, 128)).astype(x_type), w, scales.astype(scale_type), biases.astype(scale_type))
    ours, single = ops.quantized_matmul(*args), ops.quantized_matmul(args[0].astype(mx.float32), *args[1:])
    assert ours.dtype == mx.quantized_matmul(*args).dtype
    assert mx.allclose(ours.astype(mx.float32), single, rtol=2e-2, atol=1e-2).item()


@pytest.mark.parametrize("form", MODES)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_gather_qmm(form, transpose, sort, rows):
    mode, group, bits = form
    x = mx.random.normal((11, rows, 128))
    w = quantised((5, 48, 128) if transpose else (5, 128, 128), *form)
    rhs = mx.random.randint(0, 5, (4, 6))
    rhs = mx.sort(rhs.reshape(-1)).reshape(4, 6) if sort else rhs
    lhs = mx.random.randint(0, 11, (4, 6)).astype(mx.uint32)
    args = (x, *w, lhs, rhs.astype(mx.uint32), transpose, group, bits, mode)
    close(ops.gather_qmm(*args, sorted_indices=sort), mx.gather_qmm(*args, sorted_indices=sort))


def test_gather_without_some_indices():
    x, w = mx.random.normal((2, 3, 1, 128)), quantised((2, 3, 16, 128))
    some = mx.array([[5], [0]], mx.uint32)
    for lhs, rhs in ((some, None), (None, some), (None, None)):
        close(ops.gather_qmm(x, *w, lhs, rhs), mx.gather_qmm(x, *w, lhs, rhs))


@pytest.mark.parametrize(
    "batch, chosen",
    [((2, 3, 1), (2, 3, 4)), ((6,), (6,)), ((1, 1), (3, 4)), ((), (5,)), ((2, 1), (2, 5)), ((1, 3), (2, 3))],
)
def test_experts_of_tokens(batch, chosen):
    x, w = mx.random.normal((*batch, 2, 128)), quantised((5, 16, 128))
    rhs = mx.random.randint(0, 5, (*chosen[:-1], chosen[-1] + 3)).astype(mx.uint32)[..., 2:-1]  # as of a partition
    lhs = mx.arange(math.prod(batch), dtype=mx.uint32).reshape(batch)
    close(ops.gather_qmm(x, *w, None, rhs), mx.gather_qmm(x, *w, lhs, rhs))


@pytest.mark.parametrize("form", MODES)
def test_dequantize_rows(form):
    mode, group, bits = form
    w, scales, biases = quantised((30, 256), *form)
    chosen = mx.array([[3, 3, 29], [0, 7, 1]])
    rest = (group, bits, mode)
    gathered = (w[chosen], scales[chosen], None if biases is None else biases[chosen])
    close(ops.dequantize_rows(w, scales, biases, chosen, *rest), mx.dequantize(*gathered, *rest))
    close(ops.dequantize_rows(*gathered, None, *rest), mx.dequantize(*gathered, *rest))
    half = ops.dequantize_rows(w, scales, biases, chosen, *rest, mx.float16)
    assert half.dtype == mx.float16


def test_fast_is_close():
    x, w = mx.random.normal((5, 256)), quantised((64, 256))
    exact, fast = ops.quantized_matmul(x, *w), ops.quantized_matmul(x, *w, precision="fast")
    assert mx.abs(exact - fast).max().item() < 0.02 * mx.abs(exact).max().item() + 0.2


def test_nothing_to_compute():
    w = quantised((16, 128))
    assert ops.quantized_matmul(mx.zeros((0, 128)), *w).shape == (0, 16)
    assert ops.quantized_matmul(mx.zeros((2, 0, 128)), *w).shape == (2, 0, 16)
    mx.eval(ops.quantized_matmul(mx.zeros((2, 0, 128)), *w))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, "no group size"),
        ({"group_size": 48}, "no group size"),
        ({"mode": "odd"}, "no quantisation mode"),
        ({"bits": 8}, "do not fit"),
        ({"x": mx.zeros((2, 100))}, "last axis of x"),
        ({"x": mx.zeros((2, 128), mx.int32)}, "floating"),
        ({"biases": None}, "do not fit"),
        ({"precision": "good"}, "exact or fast"),
    ],
)
def test_refusals(change, message):
    w, scales, biases = quantised((16, 128))
    args = {"x": mx.zeros((2, 128)), "w": w, "scales": scales, "biases": biases} | change
    with pytest.raises(ValueError, match=message):
        ops.quantized_matmul(**args)
