"""Random lives of rows in regions, whose contents are those of a plain model; and that their memory goes back."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import phalanx_cpu
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regions import resident
from support.row_lives import HYBRID, KV, Lives

from phalanx.errors import EngineError
from phalanx.kernels import install
from phalanx.model.cache.buffers import ArenaBuffers
from phalanx.model.cache.layer_layout import Heads, KvLayout, Layout
from phalanx.model.cache.ragged_cache import RaggedKV
from phalanx.model.cache.row_view import RowView

pytestmark = pytest.mark.any_isa
MB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    """Native operations for what asks for them, and MLX's functions as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "operations", lambda: phalanx_cpu.ops)
        yield


@pytest.mark.parametrize("layouts", [KV, HYBRID])
@settings(max_examples=40)
@given(data=st.data())
def test_rows_hold_what_was_written_to_them(layouts: tuple[Layout, ...], data: st.DataObject) -> None:
    Lives(layouts).play(data)


def arena_of(rows: int, capacity: int) -> ArenaBuffers:
    heads = Heads(4, 64, mx.float32)  # 4 KiB per token and layer
    arena = ArenaBuffers([KvLayout(heads, heads, None)] * 2)
    arena.resize(rows, capacity)
    return arena


def fill(arena: ArenaBuffers, slot: int, tokens: int) -> None:
    arena.admit(slot)
    for start in range(0, tokens, 500):
        length = min(500, tokens - start)
        view = RowView(slot, [start], length)
        arena.open(view, [start + length])
        for leaf in arena.leaves:
            assert isinstance(leaf, RaggedKV)
            leaf.update_and_fetch(*[mx.ones((1, 4, length, 64))] * 2)
        arena.close()
        mx.eval(arena.touched())


def test_long_rows_come_and_go_and_memory_returns_to_where_it_was() -> None:
    """Rows of 60,000 tokens, 245 MB each, in a budget of two; their memory goes back in slices of at most 64 MB."""
    arena = arena_of(16, 131072)
    fill(arena, 0, 100)
    before = resident()
    for turn in range(8):
        fill(arena, 1, 60_000)
        assert 0.99 < (resident() - before) / (60_000 * 4096) < 1.05
        assert abs(arena.nbytes - 60_100 * 4096) < MB
        arena.free(1)
        arena.swap(1, 2 + turn)
        slices = 0
        while arena.nbytes > MB:
            was = resident()
            arena.give_back(64 * MB)
            slices += 1
            assert was - resident() < 130 * MB
        assert slices >= 2 and resident() - before < 4 * MB
    assert np.array(arena.leaves[1].arrays()[0][0, :, :100]).min() == 1


@pytest.mark.full
def test_two_hundred_long_rows_come_and_go_and_memory_returns_to_where_it_was() -> None:
    """Rows of 60,000 tokens, 61 MB each, beside one that stays."""
    heads = Heads(1, 64, mx.float32)
    arena = ArenaBuffers([KvLayout(heads, heads, None)] * 2)
    arena.resize(4, 65536)
    keys = mx.ones((1, 1, 6000, 64))
    mx.eval(keys)

    def live(slot: int, chunks: int) -> None:
        arena.admit(slot)
        for start in range(0, chunks * 6000, 6000):
            arena.open(view := RowView(slot, [start], 6000), [start + 6000])
            for leaf in arena.leaves:
                assert isinstance(leaf, RaggedKV)
                leaf.update_and_fetch(keys, keys)
            arena.close()
            mx.eval(arena.touched())
            assert view.need == start + 6000

    live(0, 1)
    before = resident()
    for turn in range(200):
        live(1 + turn % 3, 10)
        assert (resident() - before) / (60_000 * 1024) > 0.99
        arena.free(1 + turn % 3)
        while arena.nbytes > 7 * MB:
            arena.give_back(16 * MB)
    assert resident() - before < 2 * MB


def test_short_rows_take_memory_for_their_own_tokens_beside_a_long_one() -> None:
    before = resident()
    arena = arena_of(16, 131072)
    for slot, tokens in enumerate([10_000, 1000, 1000]):
        fill(arena, slot, tokens)
    assert (resident() - before) / (12_000 * 4096) < 1.05


def test_a_row_is_kept_layer_by_layer_although_another_takes_its_slot() -> None:
    arena = arena_of(3, 4096)
    fill(arena, 0, 2000)
    snapshot = arena.save(0, 1500)
    arena.free(0)
    arena.give_back()
    assert snapshot.copied == [] and arena.nbytes == 2000 * 4096
    arena.admit(0)
    assert not mx.any(arena.leaves[0].arrays()[0][0]).item()
    arena.copy_saved(1)
    assert len(snapshot.copied) == 1 and snapshot.nbytes == 1500 * 2048
    assert [[np.array(array).min() for array in part] for part in snapshot.parts] == [[1, 1], [1, 1]]
    assert snapshot.parts[1][1].shape == (1, 4, 1500, 64)
    arena.give_back()
    assert arena.nbytes == 0


def test_a_kept_row_that_nobody_wants_any_more_is_not_copied() -> None:
    arena = arena_of(3, 4096)
    fill(arena, 0, 2000)
    arena.save(0, 1500)
    arena.free(0)
    arena.give_back()
    assert arena.nbytes == 0


def test_a_copy_that_a_model_or_mlx_makes_of_a_region_is_noticed() -> None:
    arena = arena_of(2, 512)
    fill(arena, 0, 10)
    leaf = arena.leaves[1]
    assert isinstance(leaf, RaggedKV) and leaf.values is not None
    leaf.values[0:1, :, :3] = mx.zeros((1, 4, 3, 64))
    with pytest.raises(RuntimeError, match="no reserved region: something has copied it"):
        fill(arena, 1, 3)


def test_what_a_slot_cannot_hold_is_an_error_as_before() -> None:
    arena = arena_of(2, 512)
    with pytest.raises(EngineError, match="needs 513 tokens per row; the buffers hold 512"):
        arena.open(RowView(0, [0], 513), [513])
