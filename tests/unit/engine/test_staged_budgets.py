"""Budgets of ranks with different layers count the same rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.config import EngineConfig
from phalanx.engine import memory_plan
from phalanx.engine.memory_plan import _scaled_to_whole, plan_memory
from phalanx.engine.stages import _rooms, _Spot
from phalanx.errors import MemoryShortage
from phalanx.memory import MemoryBudget


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
    spots = [_Spot(host=host, device=device, free=free) for host, device, free in places]
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
