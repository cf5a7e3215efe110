"""The functions that replace MLX's: each has MLX's signature, uses a native kernel if one supports the arguments, and
calls MLX's own function otherwise."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx.nn.layers import activations as nn_activations
from mlx_lm.models import activations as lm_activations

from phalanx.kernels.ops import Function, Ops
from phalanx.kernels.ragged_mask import RaggedMask
from phalanx.kernels.traced import Traced

Replacements = dict[str, Function]
"""Attribute of an object -> its new value."""

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")


def replacements(ops: Ops, precision: str) -> list[tuple[Any, Replacements]]:
    """Objects of MLX and their new attributes; `precision` is that of quantised products."""
    return [
        (mx, {**_products(ops), **_quantised(ops, precision), **_long_rows(ops), **_sigmoid(ops)}),
        (mx.array, _operators(ops)),
        (mx.fast, _fast(ops)),
    ]


def _product(ops: Ops, a: mx.array, b: Any, stock: Function) -> mx.array:
    """A product. MLX computes those of float32 with the native BLAS already, but not those of 16-bit matrices."""
    if not isinstance(b, mx.array) or a.dtype not in FLOATS or b.dtype not in FLOATS:
        return stock(a, b)
    if a.dtype == mx.float32 == b.dtype or a.ndim == 0 or b.ndim < 2:
        return stock(a, b)
    if b.ndim == 2 and a.shape[-1] == b.shape[0]:
        return ops.matmul(a, b)
    return stock(a.astype(mx.float32), b.astype(mx.float32)).astype(mx.result_type(a, b))


def _operators(ops: Ops) -> Replacements:
    stock = mx.array.__matmul__

    def at(self: mx.array, other: Any) -> mx.array:
        return _product(ops, self, other, stock)

    return {"__matmul__": at}


def _products(ops: Ops) -> Replacements:
    stock_matmul, stock_addmm, stock_gather = mx.matmul, mx.addmm, mx.gather_mm

    def matmul(a: mx.array, b: mx.array, /, *, stream: Any = None) -> mx.array:
        return stock_matmul(a, b, stream=stream) if stream is not None else _product(ops, a, b, stock_matmul)

    def addmm(
        c: mx.array, a: mx.array, b: mx.array, /, alpha: float = 1.0, beta: float = 1.0, *, stream: Any = None
    ) -> mx.array:
        layer = alpha == 1.0 and beta == 1.0 and c.ndim == 1 and b.ndim == 2 and a.ndim >= 1
        floating = {a.dtype, b.dtype, c.dtype} <= set(FLOATS)
        if stream is None and layer and floating and a.shape[-1] == b.shape[0] and c.shape[0] == b.shape[1]:
            if mx.result_type(a, b, c) == mx.result_type(a, b):
                return ops.matmul(a, b, c)
        return stock_addmm(c, a, b, alpha, beta, stream=stream)

    def gather_mm(
        a: mx.array, b: mx.array, /, lhs_indices: Any = None, rhs_indices: Any = None, *, sorted_indices: bool = False,
        stream: Any = None,
    ) -> mx.array:  # fmt: skip
        if stream is None and rhs_indices is not None and a.dtype in FLOATS and b.dtype in FLOATS:
            return ops.gather_mm(a, b, *_index_pairs(a, lhs_indices, rhs_indices))
        return stock_gather(a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices, stream=stream)

    return {"matmul": matmul, "addmm": addmm, "gather_mm": gather_mm}


def _quantised(ops: Ops, precision: str) -> Replacements:
    stock_matmul, stock_gather, stock_dequantize = mx.quantized_matmul, mx.gather_qmm, mx.dequantize

    def quantized_matmul(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None, transpose: bool = True,
        group_size: int | None = None, bits: int | None = None, mode: str = "affine", *, stream: Any = None,
    ) -> mx.array:  # fmt: skip
        arguments = (x, w, scales, biases, transpose, group_size, bits, mode)
        if stream is None and _is_supported(x, scales, mode):
            return ops.quantized_matmul(*arguments, precision=precision)
        return stock_matmul(*arguments, stream=stream)

    def gather_qmm(
        x: mx.array, w: mx.array, /, scales: mx.array, biases: mx.array | None = None, lhs_indices: Any = None,
        rhs_indices: Any = None, transpose: bool = True, group_size: int | None = None, bits: int | None = None,
        mode: str = "affine", global_scale: Any = None, *, sorted_indices: bool = False, stream: Any = None,
    ) -> mx.array:  # fmt: skip
        arguments = (x, w, scales, biases, lhs_indices, rhs_indices, transpose, group_size, bits, mode)
        if stream is None and global_scale is None and _is_supported(x, scales, mode):
            return ops.gather_qmm(*arguments, precision=precision)
        return stock_gather(*arguments, global_scale, sorted_indices=sorted_indices, stream=stream)

    def dequantize(
        w: mx.array, /, scales: mx.array, biases: mx.array | None = None, group_size: int | None = None,
        bits: int | None = None, mode: str = "affine", global_scale: Any = None, dtype: Any = None, *,
        stream: Any = None,
    ) -> mx.array:  # fmt: skip
        # Repacked tables (int32) are only for `RepackedEmbedding`, since a row of one is not contiguous: MLX refuses it
        if stream is None and global_scale is None and w.dtype == mx.uint32 and (dtype is None or dtype in FLOATS):
            if mode in MODES and (mode != "affine" or scales.dtype in FLOATS):
                return ops.dequantize_rows(w, scales, biases, None, group_size, bits, mode, dtype)
        return stock_dequantize(w, scales, biases, group_size, bits, mode, global_scale, dtype, stream=stream)

    return {"quantized_matmul": quantized_matmul, "gather_qmm": gather_qmm, "dequantize": dequantize}


def _long_rows(ops: Ops) -> Replacements:
    stock_softmax, stock_logsumexp, stock_argpartition = mx.softmax, mx.logsumexp, mx.argpartition

    def last_axis(a: mx.array, axis: Any) -> bool:
        return a.dtype in FLOATS and a.size > 0 and a.ndim > 0 and axis in (-1, a.ndim - 1)

    def softmax(a: mx.array, /, axis: Any = None, *, precise: bool = False, stream: Any = None) -> mx.array:
        if stream is None and last_axis(a, axis):
            return ops.softmax(a)  # always precise
        return stock_softmax(a, axis, precise=precise, stream=stream)

    def logsumexp(a: mx.array, /, axis: Any = None, keepdims: bool = False, *, stream: Any = None) -> mx.array:
        if stream is None and last_axis(a, axis):
            return ops.logsumexp(a, keepdims)
        return stock_logsumexp(a, axis, keepdims, stream=stream)

    def argpartition(a: mx.array, /, kth: int, axis: Any = -1, *, stream: Any = None) -> mx.array:
        if stream is None and last_axis(a, axis) and -a.shape[-1] <= kth < a.shape[-1]:
            return ops.arg_partition(a, kth)
        return stock_argpartition(a, kth, axis, stream=stream)

    return {"softmax": softmax, "logsumexp": logsumexp, "argpartition": argpartition}


def _sigmoid(ops: Ops) -> Replacements:
    stock = mx.sigmoid

    def sigmoid(a: mx.array, /, *, stream: Any = None) -> mx.array:
        floating = stream is None and a.dtype in FLOATS and a.size > 0 and a.ndim > 0
        return ops.sigmoid(a) if floating else stock(a, stream=stream)

    return {"sigmoid": sigmoid}


def _is_supported(x: mx.array, scales: mx.array, mode: str) -> bool:
    affine = scales.dtype in FLOATS or scales.dtype == mx.uint8  # factors
    return x.dtype in FLOATS and mode in MODES and (mode != "affine" or affine)


def _fast(ops: Ops) -> Replacements:
    stock_rms, stock_layer, stock_rope = mx.fast.rms_norm, mx.fast.layer_norm, mx.fast.rope
    stock_attention = mx.fast.scaled_dot_product_attention

    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
        if stream is None and _keeps_type(x, weight):
            return ops.rms_norm(x, weight, eps)
        return stock_rms(x, weight, eps, stream=stream)

    def layer_norm(
        x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, stream: Any = None
    ) -> mx.array:
        if stream is None and _keeps_type(x, weight, bias):
            return ops.layer_norm(x, weight, bias, eps)
        return stock_layer(x, weight, bias, eps, stream=stream)

    def rope(
        a: mx.array, dims: int, *, traditional: bool, base: float | None, scale: float, offset: Any,
        freqs: mx.array | None = None, stream: Any = None,
    ) -> mx.array:  # fmt: skip
        if type(offset) is Traced:
            offset = offset.plain
        if stream is None and a.dtype in FLOATS and a.ndim >= 3:
            return ops.rope(a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs)
        return stock_rope(
            a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, stream=stream
        )

    def attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: mx.array | None = None,
        force_fused: bool = False, stream: Any = None,
    ) -> mx.array:  # fmt: skip
        if stream is None and q.dtype in FLOATS and q.dtype == k.dtype == v.dtype:
            if type(mask) is RaggedMask and mask.shape[2:] == (q.shape[2], k.shape[2]):
                return ops.attention(
                    q, k, v, scale=scale, sinks=sinks, lengths=mask.lengths, window=mask.window, slots=mask.slots
                )
            return ops.attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
        return stock_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)

    return {"rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope, "scaled_dot_product_attention": attention}


def _keeps_type(x: mx.array, *weights: mx.array | None) -> bool:
    """Whether a norm of x is not empty and has the dtype of x."""
    present = [w for w in weights if w is not None]
    floating = all(array.dtype in FLOATS for array in (x, *present))
    return floating and x.size > 0 and mx.result_type(x, *present) == x.dtype


def activations(ops: Ops) -> list[tuple[Function, Function]]:
    """Pairs of MLX's activation functions and their native versions."""

    def silu(x: mx.array) -> mx.array:
        return ops.silu(x) if x.dtype in FLOATS else nn_silu(x)

    def gelu(x: mx.array) -> mx.array:
        return ops.gelu(x) if x.dtype in FLOATS else nn_gelu(x)

    def gelu_approx(x: mx.array) -> mx.array:
        return ops.gelu_approx(x) if x.dtype in FLOATS else nn_gelu_approx(x)

    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        return ops.silu(gate, x) if _same_form(gate, x) else lm_swiglu(gate, x)

    def swiglu_oai(gate: mx.array, x: mx.array, alpha: float = 1.702, limit: float = 7.0) -> mx.array:
        return ops.swiglu_oai(gate, x, alpha, limit) if _same_form(gate, x) else lm_swiglu_oai(gate, x, alpha, limit)

    nn_silu, nn_gelu, nn_gelu_approx = nn_activations.silu, nn_activations.gelu, nn_activations.gelu_approx
    lm_swiglu, lm_swiglu_oai = lm_activations.swiglu, lm_activations.swiglu_oai
    return [
        (nn_silu, silu),
        (nn_gelu, gelu),
        (nn_gelu_approx, gelu_approx),
        (lm_swiglu, swiglu),
        (lm_swiglu_oai, swiglu_oai),
    ]


def _same_form(a: mx.array, b: mx.array) -> bool:
    return a.dtype in FLOATS and a.dtype == b.dtype and a.shape == b.shape


def _index_pairs(a: mx.array, lhs: mx.array | None, rhs: mx.array) -> tuple[mx.array, mx.array]:
    """Both index arrays, broadcast to one shape. Without the first, the matrices of a are taken in order, as in MLX."""
    if lhs is None:
        batch = a.shape[:-2]
        lhs = mx.arange(math.prod(batch), dtype=mx.uint32).reshape(batch)
    lhs, rhs = mx.broadcast_arrays(lhs, rhs)
    return lhs, rhs
