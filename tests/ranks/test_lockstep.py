"""Groups of real ranks give the tokens of mlx-lm's single process, whatever else happens around a request (A1, A7).

Every combination is tried by `make soak`; CI runs a set in which every family meets every kind of group.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.driver import Driver, ask, running
from support.models import make_model
from support.play import Play
from support.reference import job, reference
from test_tp_families import NEAR_TIE
from tokenizers import Tokenizer

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.types import Cancel, EngineStats, Finish, Submit

FAMILIES = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k25", "gpt_oss", "glm4_moe"]
FORMATS = ["plain", "4-bit"]
GROUPS = [(1, "auto"), (2, "ring"), (2, "mpi"), (4, "mpi")]
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "v_head_dim": 32, "qk_nope_head_dim": 32, "kv_lora_rank": 32, "num_hidden_layers": 2,
}  # fmt: skip
"""Of the random models: parts for four ranks are whole groups of 32."""
LONG, SHORT = 512, 96
STEPS = 500

pytestmark = pytest.mark.timeout(900)  # mlx-lm's references take minutes on a busy machine

GRID = [(family, form, group) for family in FAMILIES for form in FORMATS for group in GROUPS]
GRID += [("demo", "8-bit", group) for group in GROUPS]
SMALL = [(f, FORMATS[(i + j // 2) % 2], group) for i, f in enumerate(FAMILIES) for j, group in enumerate(GROUPS)
         if (i + j) % 2 == i // 2 % 2]  # fmt: skip
"""Pairwise: every family with both formats of weights and with groups of one, two and four."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """family, format -> a model's folder; made when first asked for."""
    folder = tmp_path_factory.mktemp("lockstep")

    def get(family: str, form: str) -> Path:
        path = MODEL_DIR if family == "demo" else folder / f"{family}-{form}"
        if not path.exists():
            sizes: dict[str, Any] = dict(SIZES)
            if family == "kimi_k25":
                sizes = {"text_config": {**SIZES, "model_type": "kimi_k2"}}
            make_model(family, path, quantize={"bits": 4, "group_size": 32} if form == "4-bit" else None, **sizes)
        return path

    yield get


@pytest.fixture(scope="module")
def references() -> Any:
    """What mlx-lm answers, remembered by model and jobs."""
    known: dict[str, list[dict[str, Any]]] = {}

    def get(path: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        key = f"{path} {len(jobs)} {jobs[0]}"
        if key not in known:
            known[key] = reference(path, jobs)
        return known[key]

    return get


TOPICS = (
    "fox lighthouse robot garden baker ship clock teacher river dragon painter bridge cat market train moon".split()
)


def demo_prompts() -> list[list[int]]:
    """What the demo model has something to say about; on random tokens it repeats itself."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    asked = "<|user|>Write a {} story about a {}.<|end|><|assistant|>"
    texts = [asked.format(("long", "short")[i % 2], topic) for i, topic in enumerate(TOPICS)]
    return [tokenizer.encode(text * (1 + i % 3), add_special_tokens=False).ids for i, text in enumerate(texts)]


def make_jobs(vocab: int, longest: int, prompts: list[list[int]] | None = None) -> list[dict[str, Any]]:
    """Sixteen prompts of different lengths; most end by length, some by a stop id of their own.

    Every fourth goes on for `longest` tokens; all of them where that is `LONG`.
    """
    rnd = random.Random(16)
    jobs = []
    for i in range(16):
        prompt = prompts[i] if prompts else [rnd.randrange(3, vocab) for _ in range(1 + i * 23 % 150)]
        stops = [rnd.randrange(vocab) for _ in range(2)] if i % 4 == 3 else []
        jobs.append(job(prompt, longest + i if i % 4 == 0 or longest == LONG else SHORT - i, stops))
    return jobs


async def run_jobs(driver: Driver, jobs: list[dict[str, Any]]) -> tuple[list[list[int]], EngineStats]:
    """Staggered arrival, and four more that leave early; the tokens of the jobs, and the ranks' figures."""
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
    """Check tokens; the number of rows that part at a near tie, after which they say nothing."""
    ties = 0
    for row, (tokens, answer) in enumerate(zip(got, wanted, strict=True)):
        if tokens == answer["tokens"]:
            continue
        pairs = zip(tokens, answer["tokens"], answer["gaps"], strict=False)
        at, gap = next(((i, g) for i, (a, b, g) in enumerate(pairs) if a != b), (-1, 1.0))
        assert gap < NEAR_TIE, f"row {row} differs at token {at} (gap {gap:.3g})"
        ties += 1
    return ties


def check(path: Path, group: tuple[int, str], jobs: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    ranks, backend = group
    config = EngineConfig(
        model=str(path), kv_cache_gb=0.25, prefix_cache_gb=0.02, max_num_batched_tokens=48,
        tensor_parallel_size=ranks, backend="auto" if ranks == 1 else backend,
    )  # fmt: skip

    async def main() -> tuple[list[list[int]], EngineStats]:
        async with running(config) as driver:
            return await run_jobs(driver, jobs)

    got, stats = asyncio.run(main())
    assert_lockstep(stats, ranks)
    assert compare(got, wanted) <= 1
    assert sum(len(set(answer["tokens"])) >= 8 for answer in wanted) >= 14, "the model only repeats itself"


@pytest.mark.parametrize(("family", "form", "group"), SMALL, ids=str)
def test_sixteen_requests(models, references, family, form, group):
    path, jobs = models(family, form), make_jobs(512, 160)
    check(path, group, jobs, references(path, jobs))


@pytest.mark.parametrize("group", GROUPS[1:], ids=str)
def test_sixteen_requests_on_the_demo_model(references, group):
    jobs = make_jobs(4096, LONG + 1, demo_prompts())
    check(MODEL_DIR, group, jobs, references(MODEL_DIR, jobs))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "form", "group"), GRID, ids=str)
def test_sixteen_long_requests_everywhere(models, references, family, form, group):
    path = models(family, form)
    jobs = make_jobs(4096, LONG, demo_prompts()) if family == "demo" else make_jobs(512, LONG)
    check(path, group, jobs, references(path, jobs))


@pytest.mark.parametrize("group", [(2, "ring"), (4, "mpi")], ids=str)
def test_five_hundred_steps_of_a_random_conversation(models, group):
    """The generator of `unit/sched/test_lockstep.py` on real ranks."""
    path, rnd = models("llama", "plain"), random.Random(str(group))
    play = Play(512, longest_prompt=200, longest_answer=60)
    config = EngineConfig(
        model=str(path), max_num_seqs=6, kv_cache_gb=0.02, prefix_cache_gb=0.01, max_num_batched_tokens=40,
        tensor_parallel_size=group[0], backend=group[1],
    )  # fmt: skip

    async def converse(driver: Driver) -> EngineStats:
        while (stats := await driver.engine.ping()).step < STEPS:
            for request in play.arrive(rnd) if stats.waiting < 10 else []:
                driver.tokens[request.id] = []
                driver.engine.send(Submit(request))
            settled = {*driver.finished, *play.finishes}
            running_now = sorted(i for i, t in driver.tokens.items() if t and i not in settled)
            if running_now and rnd.random() < 0.3:
                found = rnd.choice(running_now)
                play.finishes[found] = rnd.randint(1, len(driver.tokens[found]))
                driver.engine.send(Finish(found, play.finishes[found]))
            if rnd.random() < 0.2 and (leaving := play.cancel(rnd)) is not None:
                driver.engine.send(Cancel(leaving))
            await asyncio.sleep(rnd.random() * 0.05)
        await driver.until(lambda: all(i in driver.finished or i in play.cancelled for i in play.requests))
        return await driver.engine.ping()

    async def main() -> tuple[dict[str, list[int]], EngineStats, Any]:
        async with running(config) as driver:
            stats = await converse(driver)
            return driver.tokens, stats, driver.finished

    tokens, stats, finished = asyncio.run(main())
    assert stats.step >= STEPS
    assert_lockstep(stats, group[0])
    whole = [request for i, request in play.requests.items() if i not in play.cancelled]
    jobs = [job(r.prompt, r.stop.max_tokens, sorted(r.stop.stop_ids)) for r in whole]
    wanted = reference(path, jobs)
    for request, answer in zip(whole, wanted, strict=True):
        n = finished[request.id].n_tokens
        # A Finish that came after the end is not heard.
        assert n in (len(answer["tokens"]), play.finishes.get(request.id))
        answer["tokens"] = answer["tokens"][:n]
    assert compare([tokens[r.id][: finished[r.id].n_tokens] for r in whole], wanted) <= 1
