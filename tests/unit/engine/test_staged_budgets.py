"""Budgets of ranks with different layers count the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from phalanx.config import EngineConfig
from phalanx.engine import memory_plan
from phalanx.engine.memory_plan import _scaled_to_whole, plan_memory
from phalanx.engine.stages import _FreeMemory, _rooms
from phalanx.errors import MemoryShortage
from phalanx.memory import MemoryBudget
from phalanx.model.cache.layer_layout import Heads, KvLayout, StateLayout, page_tokens


def facts(per_token: int, per_row: int) -> Any:
    return cast(Any, SimpleNamespace(bytes_per_token=per_token, bytes_per_row=per_row))


@pytest.mark.parametrize(
    ("own", "whole", "kv"),
    [
        (facts(100, 0), facts(100, 0), 1000),  # one stage: as it is
        (facts(100, 40), facts(100, 40), 1000),
        (facts(25, 0), facts(100, 0), 4000),  # a quarter of the layers: four times the rows
        (facts(0, 10), facts(100, 40), 4000),  # only recurrent layers
        (facts(50, 10), facts(100, 40), 2000),  # what there is least of counts
        (facts(0, 0), facts(100, 40), 1000),  # no caches at all
    ],
)
def test_budgets_count_rows_of_the_whole_model(own: Any, whole: Any, kv: int) -> None:
    assert _scaled_to_whole(MemoryBudget(kv=1000, prefix=500, logits=7), own, whole) == MemoryBudget(
        kv=kv, prefix=kv // 2, logits=7
    )


def test_ranks_of_one_device_share_what_it_has_free() -> None:
    places = [("left", "cpu", 90), ("right", "cpu", 70), ("left", "cpu", 60), ("left", "gpu", 50)]
    spots = [_FreeMemory(host=host, device=device, free=free) for host, device, free in places]
    assert [room.bytes for room in _rooms(spots)] == [30, 70, 30, 50]


class TwoStages:
    """The link of rank 0, which has the larger budget."""

    rank, size, host = 0, 2, "left"

    def share(self, value: Any) -> list[Any]:
        if isinstance(value, MemoryBudget):
            return [value, MemoryBudget(kv=value.kv // 2, prefix=value.prefix, logits=value.logits)]
        return [value, "right" if value == "left" else value]


def test_a_context_that_does_not_fit_names_the_rank_with_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "_own_budget", lambda *_: MemoryBudget(kv=100 * 512, prefix=0, logits=1))
    own = cast(Any, SimpleNamespace(bytes_per_token=50, bytes_per_row=0, max_len=None))
    config = EngineConfig(model="m", max_model_len=1024)
    with pytest.raises(MemoryShortage, match=r"--max-model-len 1024 .*rank 1 on right has the least.*\(512 tokens\)"):
        plan_memory(config, own, facts(100, 0), None, 0, cast(Any, TwoStages()), 1)


KEYS = KvLayout(Heads(4, 64, mx.bfloat16), Heads(4, 64, mx.bfloat16), None)


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [(True, 64, 64), (True, 16, 32), (True, 0, 0), (False, 32, 0)],
)
def test_rows_take_memory_by_the_page_where_all_ranks_can_reserve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, here: bool, there: int, expected: int
) -> None:
    """In steps of the rank with the largest; a rank whose host gives no address space says so."""
    asked: list[tuple[tuple[int, ...], mx.Dtype]] = []

    def can_reserve(buffers: Iterable[tuple[tuple[int, ...], mx.Dtype]]) -> bool:
        asked.extend(buffers)
        return here

    monkeypatch.setattr(memory_plan, "can_reserve", can_reserve)
    monkeypatch.setattr(memory_plan, "in_pages", lambda: True)
    link = cast(Any, SimpleNamespace(share=lambda value: [value, there]))
    own = cast(Any, SimpleNamespace(layouts=(KEYS, KEYS)))
    found = memory_plan._page_tokens(EngineConfig(model="m", max_num_seqs=8), own, 1000, link)
    assert found == expected and asked == [((8, 4, 1024, 64), mx.bfloat16)] * 4
    said = "gives no address space for 8 rows of 1000 tokens (ulimit -v"
    assert (said in caplog.text) is (not here)


@pytest.mark.parametrize(
    ("dim", "dtype", "tokens"),
    [(64, mx.float32, 16), (128, mx.bfloat16, 16), (576, mx.float32, 2), (4096, mx.float32, 1), (1, mx.float16, 256)],
)
def test_memory_grows_by_the_tokens_of_a_page(dim: int, dtype: mx.Dtype, tokens: int) -> None:
    wide = Heads(1, 1024, mx.float32)
    assert page_tokens([KvLayout(wide, Heads(2, dim, dtype), None)]) == tokens
    assert page_tokens([KvLayout(None, None, None), StateLayout((((3,), mx.float32),))]) == 1
