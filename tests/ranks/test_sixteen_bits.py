"""Models in 16 bits, with the kernels where they are: tokens are float32's but for near ties (design: Proof)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import near_ties
from support.driver import PATIENT, ask, running
from support.examples import SOAK
from support.golden import golden
from support.lockstep import SIZES, demo_prompts
from support.models import make_model
from support.near_ties import FLIPS, Forced, Verdict, force, judge

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR

MOE = ["qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe"]
"""Only at 4 bits: MLX itself cannot multiply experts' matrices of 16 bits on a CPU."""
DENSE = ["llama", "qwen3", "gemma2"]
MODELS = [*((family, form) for form in ("plain", "4-bit") for family in DENSE), *((family, "4-bit") for family in MOE)]
CASES = [(*model, ("float16", "bfloat16")[i // 2 % 2], 1 + i % 2) for i, model in enumerate(MODELS)]
PROMPTS, TOKENS = 12 if SOAK else 3, 64
"""MLX's own products in 16 bits, which judge the answers, are what takes time here."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200 if SOAK else 300), pytest.mark.grows]


def verdict_on(path: Path, dtype: str, ranks: int, prompts: list[list[int]]) -> Verdict:
    """On what a group says in so many bits."""
    config = EngineConfig(
        model=str(path), dtype=dtype, kv_cache_gb=0.05, prefix_cache_gb=0.0, max_num_batched_tokens=48,
        tensor_parallel_size=ranks, **PATIENT,
    )  # fmt: skip

    async def main() -> list[list[int]]:
        async with running(config) as driver:
            return await driver.generate(*(ask(str(i), prompt, TOKENS) for i, prompt in enumerate(prompts)))

    said = asyncio.run(main())
    assert sum(len(set(tokens)) >= 8 for tokens in said) >= len(prompts) - 1, "the model only repeats itself"
    return judge(mlx_lm_on(path, dtype, prompts, said))


def mlx_lm_on(path: Path, dtype: str, prompts: list[list[int]], said: list[list[int]]) -> list[Forced]:
    """mlx-lm's logits for what a group said: kept, so computed again where a group says anything else."""
    jobs = [
        {"model": str(path), "dtype": dtype, "prompt": prompt, "tokens": tokens}
        for prompt, tokens in zip(prompts, said, strict=True)
    ]

    def compute(missing: list[Any]) -> list[Any]:
        return [asdict(one) for one in force(path, dtype, [(job["prompt"], job["tokens"]) for job in missing])]

    code = Path(near_ties.__file__).read_text()
    return [Forced(**answer) for answer in golden().answers(code, jobs, compute)]


@pytest.mark.parametrize(("family", "form", "dtype", "ranks"), CASES, ids=str)
def test_tokens_are_float32s_but_for_near_ties(tmp_path, family, form, dtype, ranks):
    quantize = {"bits": 4, "group_size": 32} if form == "4-bit" else None
    path = make_model(family, tmp_path / family, quantize=quantize, dtype=getattr(mx, dtype), **SIZES)
    rnd = random.Random(family)
    prompts = [[rnd.randrange(3, 512) for _ in range(1 + i * 46 % 150)] for i in range(PROMPTS)]
    verdict = verdict_on(path, dtype, ranks, prompts)
    assert verdict.right, verdict


def test_a_trained_model_hardly_ever_flips():
    verdict = verdict_on(MODEL_DIR, "float16", 2, demo_prompts()[:PROMPTS])
    assert not verdict.unexplained, verdict
    assert verdict.flips <= FLIPS * verdict.tokens, verdict
