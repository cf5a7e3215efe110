"""Ragged rows equal mlx-lm's caches: the same greedy tokens, whatever joins, finishes, rolls back or moves.

The must-have families run long enough for several windows, growth and prefix hits; one of each other kind of model file
runs a shorter drive. `tools/conformance.py` runs all of them at full length.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from support.conformance import conform
from support.mlx_lm_greedy import stock_greedy
from support.models import make_model
from support.ragged import make_prompts
from support.reference import job, reference_greedy

MUST = [
    "llama",
    "llama:sliding",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k25",
    "mixtral",
    "phi3",
    "cohere2",
    "olmo2",
    "glm4_moe",
    "mamba2",
    "qwen3_next",
]
KINDS = [
    "afm7",
    "bailing_moe_v3",
    "baichuan_m1",
    "deepseek_v32",
    "falcon_h1",
    "gear",
    "gemma3n",
    "gemma4",
    "gpt2",
    "gpt_bigcode",
    "hunyuan",
    "internlm2:dynamic",
    "iquestloopcoder",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama4",
    "longcat_flash",
    "mamba",
    "mimo_v2_flash",
    "minimax_m3_vl",
    "ministral3",
    "mistral4",
    "nemotron-nas",
    "nemotron_h",
    "openelm",
    "plamo3",
    "recurrent_gemma",
    "rwkv7",
    "step3p5",
]
"""One of each way in which model files use a cache."""


@pytest.mark.parametrize("family", MUST)
def test_must_have_families(family: str, tmp_path: Path) -> None:
    """Four prompts up to five windows long, 20 tokens each, varied enough to notice a wrong cache."""
    outcome = conform(family, tmp_path, prompts=4, longest=40, tokens=20)
    assert outcome.distinct >= 8
    assert outcome.wrong == []


@pytest.mark.parametrize("family", KINDS)
def test_other_kinds(family: str, tmp_path: Path) -> None:
    """Two prompts, 24 tokens each."""
    outcome = conform(family, tmp_path, prompts=2, longest=24, tokens=24)
    assert outcome.distinct >= 8
    assert outcome.wrong == []


def test_the_reference_in_this_process_is_mlx_lms_own(tmp_path: Path) -> None:
    """`stock_greedy` gives what `generate_step` gives in a process without our code."""
    path = make_model("gemma3_text", tmp_path / "model")
    prompts = make_prompts(4, 40)
    model, _ = load_model(path)
    assert stock_greedy(model, prompts, 24) == reference_greedy(path, [job(p, 24) for p in prompts])


def test_quantised_weights(tmp_path: Path) -> None:
    """4-bit weights in fp32: the cache does not care."""
    outcome = conform("qwen3", tmp_path, prompts=4, longest=24, tokens=24, quantize={"bits": 4, "group_size": 32})
    assert outcome.wrong == []


def test_a_cache_in_16_bits_keeps_its_dtype(tmp_path: Path) -> None:
    """Buffers have the dtype of what the model writes."""
    outcome = conform("llama", tmp_path, prompts=2, longest=8, tokens=8, dtype=mx.bfloat16)
    assert outcome.facts is not None
    assert outcome.facts.bytes_per_token == 3 * 2 * 2 * 16 * 2
