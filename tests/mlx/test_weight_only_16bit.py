"""16-bit weights under float32 activations: exactly what a model cast to float32 computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model
from support.models import make_model

from phalanx.model.cpu.weight_only_16bit import WideEmbedding, WideQuantizedEmbedding, keep_16bit_weights

TOKENS = mx.array([[3, 14, 15, 92, 65, 35]])


def cast(model: Any, kept_16bit: set[str]) -> None:
    def wide(path: str, value: mx.array) -> mx.array:
        return value.astype(mx.float32) if value.dtype == mx.bfloat16 and path not in kept_16bit else value

    model.update(tree_map_with_path(wide, model.parameters()))


@pytest.mark.parametrize("quantize", [None, {"bits": 4, "group_size": 32}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3"])
def test_logits_are_those_of_the_model_in_float32(family: str, quantize: dict[str, Any] | None, tmp_path: Path) -> None:
    make_model(family, tmp_path, quantize=quantize, dtype=mx.bfloat16)
    wide, _ = load_model(tmp_path)
    cast(wide, set())
    model, _ = load_model(tmp_path)
    kept_16bit = keep_16bit_weights(model)
    cast(model, kept_16bit)
    kept = [name for name, value in tree_flatten(model.parameters()) if value.dtype == mx.bfloat16]
    assert set(kept) == kept_16bit and any("q_" in name or "o_proj" in name for name in kept)
    assert any(isinstance(m, WideEmbedding | WideQuantizedEmbedding) for m in model.modules())
    found, wanted = model(TOKENS), wide(TOKENS)
    assert found.dtype == mx.float32
    assert mx.array_equal(found, wanted)
