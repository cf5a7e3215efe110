"""Runs a model that is cut into stages, in one process: what one stage hands on is given to the next.

`StagedRunner` looks like a `Runner` to `ragged.Driver`. Beside it runs the uncut model, and every logit must have the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from support.mlx_lm_greedy import stock_greedy
from support.ragged import Driver, make_prompts

from phalanx.errors import ModelUnsupported
from phalanx.model import registry
from phalanx.model.loading.load import Loaded, load
from phalanx.model.loading.stage_cut import LayerCosts
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner
from phalanx.sched.plan import Forward, RowOp


def even(stages: int, number: int) -> Any:
    """A choice of layers: stage `number` of as many that have equally many layers, the last ones one more."""

    def choose(costs: LayerCosts) -> tuple[int, int]:
        count = len(costs.weights)
        ends = [count * i // stages for i in range(stages + 1)]
        return ends[number], ends[number + 1]

    return choose


def load_part(path: Path, choose: Any = None, dtype: Any = "float32", reducer: Any = None) -> Loaded:
    """One stage, or the whole model."""
    return load(
        path, dtype=dtype, guard=0, trust_remote_code=False, on_progress=lambda *_: None, choose_layers=choose,
        reducer=reducer,
    )  # fmt: skip


def runner_of(loaded: Loaded, *, may_pack: bool = False) -> Runner:
    """As the engine makes it, checked."""
    absorb_short_queries(loaded.model)
    facts = registry.inspect(loaded.model, loaded.config, loaded.stage)
    runner = Runner(loaded.model, facts, loaded.dtype, stage=loaded.stage)
    registry.check_model(runner, loaded.model, may_pack=may_pack)
    return runner


def staged_runner(path: Path, stages: int, *, dtype: Any = "float32", may_pack: bool = False) -> StagedRunner:
    """A model whose layers are shared out evenly.

    Raises:
        ModelUnsupported: it cannot be cut there.
    """
    whole = runner_of(load_part(path, dtype=dtype), may_pack=may_pack)
    parts = [load_part(path, even(stages, number), dtype) for number in range(stages)]
    return StagedRunner(whole, [runner_of(part, may_pack=may_pack) for part in parts])


@dataclass
class CutOutcome:
    """The result of driving a model that is cut."""

    refusal: str = ""
    """Why it cannot be cut; "" if it can."""
    forwards: int = 0
    different: int = 0  # forwards of which some logit has other bits than the whole model's
    left: int = 0  # bytes still held after the last row
    events: dict[str, int] = field(default_factory=dict)


def drive_cut(path: Path, stages: int, *, prompts: int, longest: int, tokens: int, seed: int = 0) -> CutOutcome:
    """Cut the model in a directory into stages, and drive them at random beside the whole model."""
    try:
        runner = staged_runner(path, stages)
    except ModelUnsupported as error:
        return CutOutcome(refusal=error.message.partition("cannot be cut into stages: ")[2].rstrip("."))
    wanted = make_prompts(prompts, longest, seed)
    driver = Driver(runner, wanted, stock_greedy(runner.model, wanted, tokens), seed)  # type: ignore[arg-type]
    driver.run()
    left = runner.kv_bytes + runner.prefix_bytes
    return CutOutcome("", runner.forwards, len(runner.different), left, driver.counts)


class StagedRunner:
    """The stages of a model, one after the other, beside the whole model."""

    def __init__(self, whole: Runner, stages: Sequence[Runner]) -> None:
        self.whole = whole
        self.stages = list(stages)
        self.facts = whole.facts
        self.model = whole.model
        self.forwards = 0
        self.different: list[Forward] = []
        """Forwards of which some logit has other bits than the whole model's."""
        assert all(len(one.facts.layouts) == len(self.facts.layouts) for one in stages)
        assert [one.stage.last for one in stages[:-1]] == [one.stage.first for one in stages[1:]]  # type: ignore[union-attr]

    @property
    def kv_bytes(self) -> int:
        return self.whole.kv_bytes + sum(stage.kv_bytes for stage in self.stages)

    @property
    def prefix_bytes(self) -> int:
        return self.whole.prefix_bytes + sum(stage.prefix_bytes for stage in self.stages)

    def apply(self, ops: Sequence[RowOp]) -> None:
        for runner in (self.whole, *self.stages):
            runner.apply(ops)
        assert sum(stage.kv_bytes for stage in self.stages) == self.whole.kv_bytes

    def forward(self, forward: Forward, kv_len: Sequence[int]) -> mx.array | None:
        expected = self.whole.forward(forward, kv_len)
        passed = None
        for stage, following in pairwise(self.stages):
            passed = stage.forward(forward, kv_len, passed)
            assert passed is not None
            assert following.stage is not None
        logits = self.stages[-1].forward(forward, kv_len, passed)
        self.forwards += 1
        assert (logits is None) == (expected is None)
        if logits is not None and expected is not None:
            mx.eval(logits, self.stages[-1].written_caches(), expected, self.whole.written_caches())
            if not mx.array_equal(logits, expected):
                self.different.append(forward)
        return logits

    def written_caches(self) -> list[mx.array]:
        return self.stages[-1].written_caches()
