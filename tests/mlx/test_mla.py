"""Latent attention for short queries gives what mlx-lm's own path for several tokens gives."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import deepseek_v3
from mlx_lm.utils import load_model
from support.models import make_model

from phalanx.model import registry
from phalanx.model.mla import MAX_SHORT_QUERY, absorb_short_queries
from phalanx.model.runner import Runner
from phalanx.sched.plan import Admit, Forward, Resize

FAMILIES = ["deepseek_v3", "kimi_k25", "glm4_moe_lite", "longcat_flash"]
HISTORY = (19, 33, 7)


def logits(path, width: int, *, absorbed: bool, same_length: bool) -> mx.array:
    """Rows of different (or one) length, prefilled, then fed `width` tokens each."""
    model, config = load_model(path)
    if absorbed:
        assert (
            absorb_short_queries(model) == len([m for m in model.modules() if "MultiLinear" in str(type(m))]) // 2 > 0
        )
    runner = Runner(model, registry.inspect(model, config), mx.float32)
    history = (21,) * 3 if same_length else HISTORY
    runner.apply([Resize(0, 3, 64), *(Admit(0, slot, slot) for slot in range(3))])
    for slot, length in enumerate(history):
        tokens = tuple((7 * slot + 3 * i) % 500 for i in range(length))
        runner.forward(Forward(0, slot, (slot,), (tokens,), (length,), sample=False), [0])
    fed = tuple(tuple((11 * slot + 5 * i) % 500 for i in range(width)) for slot in range(3))
    out = runner.forward(Forward(0, 0, (0, 1, 2), fed, (width,) * 3, sample=True), list(history))
    mx.eval(out, runner.written_caches())
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 2, 5, MAX_SHORT_QUERY])
@pytest.mark.parametrize("same_length", [True, False])
def test_short_queries_are_computed_the_same(family, width, same_length, tmp_path):
    path = make_model(family, tmp_path / family)
    ours = logits(path, width, absorbed=True, same_length=same_length)
    theirs = logits(path, width, absorbed=False, same_length=same_length)
    assert mx.std(theirs).item() > 0.1
    assert mx.max(mx.abs(ours - theirs)).item() < 1e-4 * mx.max(mx.abs(theirs)).item()


def test_a_long_chunk_takes_mlx_lms_own_path(monkeypatch, tmp_path):
    """And a short one does not: what the blocks are called with says so."""
    path = make_model("deepseek_v3", tmp_path / "model")
    seen = []
    stock = deepseek_v3.DeepseekV3Attention.__call__

    def spy(self: nn.Module, x: mx.array, *args: object) -> mx.array:
        seen.append(x.shape[:2])
        return stock(self, x, *args)

    monkeypatch.setattr(deepseek_v3.DeepseekV3Attention, "__call__", spy)
    logits(path, MAX_SHORT_QUERY, absorbed=True, same_length=True)
    assert (3 * MAX_SHORT_QUERY, 1) in seen
    assert (1, 21) in seen
    seen.clear()
    logits(path, MAX_SHORT_QUERY + 1, absorbed=True, same_length=True)
    assert (3, MAX_SHORT_QUERY + 1) in seen
