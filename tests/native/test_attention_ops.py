"""The MLX operation for attention against MLX's own, in fp32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from phalanx_cpu import ops

stock = mx.fast.scaled_dot_product_attention
HEADS = [(4, 4), (8, 2), (6, 1)]  # queries', keys'
LENGTHS = [(1, 1), (1, 70), (1, 600), (5, 40), (33, 33), (20, 90)]  # queries, keys


def values(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def tensors(heads: tuple[int, int], length: int, keys: int, dim: int = 64, v_dim: int = 64) -> list[mx.array]:
    """q, k, v of two rows as the views that models pass: of a projection, and of a cache with more rows and room."""
    cached = [values(3, heads[1], keys + 9, d)[1:, :, :keys] for d in (dim, v_dim)]
    return [values(2, length, heads[0], dim).swapaxes(1, 2), *cached]


def same(ours: mx.array, theirs: mx.array, tolerance: float = 3e-6) -> bool:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return bool(mx.allclose(ours.astype(mx.float32), theirs.astype(mx.float32), rtol=tolerance, atol=tolerance))


def masks(heads: int, length: int, keys: int) -> dict[str, Any]:
    full = (2, heads, length, keys)
    shown = mx.random.bernoulli(0.7, full, key=mx.random.key(1))
    return {
        "none": None,
        "causal": "causal",
        "shown": shown,
        "shown per row": shown[:, :1],
        "shown per head": shown[0],
        "shown per query": shown[0, 0],
        "shown per key": shown[0, 0, 0],
        "shown, transposed": mx.random.bernoulli(0.7, (keys, length), key=mx.random.key(2)).T,
        "one column": shown[..., :1],
        "added": values(*full),
        "added per key": values(keys),
        "added in bfloat16": values(length, keys).astype(mx.bfloat16),
        "added integers": mx.arange(keys) % 3,
        "hiding by addition": mx.where(shown, 0.0, mx.finfo(mx.float32).min),
        "hiding everything": mx.zeros((length, keys), mx.bool_),
    }


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mask", masks(1, 1, 1))
@pytest.mark.parametrize("with_sinks", [False, True])
def test_every_kind_of_mask(heads: tuple[int, int], lengths: tuple[int, int], mask: str, with_sinks: bool) -> None:
    given: dict[str, Any] = {"scale": 0.125, "mask": masks(heads[0], *lengths)[mask]}
    if with_sinks:
        given["sinks"] = values(heads[0])
    qkv = tensors(heads, *lengths)
    assert same(ops.attention(*qkv, **given), stock(*qkv, **given))


@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512), (36, 20)])
@pytest.mark.parametrize("lengths", [(1, 300), (20, 90)])
def test_head_sizes(dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    qkv = tensors((4, 1), *lengths, *dims)
    given: dict[str, Any] = {"scale": dims[0] ** -0.5, "mask": "causal"}
    assert same(ops.attention(*qkv, **given), stock(*qkv, **given))


@pytest.mark.parametrize("types", [(mx.float16,) * 3, (mx.bfloat16,) * 3, (mx.float32, mx.float16, mx.bfloat16)])
@pytest.mark.parametrize("lengths", [(1, 300), (20, 90)])
def test_types(types: tuple[mx.Dtype, ...], lengths: tuple[int, int]) -> None:
    qkv = [a.astype(dtype) for a, dtype in zip(tensors((4, 2), *lengths), types, strict=True)]
    wanted = stock(*qkv, scale=0.125, mask="causal")
    assert same(ops.attention(*qkv, scale=0.125, mask="causal"), wanted, 0.03)


@pytest.mark.parametrize("queries", [1, 4, 40])
@pytest.mark.parametrize("window", [0, 1, 30, 1000])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_lengths_and_window(queries: int, window: int, with_sinks: bool) -> None:
    q, k, v = tensors((8, 2), queries, 320)
    lengths = mx.array([queries + 3, 320])
    place = (lengths[:, None] - queries + mx.arange(queries))[:, None, :, None]
    shown = mx.arange(320) <= place
    if window:
        shown = shown & (mx.arange(320) > place - window)
    given: dict[str, Any] = {"scale": 0.125, "sinks": values(8) if with_sinks else None}
    assert same(ops.attention(q, k, v, lengths=lengths, window=window, **given), stock(q, k, v, mask=shown, **given))


def test_more_queries_than_keys() -> None:
    qkv = tensors((4, 2), 9, 5)
    assert same(ops.attention(*qkv, scale=1.0, mask="causal"), stock(*qkv, scale=1.0, mask="causal"))


def test_views_without_neighbours() -> None:
    q, k, v = (values(2, 4, 64, n).swapaxes(2, 3) for n in (5, 70, 70))  # the last axis is not the last in memory
    assert same(ops.attention(q, k, v, scale=0.125), stock(q, k, v, scale=0.125))
    k, v = (mx.broadcast_to(a[:, :1], a.shape) for a in (k, v))
    assert same(ops.attention(q, k, v, scale=0.125), stock(q, k, v, scale=0.125))


@pytest.mark.parametrize(
    "given",
    [
        {"mask": "full"},
        {"mask": mx.zeros((5, 5))},
        {"mask": mx.zeros((1, 1, 1, 1, 7))},
        {"sinks": mx.zeros(3)},
        {"lengths": mx.array([1, 2, 3])},
        {"window": -1},
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ops.attention(*tensors((4, 2), 2, 7), scale=1.0, **given)
