"""Sixteen requests to a group of real ranks, and the answers of mlx-lm's single process.

For the tests of `ranks/`. Models are made at their first use, once in a session.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.driver import Driver, ask
from support.models import make_model
from support.reference import Job, job, reference, reference_many
from tokenizers import Tokenizer

from phalanx.demo import MODEL_DIR
from phalanx.types import Cancel, EngineStats

NEAR_TIE = 1e-4
"""Largest difference of the two likeliest log-probabilities, in float32, that counts as a tie (design: Proof)."""
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "v_head_dim": 32, "qk_nope_head_dim": 32, "kv_lora_rank": 32, "num_hidden_layers": 2,
}  # fmt: skip
"""Sizes of the random models: each of four ranks gets whole quantisation groups of 32."""
LONG, USUAL, SHORT = 512, 160, 96
"""Tokens of an answer: LONG makes caches grow, USUAL exceeds the longest prompt, SHORT is for most requests."""
TOPICS = (
    "fox lighthouse robot garden baker ship clock teacher river dragon painter bridge cat market train moon".split()
)


class Models:
    """Models by family and form ("plain", "4-bit"), jobs for them, and mlx-lm's answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, family: str, form: str = "plain", layers: int = 2) -> Path:
        path = MODEL_DIR if family == "demo" else self.folder / f"{family}-{form}-{layers}"
        if not path.exists():
            sizes = {**SIZES, "num_hidden_layers": layers}
            sizes = {"text_config": {**sizes, "model_type": "kimi_k2"}} if family == "kimi_k25" else sizes
            make_model(family, path, quantize={"bits": 4, "group_size": 32} if form == "4-bit" else None, **sizes)
        return path

    def answers(self, path: Path, jobs: list[Job]) -> list[dict[str, Any]]:
        """mlx-lm's tokens, and the gap between its two likeliest ones at each."""
        return reference(path, jobs)

    def ask_together(self, asked: Mapping[Path, list[Job]]) -> None:
        """Have answers of several models ready: one process takes less than one for each."""
        reference_many([{**entry, "model": str(path)} for path, jobs in asked.items() for entry in jobs])


def demo_prompts() -> list[list[int]]:
    """Prompts that the demo model was trained for; after random tokens it repeats itself."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    asked = "<|user|>Write a {} story about a {}.<|end|><|assistant|>"
    texts = [asked.format(("long", "short")[i % 2], topic) for i, topic in enumerate(TOPICS)]
    return [tokenizer.encode(text * (1 + i % 3), add_special_tokens=False).ids for i, text in enumerate(texts)]


def make_jobs(family: str, longest: int = USUAL, *, all_long: bool = False) -> list[Job]:
    """Sixteen prompts of different lengths; most end by length, some by a stop id of their own.

    Every fourth goes on for `longest` tokens and a few; with `all_long`, all of them.
    """
    rnd = random.Random(16)
    prompts, vocab = (demo_prompts(), 4096) if family == "demo" else ([], 512)
    jobs = []
    for i in range(16):
        prompt = prompts[i] if prompts else [rnd.randrange(3, vocab) for _ in range(1 + i * 23 % 150)]
        stops = [rnd.randrange(vocab) for _ in range(2)] if i % 4 == 3 else []
        jobs.append(job(prompt, longest + i if i % 4 == 0 or all_long else SHORT - i, stops))
    return jobs


async def run_jobs(driver: Driver, jobs: list[Job]) -> tuple[list[list[int]], EngineStats]:
    """Submit the jobs one after the other, and four more that are cancelled early.

    Returns:
        The tokens of the jobs, and the ranks' counters.
    """
    for i, entry in enumerate(jobs):
        driver.submit(ask(str(i), entry["prompt"], entry["max_tokens"], stop_ids=entry["stop_ids"]))
        if i % 4 == 3:
            driver.submit(ask(f"leaving {i}", entry["prompt"][::-1], 400))
            await driver.until(lambda i=i: len(driver.tokens[str(i - 3)]) > 3)
            driver.engine.send(Cancel(f"leaving {i}"))
    await driver.until(lambda: all(str(i) in driver.finished for i in range(len(jobs))))
    return [driver.tokens[str(i)] for i in range(len(jobs))], await driver.engine.ping()


def assert_lockstep(stats: EngineStats, ranks: int) -> None:
    """Every rank executed every step and agreed each time (A5)."""
    assert [rank.rank for rank in stats.ranks] == list(range(ranks))
    assert all(rank.steps == rank.matches == stats.step for rank in stats.ranks)
    assert ranks == 1 or all(rank.reductions > stats.step for rank in stats.ranks)


def compare(got: list[list[int]], wanted: list[dict[str, Any]]) -> int:
    """Check the tokens. Returns the number of rows that differ from a near tie on, where the comparison stops."""
    ties = 0
    for row, (tokens, answer) in enumerate(zip(got, wanted, strict=True)):
        if tokens == answer["tokens"]:
            continue
        pairs = zip(tokens, answer["tokens"], answer["gaps"], strict=False)
        at, gap = next(((i, g) for i, (a, b, g) in enumerate(pairs) if a != b), (-1, 1.0))
        assert gap < NEAR_TIE, f"row {row} differs at token {at} (gap {gap:.3g})"
        ties += 1
    return ties
