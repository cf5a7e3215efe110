"""The MLX operations on rows against MLX's own, in fp32; shapes, types and views as models pass them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.activations import swiglu_oai
from phalanx_cpu import ops

TYPES = [mx.float32, mx.float16, mx.bfloat16]


def near(a: mx.array, b: mx.array, tolerance: float = 3e-6) -> bool:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return bool(mx.allclose(a.astype(mx.float32), b.astype(mx.float32), rtol=tolerance, atol=tolerance))


def values(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@pytest.mark.parametrize("shape", [(7, 33), (64,), (2, 3, 5, 64), (0, 8)])
@pytest.mark.parametrize("parts", ["none", "weight", "both"])
def test_norms(shape: tuple[int, ...], parts: str) -> None:
    x, weight, bias = values(*shape) + 1, values(shape[-1]), values(1, shape[-1])[0]
    given = (weight if parts != "none" else None, bias if parts == "both" else None)
    assert near(ops.layer_norm(x, *given, 1e-5), mx.fast.layer_norm(x, *given, 1e-5))
    assert near(ops.rms_norm(x, given[0], 1e-5), mx.fast.rms_norm(x, given[0], 1e-5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weight_dtype", TYPES)
def test_norms_give_the_types_that_mlx_gives(dtype: mx.Dtype, weight_dtype: mx.Dtype) -> None:
    x, weight = values(3, 64).astype(dtype), values(64).astype(weight_dtype)
    assert near(ops.rms_norm(x, weight, 1e-5), mx.fast.rms_norm(x, weight, 1e-5), 0.03)
    assert near(ops.layer_norm(x, weight, weight, 1e-5), mx.fast.layer_norm(x, weight, weight, 1e-5), 0.05)


VIEWS = {
    "transposed": lambda: values(33, 64).T,
    "every other": lambda: values(5, 128)[:, ::2],
    "part of a projection": lambda: values(2, 5, 96)[..., 32:],
    "heads": lambda: values(2, 5, 4, 64).swapaxes(1, 2),
    "repeated": lambda: mx.broadcast_to(values(64), (3, 64)),
    "repeated rows": lambda: mx.broadcast_to(values(3, 64)[:, None], (3, 4, 64)),
    "one number": lambda: mx.broadcast_to(mx.array(1.5), (3, 64)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    x = VIEWS[view]()
    assert near(ops.rms_norm(x, None, 1e-5), mx.fast.rms_norm(x, None, 1e-5))
    assert near(ops.silu(x, x), nn.silu(x) * x)
    if x.ndim > 2:
        turn: dict[str, Any] = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 3}
        assert near(ops.rope(x, 16, **turn), mx.fast.rope(x, 16, **turn))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [64, 32, 6])
@pytest.mark.parametrize("frequencies", ["base", "another base", "freqs", "freqs in bfloat16"])
@pytest.mark.parametrize("offset", [0, 7, "scalar", "per row", "per row, int64", "one in a vector"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rope(traditional: bool, dims: int, frequencies: str, offset: int | str, scale: float) -> None:
    x = values(2, 5, 4, 64).swapaxes(1, 2)
    freqs = mx.random.uniform(1, 100, (dims // 2,), key=mx.random.key(3))
    turn: dict[str, Any] = {
        "base": {"base": 10_000.0},
        "another base": {"base": 500_000.0},
        "freqs": {"base": None, "freqs": freqs},
        "freqs in bfloat16": {"base": None, "freqs": freqs.astype(mx.bfloat16)},
    }[frequencies]
    turn["offset"] = {
        "scalar": mx.array(9),
        "per row": mx.array([3, 800]),
        "per row, int64": mx.array([3, 8], mx.int64),
        "one in a vector": mx.array([4]),
    }.get(str(offset), offset)
    turn |= {"traditional": traditional, "scale": scale}
    assert near(ops.rope(x, dims, **turn), mx.fast.rope(x, dims, **turn), 1e-4 if offset == "per row" else 3e-6)


@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 3, 4, 5, 64), (1, 1, 1, 64)])
@pytest.mark.parametrize("dtype", TYPES)
def test_rope_of_any_rank_and_type(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    x = values(*shape).astype(dtype)
    turn: dict[str, Any] = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 3}
    assert near(ops.rope(x, 64, **turn), mx.fast.rope(x, 64, **turn), 3e-6 if dtype == mx.float32 else 0.03)


@pytest.mark.parametrize(
    ("dims", "given"),
    [
        (7, {"base": 1e4}),
        (66, {"base": 1e4}),
        (64, {"base": None}),
        (64, {"base": 1e4, "freqs": mx.zeros(32)}),
        (64, {"base": None, "freqs": mx.zeros(31)}),
        (64, {"base": 1e4, "offset": mx.array([1, 2, 3])}),
    ],
)
def test_rope_refuses_what_mlx_refuses(dims: int, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope"):
        ops.rope(mx.zeros((2, 1, 1, 64)), dims, **{"traditional": False, "scale": 1.0, "offset": 0} | given)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 50), (1, 1, 40_000), (5, 1, 96)])
def test_gates(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    gate, up = values(*shape).astype(dtype) * 4, values(*reversed(shape)).T.astype(dtype) * 4
    tolerance = 5e-6 if dtype == mx.float32 else 0.05
    for ours, theirs in ((ops.silu, nn.silu), (ops.gelu, nn.gelu), (ops.gelu_approx, nn.gelu_approx)):
        assert near(ours(gate, up), theirs(gate) * up, tolerance)
        assert near(ours(gate), theirs(gate), tolerance)
    assert near(ops.swiglu_oai(gate, up), swiglu_oai(gate, up), tolerance)
    assert near(ops.sigmoid(gate), mx.sigmoid(gate), tolerance)


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        ops.silu(mx.zeros((2, 2), mx.int32))
