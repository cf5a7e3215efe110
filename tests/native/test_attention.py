"""Kernels of kern/attention.h against float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kern import BF16, EPS, F16, F32, Array, Float, Int, Int64, Pointer, call, decode, encode, pointer, smallest

KINDS = [F32, F16, BF16]
NO_MASK, SHOWN, ADDED = range(3)


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("q", "k", "v", "out", "mask", "sinks", "lengths", "slots")),
        *((name, Int64) for name in ("rows", "q_heads", "kv_heads", "queries", "keys", "dim", "v_dim")),
        *((name, Int64 * 3) for name in ("q_strides", "k_strides", "v_strides", "out_strides")),
        ("mask_strides", Int64 * 4),
        ("window", Int64),
        ("scale", Float),
        *((name, Int) for name in ("type", "mask_kind", "mask_type", "sinks_type", "causal")),
    ]


def strides(array: Array, count: int) -> Any:
    return (Int64 * count)(*(s // array.itemsize for s in array.strides[:count]))


def attention(
    q, k, v, kind, *, mask=None, mask_type=F32, sinks=None, sinks_type=F32, lengths=None, window=0, causal=False,
    slots=None, refused=False,
):  # fmt: skip
    """q [B, Hq, L, D], k and v [B, Hk, S, D], mask [B, Hq, L, S] (bool or numbers), as views of any strides."""
    rows, heads, queries, dim = q.shape
    out = np.zeros((rows, queries, heads, v.shape[3]), q.dtype).swapaxes(1, 2)
    args = Attention(
        **{name: pointer(a) for name, a in {"q": q, "k": k, "v": v, "out": out, "mask": mask, "sinks": sinks}.items()},
        lengths=pointer(lengths),
        slots=pointer(slots),
        rows=rows,
        q_heads=heads,
        kv_heads=k.shape[1],
        queries=queries,
        keys=k.shape[2],
        dim=dim,
        v_dim=v.shape[3],
        q_strides=strides(q, 3),
        k_strides=strides(k, 3),
        v_strides=strides(v, 3),
        out_strides=strides(out, 3),
        window=window,
        scale=dim**-0.5,
        type=kind,
        mask_type=mask_type,
        sinks_type=sinks_type,
        causal=causal,
    )
    if mask is not None:
        args.mask_kind = SHOWN if mask.dtype == np.bool_ else ADDED
        args.mask_strides = strides(mask, 4)
    assert (call("kern_attention", args) != 0) == refused
    return out


@dataclass
class Exact:
    """In float64: [B, Hq, L, Dv], and how far fp32 may be from it."""

    out: Array
    bound: Array


def reference(q, k, v, *, mask=None, sinks=None, lengths=None, window=0, causal=False) -> Exact:
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    queries, keys, dim = q.shape[2], k.shape[2], q.shape[3]
    scale = float(np.float32(dim**-0.5))
    scores = np.einsum("bhld,bhsd->bhls", q, k) * scale
    size = np.einsum("bhld,bhsd->bhls", np.abs(q), np.abs(k)) * scale
    count = np.full(q.shape[0], keys) if lengths is None else np.minimum(lengths, keys)
    place = count[:, None] - queries + np.arange(queries)
    there = np.broadcast_to((np.arange(keys) < count[:, None])[:, None], (len(q), queries, keys))
    if causal or window or lengths is not None:
        there = there & (np.arange(keys) <= place[:, :, None])
    if window:
        there = there & (np.arange(keys) > place[:, :, None] - window)
    there = np.broadcast_to(there[:, None], scores.shape)
    hidden = ~there
    if mask is not None and mask.dtype == np.bool_:
        nothing = ~(mask & there).any(-1, keepdims=True)
        scores = np.where(nothing & (sinks is None), 0.0, scores)  # all keys alike
        hidden = hidden | ~(mask | (nothing & (sinks is None)))
    elif mask is not None:
        scores, size = scores + mask, size + np.abs(mask)
    scores = np.where(hidden, -np.inf, scores)
    peak = scores.max(-1, keepdims=True, initial=-np.inf)
    logits = None if sinks is None else sinks[None, :, None, None]
    peak = np.maximum(peak, logits) if logits is not None else peak
    peak = np.where(np.isneginf(peak), 0.0, peak)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True) + (0.0 if logits is None else np.exp(logits - peak))
    weights = weights / np.where(total == 0.0, 1.0, total)
    # A score is a sum of dim products and a mask; relative to the largest score it loses as much again. A weight takes
    # that error, the exponential's and those of up to 2 * keys / 64 rescalings; sums of weights and of values theirs.
    lost = (dim + 8) * EPS[F32] * np.where(hidden, 0.0, size).max(-1, keepdims=True, initial=0.0)
    lost = 4 * lost + (8 + keys // 16 + 2 * keys) * EPS[F32]
    return Exact(weights @ v, lost * (weights @ np.abs(v)))


def near(out, exact: Exact, kind) -> bool:
    bound = exact.bound + (np.abs(exact.out) + exact.bound) * EPS[kind] + smallest(kind)
    return bool((np.abs(decode(out, kind) - exact.out) <= bound).all())


shapes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "kv_heads": st.integers(1, 2),
        "share": st.sampled_from([1, 2, 3, 5, 8, 40]),
        "queries": st.sampled_from([1, 1, 2, 5, 17, 40]),
        "keys": st.sampled_from([1, 7, 63, 64, 65, 200, 300, 600]),
        "dims": st.sampled_from([(64, 64), (128, 128), (24, 40), (16, 7), (5, 16), (80, 80), (192, 128), (288, 256)]),
    }
)


def tensors(random, shape, kind, scale=1.0):
    """q, k and v as the views that models pass: of a projection, and of a cache with room behind the keys."""
    dim, v_dim = shape["dims"]
    heads, rows = shape["kv_heads"] * shape["share"], shape["rows"]
    q = random.normal(size=(rows, shape["queries"], heads, dim)) * scale
    k, v = (random.normal(size=(rows + 1, shape["kv_heads"], shape["keys"] + 5, d)) for d in (dim, v_dim))
    k, v = encode(k * scale, kind), encode(v, kind)
    room = slice(1, None), slice(None), slice(0, shape["keys"])
    return encode(q, kind).swapaxes(1, 2), k[room], v[room]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    shape=shapes,
    mask_form=st.sampled_from(["none", "causal", "shown", "shown to all heads", "by key", "added", "added by head"]),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    with_sinks=st.booleans(),
    with_lengths=st.booleans(),
    window=st.sampled_from([0, 0, 1, 9, 100]),
    scale=st.sampled_from([1.0, 1.0, 6.0]),
    seed=st.integers(0, 1000),
)
def test_attention(kind, shape, mask_form, kinds, with_sinks, with_lengths, window, scale, seed):
    random = np.random.default_rng(seed)
    q, k, v = tensors(random, shape, kind, scale)
    full = (len(q), q.shape[1], q.shape[2], k.shape[2])
    given: dict[str, Any] = {"causal": mask_form == "causal", "window": window}
    exact = dict(given)
    mask_type, sinks_type = kinds
    if mask_form.startswith("shown"):
        part = full if mask_form == "shown" else (full[0], 1, full[2], full[3])
        given["mask"] = exact["mask"] = np.broadcast_to(random.random(part) < random.choice([0.02, 0.5, 0.98]), full)
    elif mask_form == "by key":
        given["mask"] = exact["mask"] = np.broadcast_to(random.random((full[3], 2)) < 0.5, (*full, 2))[..., 0]
    elif mask_form.startswith("added"):
        added = random.normal(size=full if mask_form == "added" else (full[1], 1, 1)) * 3
        coded = encode(np.where(random.random(added.shape) < 0.2, -np.inf, added), mask_type)
        coded[..., 0] = 0  # no row without a key
        given["mask"] = np.broadcast_to(coded, full)
        exact["mask"] = np.broadcast_to(decode(coded, mask_type), full)
    if with_sinks:
        given["sinks"] = encode(random.normal(size=full[1]) * 3, sinks_type)
        exact["sinks"] = decode(given["sinks"], sinks_type)
    if with_lengths:
        given["lengths"] = exact["lengths"] = random.integers(0, full[3] + 1, full[0]).astype(np.int32)
    if mask_form.startswith("added") and (window or with_lengths or full[2] > full[3]):
        given["mask"], exact["mask"] = None, None  # rows whose visible keys are all hidden have no value
    out = attention(q, k, v, kind, mask_type=mask_type, sinks_type=sinks_type, **given)
    assert near(out, reference(*(decode(a, kind) for a in (q, k, v)), **exact), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(576, 512), (192, 128), (256, 256)])
@pytest.mark.parametrize("queries", [1, 3])
def test_latent_and_large_heads(kind, dims, queries):
    random = np.random.default_rng(1)
    shape = {"rows": 2, "kv_heads": 1, "share": 16, "queries": queries, "keys": 330, "dims": dims}
    q, k, v = tensors(random, shape, kind)
    out = attention(q, k, v, kind, lengths=np.array([330, 90], np.int32))
    exact = reference(*(decode(a, kind) for a in (q, k, v)), lengths=np.array([330, 90]))
    assert near(out, exact, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("share", "queries"), [(1, 1), (4, 1), (4, 6), (48, 1)])
def test_a_row_is_the_same_bits_in_any_batch(kind, share, queries):
    random = np.random.default_rng(2)
    shape = {"rows": 3, "kv_heads": 2, "share": share, "queries": queries, "keys": 700, "dims": (64, 64)}
    q, k, v = tensors(random, shape, kind)
    lengths = np.array([700, 431, queries], np.int32)
    together = attention(q, k, v, kind, lengths=lengths)
    place = lengths[:, None] - queries + np.arange(queries)
    shown = (np.arange(700) <= place[:, :, None])[:, None]
    masked = attention(q, k, v, kind, mask=np.broadcast_to(shown, (3, 2 * share, queries, 700)))
    assert (masked == together).all()
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = attention(q[one], k[one, :, :length], v[one, :, :length], kind, causal=True)
        assert (alone == together[one]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 40])
def test_what_lies_beyond_a_row_is_not_counted(kind, queries):
    random = np.random.default_rng(3)
    shape = {"rows": 2, "kv_heads": 1, "share": 2, "queries": queries, "keys": 320, "dims": (64, 64)}
    q, k, v = tensors(random, shape, kind)
    lengths = np.array([100, 300], np.int32)
    clean = attention(q, k, v, kind, lengths=lengths)
    for row, length in enumerate(lengths):
        k[row, :, length:] = v[row, :, length:] = encode(np.array(np.nan), kind)
    assert (attention(q, k, v, kind, lengths=lengths) == clean).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 40])
def test_numbers_that_are_none(kind, queries):
    random = np.random.default_rng(4)
    shape = {"rows": 2, "kv_heads": 2, "share": 2, "queries": queries, "keys": 300, "dims": (64, 64)}
    for spoil in (np.nan, np.inf):
        q, k, v = tensors(random, shape, kind)
        k[1, 0, 20, 3] = v[1, 1, 20, 3] = encode(np.array(spoil), kind)
        out = decode(attention(q, k, v, kind), kind)
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1, :2]).any(-1).all() or spoil == np.inf
        assert not np.isfinite(out[1, 2:, :, 3]).any()
        assert np.isfinite(np.delete(out[1, 2:], 3, -1)).all()
    q, k, v = tensors(random, shape, kind)
    nothing = np.broadcast_to(np.float32(-np.inf), (2, 4, queries, 300))
    assert np.isnan(decode(attention(q, k, v, kind, mask=nothing), kind)).all()  # as MLX: no key weighs anything


@pytest.mark.parametrize("keys", [1, 50, 700])
@pytest.mark.parametrize("queries", [1, 33])
def test_large_scores_do_not_overflow(keys, queries):
    random = np.random.default_rng(5)
    shape = {"rows": 1, "kv_heads": 1, "share": 1, "queries": queries, "keys": keys, "dims": (64, 64)}
    q, k, v = tensors(random, shape, F32, scale=1e4)
    out = attention(q, k, v, F32)
    best = np.einsum("bhld,bhsd->bhls", q.astype(float), k.astype(float)).argmax(-1)
    assert np.allclose(out[0, 0], v[0, 0][best[0, 0]], rtol=1e-6)


def test_a_query_that_the_mask_hides_everything_from_gets_the_mean():
    random = np.random.default_rng(6)
    shape = {"rows": 1, "kv_heads": 1, "share": 1, "queries": 3, "keys": 300, "dims": (64, 64)}
    q, k, v = tensors(random, shape, F32)
    shown = np.broadcast_to(np.array([[True], [False], [True]]), (1, 1, 3, 300))
    out = attention(q, k, v, F32, mask=shown)
    assert np.allclose(out[0, 0, 1], v[0, 0].mean(0), atol=1e-6)
    assert not attention(q, k, v, F32, lengths=np.zeros(1, np.int32)).any()


def test_heads_that_do_not_divide_are_refused():
    assert call("kern_attention", Attention(q_heads=3, kv_heads=2)) != 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(
    shape=shapes.map(lambda shape: {**shape, "queries": 1}),
    runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=4),
    with_sinks=st.booleans(),
    window=st.sampled_from([0, 1, 9, 100]),
    seed=st.integers(0, 1000),
)
def test_rows_that_share_slots(kind, shape, runs, with_sinks, window, seed):
    """Each token's attention is that of a row of its own with the slot's keys."""
    random = np.random.default_rng(seed)
    slots = np.array([slot % shape["rows"] for slot, count in runs for _ in range(count)], np.int32)
    _, k, v = tensors(random, shape, kind)
    first = [random.integers(0, shape["keys"] + 1) for _ in runs]
    lengths = np.array(
        [min(at + i, shape["keys"]) for at, (_, count) in zip(first, runs, strict=True) for i in range(count)], np.int32
    )
    for i in range(1, len(slots)):  # rows of one slot follow each other
        if slots[i] == slots[i - 1]:
            lengths[i] = lengths[i - 1] + 1
    lengths = lengths - max(0, int(lengths.max()) - shape["keys"])
    dim, heads = shape["dims"][0], shape["kv_heads"] * shape["share"]
    q = encode(random.normal(size=(len(slots), heads, 1, dim)), kind)
    sinks = random.normal(size=heads).astype(np.float32) if with_sinks else None
    out = attention(q, k, v, kind, sinks=sinks, lengths=lengths, window=window, slots=slots)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        exact = reference(
            decode(q[row : row + 1], kind), decode(k[slot : slot + 1], kind), decode(v[slot : slot + 1], kind),
            sinks=None if sinks is None else sinks.astype(float), lengths=np.array([max(0, length)]), window=window,
        )  # fmt: skip
        assert near(out[row : row + 1], exact, kind)


def test_rows_that_share_slots_have_one_query_lengths_and_no_mask():
    slots, lengths = np.zeros(2, np.int32), np.array([3, 4], np.int32)
    q, k = np.ones((2, 2, 1, 16), np.float32), np.ones((1, 2, 9, 16), np.float32)
    attention(q, k, k, F32, lengths=lengths, slots=slots)
    attention(q, k, k, F32, slots=slots, refused=True)
    attention(np.repeat(q, 2, 2), k, k, F32, lengths=lengths, slots=slots, refused=True)
    mask = np.ones((2, 2, 1, 9), np.bool_)
    attention(q, k, k, F32, lengths=lengths, slots=slots, mask=mask, refused=True)
