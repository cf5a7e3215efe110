"""Rows of different lengths: what is written behind each, and attention that knows the lengths."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import phalanx_cpu
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regions import region_of
from support.active_memory import active_memory

from phalanx.kernels.ragged_mask import RaggedMask
from phalanx.model.cache.row_view import RowView

ops = phalanx_cpu.ops
TYPES = [mx.float32, mx.float16, mx.bfloat16]


def values(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 4),
    heads=st.integers(1, 3),
    length=st.integers(1, 4),
    dim=st.integers(1, 5),
    dtype=st.sampled_from(TYPES),
    repacked=st.booleans(),
)
def test_rows_are_written_behind_their_own_ends(data, rows, heads, length, dim, dtype, repacked):
    first, capacity = data.draw(st.integers(0, 2)), 9
    starts = data.draw(st.lists(st.integers(0, capacity - length), min_size=rows, max_size=rows))
    buffer = region_of(values(first + rows + 1, heads, capacity, dim).astype(dtype))
    news = values(rows, length, heads, dim).swapaxes(1, 2) if repacked else values(rows, heads, length, dim)
    wanted = np.array(buffer.astype(mx.float32))
    for row, start in enumerate(starts):
        wanted[first + row, :, start : start + length] = np.array(news[row].astype(dtype).astype(mx.float32))
    found = ops.write_rows(buffer, news, mx.array(starts, dtype=mx.int32), first)
    assert found.dtype == dtype
    assert np.array_equal(np.array(found.astype(mx.float32)), wanted)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), rows=st.integers(1, 3), length=st.integers(1, 4), dtype=st.sampled_from(TYPES))
def test_rows_of_one_length_are_written_at_one_place(data, rows, length, dtype):
    first, start = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 9 - length))
    buffer, news = region_of(values(first + rows + 1, 2, 9, 3).astype(dtype)), values(rows, 2, length, 3)
    wanted = np.array(buffer.astype(mx.float32))
    wanted[first : first + rows, :, start : start + length] = np.array(news.astype(dtype).astype(mx.float32))
    found = ops.write_rows(buffer, news, start, first)
    assert np.array_equal(np.array(found.astype(mx.float32)), wanted)


def test_a_region_is_written_in_place_whoever_else_reads_it():
    buffer = ops.reserve([2, 1, 1 << 16, 8], mx.float32)
    news, starts = mx.ones((2, 1, 3, 8)), mx.array([0, 5], dtype=mx.int32)
    view = buffer[:, :, 2:7]
    mx.eval(view, news, starts)
    before = active_memory()
    mx.reset_peak_memory()
    for at in (starts, 3):
        mx.eval(ops.write_rows(buffer, news, at, 0))
    assert mx.get_active_memory() == before and mx.get_peak_memory() - before < 1 << 16
    assert np.array(view)[0, 0, :, 0].tolist() == [1, 1, 1, 1, 0]
    assert np.array(view)[1, 0, :, 0].tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("planted", [lambda region: region + 0, lambda region: region[1:], mx.zeros_like])
def test_a_copy_of_a_region_is_noticed(planted):
    region = ops.reserve([3, 2, 8, 4], mx.float32)
    written = ops.write_rows(planted(region), mx.ones((2, 2, 3, 4)), 0, 0)
    with pytest.raises(RuntimeError, match="no reserved region: something has copied it"):
        mx.eval(written)
    region[1:2] = mx.ones((1, 2, 8, 4))  # MLX's own write
    with pytest.raises(RuntimeError, match="no reserved region: something has copied it"):
        mx.eval(ops.write_rows(region, mx.ones((2, 2, 3, 4)), 0, 0))


@pytest.mark.parametrize(
    "news, starts, first, why",
    [
        ((2, 1, 3, 4), [0, 0], 0, "heads and sizes"),
        ((2, 2, 3, 5), [0, 0], 0, "heads and sizes"),
        ((2, 2, 9, 4), [0, 0], 0, "room"),
        ((2, 2, 3, 4), [0, 0], 2, "these rows"),
        ((2, 2, 3, 4), [0, 0, 0], 0, "one int32 per row"),
        ((2, 2, 4), [0, 0], 0, "4 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(news, starts, first, why):
    with pytest.raises(ValueError, match=why):
        ops.write_rows(ops.reserve([3, 2, 8, 4], mx.float32), mx.zeros(news), mx.array(starts, dtype=mx.int32), first)


@pytest.mark.parametrize("start", [-1, 6, 1 << 20])
def test_nothing_is_written_behind_a_row(start):
    region, news = ops.reserve([2, 2, 8, 4], mx.float32), mx.ones((2, 2, 3, 4))
    with pytest.raises(ValueError, match="more than a row has room for"):
        ops.write_rows(region, news, start, 0)
    written = ops.write_rows(region, news, mx.array([0, start], dtype=mx.int32), 0)
    with pytest.raises(RuntimeError, match="longer than its place"):
        mx.eval(written)


@pytest.mark.parametrize("dtype, tolerance", [(mx.float32, 2e-6), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_attention_by_lengths_is_attention_under_the_mask(heads, length, window, dtype, tolerance):
    kv_len = [5, 40, 0, 17]
    view = RowView(0, kv_len, length)
    mask = view.mask(window, False, 0)
    assert isinstance(mask, RaggedMask) and mask.shape == (4, 1, length, view.need)
    queries = values(4, heads[0], length, 32).astype(dtype)
    keys, others = (values(4, heads[1], view.need, n)[..., :32].astype(dtype) for n in (32, 33))
    found = ops.attention(queries, keys, others, scale=0.2, lengths=mask.lengths, window=mask.window)
    wanted = ops.attention(queries, keys, others, scale=0.2, mask=mx.array(mask))
    assert mx.allclose(found, wanted, rtol=tolerance, atol=tolerance)
    for row, known in enumerate(kv_len):  # alone: the same bits
        alone = ops.attention(
            queries[row : row + 1], *(a[row : row + 1, :, : known + length] for a in (keys, others)), scale=0.2,
            lengths=mask.lengths[row : row + 1], window=mask.window,
        )  # fmt: skip
        assert mx.array_equal(alone[0], found[row])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(TYPES), fed=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_packed_rows_are_written_and_attend_as_rows_with_padding_do(data, dtype, fed):
    first, capacity, widest = data.draw(st.integers(0, 2)), 24, max(fed)
    kv_len = [data.draw(st.integers(0, capacity - widest)) for _ in fed]
    before = values(first + len(fed) + 1, 2, capacity, 16).astype(dtype)
    buffer = region_of(before)
    news = values(sum(fed), 2, 1, 16).astype(dtype)
    queries = values(sum(fed), 4, 1, 16).astype(dtype)
    view = RowView(first, kv_len, 1, packed=fed)
    assert view.length == 1 and view.need == max(n + k for n, k in zip(kv_len, fed, strict=True))
    written = ops.write_rows(buffer, news, view.lengths[0], view.start, slots=view.slots)
    kept, mask = view.read(written, None), view.mask(None, False, 0)
    assert isinstance(mask, RaggedMask)
    found = ops.attention(queries, kept, kept, scale=0.3, lengths=mask.lengths, slots=mask.slots)
    at = 0
    for row, (known, count) in enumerate(zip(kv_len, fed, strict=True)):
        wanted = mx.array(before[first + row])
        wanted[:, known : known + count] = news[at : at + count, :, 0].swapaxes(0, 1)
        assert mx.array_equal(written[first + row], wanted)
        keys = wanted[None, :, : known + count]
        alone = ops.attention(
            queries[at : at + count, :, 0].swapaxes(0, 1)[None], keys, keys, scale=0.3, mask="causal"
        )[0].swapaxes(0, 1)
        tolerance = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
        assert mx.allclose(found[at : at + count, :, 0], alone, rtol=tolerance, atol=tolerance)
        at += count
    for slot in {*range(before.shape[0])} - {*range(first, first + len(fed))}:
        assert mx.array_equal(written[slot], before[slot])


def test_slots_that_do_not_fit_are_refused():
    slots, starts = mx.array([0, 0], dtype=mx.int32), mx.array([1, 2], dtype=mx.int32)
    news, buffer = mx.ones((2, 2, 1, 4)), ops.reserve([3, 2, 8, 4], mx.float32)
    for wrong in (slots[:1], slots.astype(mx.int64)):
        with pytest.raises(ValueError, match="slots must have one int32 per row"):
            ops.write_rows(buffer, news, starts, 0, slots=wrong)
        with pytest.raises(ValueError, match="slots must have one int32 per row"):
            ops.attention(news, buffer, buffer, scale=1.0, lengths=starts, slots=wrong)
    with pytest.raises(ValueError, match="have lengths, one query each and no mask"):
        ops.attention(news, buffer, buffer, scale=1.0, slots=slots)
    for slot in (-1, 3):
        there = mx.array([0, slot], dtype=mx.int32)
        with pytest.raises(RuntimeError, match="does not have that row"):
            mx.eval(ops.write_rows(buffer, news, starts, 0, slots=there))
        with pytest.raises(RuntimeError, match="no such slot"):
            mx.eval(ops.attention(news, buffer, buffer, scale=1.0, lengths=starts, slots=there))
