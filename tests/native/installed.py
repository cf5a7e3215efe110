"""Calls every entry point that `phalanx.kernels.install` replaces, before and after; prints what differs."""

from __future__ import annotations

import json
import sys

import phalanx.kernels.preload  # noqa: F401  (before MLX)

# isort: split
import inspect
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations as lm_activations
from mlx_lm.models import switch_layers

from phalanx.kernels.install import install
from phalanx.model.sampling.sampler import SamplingMetadata, TokenCounts, sample
from phalanx.types import Sampling

Calls = dict[str, Callable[[], mx.array]]


def products() -> Calls:
    calls: Calls = {}
    for a_type in (mx.float32, mx.float16, mx.bfloat16):
        for b_type in (mx.float32, mx.float16, mx.bfloat16):
            a, b = mx.random.normal((2, 3, 24)).astype(a_type), mx.random.normal((24, 16)).astype(b_type)
            batch, c = mx.random.normal((2, 24, 5)).astype(b_type), mx.random.normal((16,)).astype(b_type)
            name = f"{a_type} {b_type}".replace("mlx.core.", "")
            calls |= {
                f"@ {name}": lambda a=a, b=b: a @ b,
                f"@ transposed {name}": lambda a=a, b=b: a @ mx.contiguous(b.T).T,
                f"@ batched {name}": lambda a=a, b=batch: a @ b,
                f"matmul {name}": lambda a=a, b=b: mx.matmul(a, b),
                f"matmul vector {name}": lambda a=a, b=b: mx.matmul(a[0, 0], b[:, 0]),
                f"addmm {name}": lambda a=a, b=b, c=c: mx.addmm(c, a, b),
                f"addmm scaled {name}": lambda a=a, b=b, c=c: mx.addmm(c, a, b, alpha=0.5, beta=2.0),
            }
    return calls


def mixtures() -> Calls:
    a, b = mx.random.normal((4, 1, 24)), mx.random.normal((3, 24, 8))
    lhs, rhs = mx.array([[0, 3], [2, 2]]), mx.array([[2, 0], [1, 1]])
    return {
        "gather_mm": lambda: mx.gather_mm(a, b, lhs, rhs),
        "gather_mm without lhs": lambda: mx.gather_mm(a, b, rhs_indices=mx.array([0, 1, 2, 2])),
        "gather_mm without lhs, broadcast": lambda: mx.gather_mm(a[:, None], b, rhs_indices=rhs[:1].T.reshape(1, 2)),
        "gather_mm without rhs": lambda: mx.gather_mm(a[:3], b, lhs_indices=mx.array([0, 1, 2])),
    }


def norms() -> Calls:
    x, weight = mx.random.normal((2, 5, 48)), mx.random.normal((48,))
    half = x.astype(mx.float16)
    return {
        "softmax": lambda: mx.softmax(x, axis=-1),
        "softmax half": lambda: mx.softmax(half, axis=2, precise=True),
        "softmax elsewhere": lambda: mx.softmax(x, axis=1),
        "softmax of all": lambda: mx.softmax(x),
        "logsumexp": lambda: mx.logsumexp(x, axis=-1),
        "logsumexp kept": lambda: mx.logsumexp(x, axis=-1, keepdims=True),
        "logsumexp of all": lambda: mx.logsumexp(x),
        "rms_norm": lambda: mx.fast.rms_norm(x, weight, 1e-5),
        "rms_norm plain": lambda: mx.fast.rms_norm(x, None, 1e-5),
        "rms_norm half": lambda: mx.fast.rms_norm(half, weight.astype(mx.float16), 1e-5),
        "rms_norm mixed": lambda: mx.fast.rms_norm(half, weight, 1e-5),
        "rms_norm view": lambda: mx.fast.rms_norm(x.swapaxes(0, 1)[:, :, ::2], weight[:24], 1e-5),
        "nn.RMSNorm": lambda: nn.RMSNorm(48)(x),
    }


def quantised() -> Calls:
    calls: Calls = {}
    x, w = mx.random.normal((2, 3, 64)), mx.random.normal((4, 32, 64))
    pick = mx.array([[0, 3], [1, 1]])
    for mode, bits, group in (
        ("affine", 4, 64),
        ("affine", 3, 32),
        ("mxfp4", 4, 32),
        ("nvfp4", 4, 16),
        ("mxfp8", 8, 32),
    ):
        one = mx.quantize(w[0], group, bits, mode=mode)
        many = mx.quantize(w, group, bits, mode=mode)
        how = {"group_size": group, "bits": bits, "mode": mode}
        calls |= {
            f"quantized_matmul {mode}{bits}": lambda q=one, how=how: mx.quantized_matmul(x, *q, **how),
            f"quantized_matmul back {mode}{bits}": lambda q=one, how=how: mx.quantized_matmul(
                x[..., :32], *q, transpose=False, **how
            ),
            f"quantized_matmul half {mode}{bits}": lambda q=one, how=how: mx.quantized_matmul(
                x.astype(mx.float16), *q, **how
            ),
            f"gather_qmm {mode}{bits}": lambda q=many, how=how: mx.gather_qmm(
                x[0, :1, None], *q, rhs_indices=pick, **how
            ),
            f"dequantize {mode}{bits}": lambda q=one, how=how: mx.dequantize(*q, **how),
            f"dequantize rows {mode}{bits}": lambda q=one, how=how: mx.dequantize(*(part[pick] for part in q), **how),
        }
    return calls


def attention() -> Calls:
    q, k, v = (mx.random.normal((2, heads, 5, 64)) for heads in (8, 2, 2))
    seen = mx.random.bernoulli(0.7, (2, 1, 5, 5)) | mx.eye(5, dtype=mx.bool_)
    freqs = mx.arange(1, 33, dtype=mx.float32)

    def sdpa(**more: Any) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, **more)

    def rope(dims: int, offset: Any, *, traditional: bool = False, **more: Any) -> mx.array:
        return mx.fast.rope(q, dims, traditional=traditional, scale=1.0, offset=offset, **more)

    return {
        "sdpa": sdpa,
        "sdpa causal": lambda: sdpa(mask="causal"),
        "sdpa seen": lambda: sdpa(mask=seen),
        "sdpa added": lambda: sdpa(mask=mx.where(seen, 0.0, -1e9)),
        "sdpa sinks": lambda: sdpa(mask="causal", sinks=mx.arange(8.0)),
        "sdpa stream": lambda: sdpa(stream=mx.cpu),
        "rope": lambda: rope(64, 3, base=1e4),
        "rope traditional": lambda: rope(32, 3, base=1e4, traditional=True),
        "rope per row": lambda: rope(64, mx.array([3, 50]), base=1e4),
        "rope freqs": lambda: rope(64, 3, base=None, freqs=freqs),
        "layer_norm": lambda: mx.fast.layer_norm(q, mx.repeat(freqs, 2), None, 1e-5),
        "layer_norm bias": lambda: mx.fast.layer_norm(q, mx.repeat(freqs, 2), mx.repeat(freqs, 2), 1e-5),
    }


def gates() -> Calls:
    a, b = mx.random.normal((3, 70)) * 4, mx.random.normal((3, 70)) * 4
    calls: Calls = {
        f"{name} {dtype}": lambda f=name, m=module, dtype=dtype: getattr(m, f)(a.astype(dtype))
        for dtype in (mx.float32, mx.bfloat16, mx.float16)
        for module, name in ((nn, "silu"), (nn, "gelu"), (nn, "gelu_approx"))
    }
    return calls | {
        "sigmoid": lambda: mx.sigmoid(a),
        "sigmoid of integers": lambda: mx.sigmoid(mx.arange(5)),
        "sigmoid of a number": lambda: mx.sigmoid(mx.array(0.3)),
        "sigmoid stream": lambda: mx.sigmoid(a, stream=mx.cpu),
        "argpartition": lambda: mx.argpartition(a, -8),
        "argpartition of columns": lambda: mx.argpartition(a, kth=1, axis=0),
        "argpartition of integers": lambda: mx.argpartition(mx.array([3, 1, 2]), 1),
        "argpartition flat": lambda: mx.argpartition(a, 7, axis=None),
        "swiglu": lambda: lm_activations.swiglu(a, b),
        "swiglu elsewhere": lambda: switch_layers.swiglu(a, b),
        "swiglu broadcast": lambda: lm_activations.swiglu(a, b[:1]),
        "swiglu_oai": lambda: lm_activations.swiglu_oai(a, b),
        "swiglu_oai with limit": lambda: lm_activations.swiglu_oai(a, b, alpha=1.5, limit=2.0),
        "nn.SiLU": lambda: nn.SiLU()(a),
    }


SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.99},
    {"temperature": 0.0},
]


def draws() -> list[tuple[int, list[int], float]]:
    """Token, likeliest tokens and log-probability for many seeds, vocabularies and filters."""
    found = []
    for vocabulary in (50, 1000, 5003):
        for spread in (1.0, 4.0):
            logits = mx.random.normal((len(SAMPLING), vocabulary), key=mx.random.key(vocabulary)) * spread
            for seed in range(12):
                positions = [
                    SamplingMetadata(Sampling(seed=seed, logprobs=5, **how), seed, TokenCounts([1, 2]))
                    for how in SAMPLING
                ]
                drawn = sample(logits, positions)
                for token, scored in zip(drawn.tokens, drawn.logprobs, strict=True):
                    assert scored is not None
                    found.append((token, [top[0] for top in scored.top], scored.logprob))
    return found


def parameters() -> list[str]:
    """Replaced functions whose parameters are not those of what they replaced."""
    wrong = []
    for owner in (mx, mx.fast):
        for name, function in vars(owner).items():
            if (stock := getattr(function, "__wrapped__", None)) is not None:
                said = stock.__doc__.strip().partition("\n")[0].partition("(")[2].rpartition(")")[0]
                wanted = [part.partition(":")[0].strip() for part in re.sub(r"\[.*?\]", "", said).split(",")]
                mine = list(inspect.signature(function, follow_wrapped=False).parameters)
                if mine != [part for part in wanted if part and part not in "/*"]:
                    wrong.append(f"{name}{mine} instead of {wanted}")
    return wrong


def main() -> None:
    mx.random.seed(0)
    calls = {**products(), **mixtures(), **norms(), **quantised(), **attention(), **gates()}
    before = {name: call() for name, call in calls.items()}
    mx.eval(before)
    drawn = draws()
    installed = install("exact", 2)
    wrong = parameters()
    for name, call in calls.items():
        stock, native = before[name], call()
        if stock.shape != native.shape or stock.dtype != native.dtype:
            wrong.append(f"{name}: {native.shape} {native.dtype}, MLX has {stock.shape} {stock.dtype}")
            continue
        # MLX sums 16-bit products in 16 bits.
        tolerance = 2e-5 if stock.dtype == mx.float32 else 0.15 if stock.dtype == mx.bfloat16 else 0.02
        error = mx.abs(native.astype(mx.float32) - stock.astype(mx.float32)).max().item()
        if not error <= tolerance * max(1.0, mx.abs(stock).max().item()):
            wrong.append(f"{name}: differs by {error}")
    for one, two in zip(drawn, draws(), strict=True):  # MLX's sum of exponentials is off by up to 1e-5
        if one[:2] != two[:2] or abs(one[2] - two[2]) > 3e-5:
            wrong.append(f"drew {two}, MLX {one}")
    json.dump({"installed": None if installed is None else installed.entry_points, "wrong": wrong}, sys.stdout)


if __name__ == "__main__":
    main()
