"""Checks at start that the native kernels compute the same as MLX on this processor."""

from __future__ import annotations

import mlx.core as mx

from phalanx.kernels.ops import Ops

EXACT_LIMIT, ROUNDED_LIMIT, FAST_LIMIT = 1e-4, 5e-3, 3e-2
"""Largest difference of a native result from MLX's, relative to its norm: in float32, in 16 bits, and of `fast`
products (measured: up to 5e-7, 2e-3 in bfloat16, and 9e-3)."""


def disagreements(ops: Ops, precision: str) -> list[str]:
    """Run a few small calls of each native operation. Returns the names of those whose results are not MLX's.

    So an unknown processor or a compiler's fault shows before a model is loaded. The reference for products consists
    of multiplications and sums, because MLX's own product uses the native BLAS, which is checked as well.
    """

    def product(x: mx.array, w: mx.array) -> mx.array:
        return mx.sum(x[:, None].astype(mx.float32) * w.astype(mx.float32), axis=-1)

    key = iter(mx.random.split(mx.random.key(7), 16))
    one_row, rows, w = (mx.random.normal(shape, key=next(key)) for shape in ((1, 256), (40, 256), (48, 256)))
    gate, queries = mx.random.normal((3, 70), key=next(key)), mx.random.normal((1, 4, 9, 64), key=next(key))
    keys = mx.random.normal((1, 2, 9, 64), key=next(key))

    def last_eight(indices: mx.array) -> mx.array:
        return mx.sort(mx.take_along_axis(rows, indices[:, -8:], axis=-1), axis=-1)

    pairs = {
        "attention": (
            ops.attention(queries, keys, keys, scale=0.125, mask="causal"),
            mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.125, mask="causal"),
        ),
        "rms_norm": (ops.rms_norm(rows, w[0], 1e-5), mx.fast.rms_norm(rows, w[0], 1e-5)),
        "rope": (
            ops.rope(queries, 64, traditional=False, base=1e4, scale=1.0, offset=3),
            mx.fast.rope(queries, 64, traditional=False, base=1e4, scale=1.0, offset=3),
        ),
        "silu": (ops.silu(gate), gate * mx.sigmoid(gate)),
        "sigmoid": (ops.sigmoid(gate), mx.sigmoid(gate)),
        "logsumexp": (ops.logsumexp(rows), mx.logsumexp(rows, axis=-1)),
        "argpartition": (last_eight(ops.arg_partition(rows, -8)), last_eight(mx.argpartition(rows, -8, axis=-1))),
        "peaks": (ops.peaks(rows)[0] + ops.peaks(rows)[1], rows.sum(axis=-1) + rows.max(axis=-1)),
    }
    for x in (one_row, rows):
        bfloat16 = w.astype(mx.bfloat16)
        pairs[f"BLAS of {len(x)}"] = (x @ w.T, product(x, w))
        pairs[f"matmul of {len(x)}"] = (ops.matmul(x, bfloat16.T), product(x, bfloat16))
        for mode, bits, group in (("affine", 4, 64), ("affine", 8, 64), ("affine", 3, 64), ("mxfp4", 4, 32)):
            for value in (x, x.astype(mx.bfloat16)):
                codes, scales, *offsets = mx.quantize(w.astype(value.dtype), group, bits, mode=mode)
                biases = offsets[0] if offsets else None
                ours = ops.quantized_matmul(value, codes, scales, biases, True, group, bits, mode, precision=precision)
                if biases is not None:  # dequantising in 16 bits would round once more
                    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
                numbers = mx.dequantize(codes, scales, biases, group_size=group, bits=bits, mode=mode)
                kind = "bfloat16" if value.dtype == mx.bfloat16 else "float32"
                pairs[f"{mode} {bits} bits of {len(x)} in {kind}"] = ours, product(value, numbers)
                if ops.repacks(len(w), w.shape[-1], mode, group, bits):
                    repacked = _repacked(ops, codes, scales, biases)
                    ours = ops.quantized_matmul(value, *repacked, True, group, bits, mode, precision=precision)
                    pairs[f"{mode} {bits} bits of {len(x)} in {kind}, repacked"] = ours, product(value, numbers)

    def limit(name: str, ours: mx.array) -> float:
        if precision == "fast" and "bits" in name:
            return FAST_LIMIT
        return EXACT_LIMIT if ours.dtype == mx.float32 else ROUNDED_LIMIT

    return [name for name, (ours, theirs) in pairs.items() if not _distance(ours, theirs) <= limit(name, ours)]


def _repacked(ops: Ops, *parts: mx.array | None) -> list[mx.array | None]:
    """Repacked copies of codes, scales and biases."""
    copies = [None if part is None else part + mx.zeros(part.shape, part.dtype) for part in parts]
    mx.eval([copy for copy in copies if copy is not None])
    return [None if copy is None else ops.repack_rows(copy) for copy in copies]


def _distance(ours: mx.array, theirs: mx.array) -> float:
    return float((mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)).item())  # type: ignore[arg-type]
