"""Groups of real ranks give the tokens of mlx-lm's single process, whatever else happens around a request (A1, A7).

Every combination is tried by `make soak`; CI runs a covering set.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.driver import PATIENT, Driver, running
from support.lockstep import LONG, USUAL, Models, assert_lockstep, compare, make_jobs, run_jobs
from support.play import Play
from support.reference import Job, job

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.types import Cancel, EngineStats, Finish, Submit

FAMILIES = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k25", "gpt_oss", "glm4_moe"]
FORMATS = ["plain", "4-bit"]
GROUPS = [(1, "auto"), (2, "ring"), (2, "mpi"), (4, "mpi")]
STEPS = 500

pytestmark = pytest.mark.timeout(900)  # mlx-lm's references take minutes on a busy machine

GRID = [(family, form, group) for family in FAMILIES for form in FORMATS for group in GROUPS]
GRID += [("demo", "8-bit", group) for group in GROUPS]
SMALL = [(family, FORMATS[i % 2], GROUPS[1 + i // 2 % 2]) for i, family in enumerate(FAMILIES)]
SMALL += [("llama", "4-bit", (4, "mpi")), ("qwen3", "plain", (1, "auto"))]
"""Every family, both formats on either backend. `mlx/test_shard.py` has how each family's matrices are cut in either
format, `test_tp_families.py` that four ranks agree on eight families; four are met here by one of these and by the demo
model, whose answers do not repeat themselves."""
IN_TEST = ("qwen3_moe", "plain", (2, "mpi"))
IN_FULL = [pytest.param(*case, marks=pytest.mark.full) for case in SMALL if case != IN_TEST]
FEW = [(2, "ring"), pytest.param((2, "mpi"), marks=pytest.mark.soak), (4, "mpi")]


def check(models: Models, path: Path, group: tuple[int, str], jobs: list[Job]) -> None:
    wanted = models.answers(path, jobs)
    ranks, backend = group
    config = EngineConfig(
        model=str(path), kv_cache_gb=0.25, prefix_cache_gb=0.02, max_num_batched_tokens=48,
        tensor_parallel_size=ranks, backend="auto" if ranks == 1 else backend, **PATIENT,
    )  # fmt: skip

    async def main() -> tuple[list[list[int]], EngineStats]:
        async with running(config) as driver:
            return await run_jobs(driver, jobs)

    got, stats = asyncio.run(main())
    assert_lockstep(stats, ranks)
    assert compare(got, wanted) <= 1
    assert sum(len(set(answer["tokens"])) >= 8 for answer in wanted) >= 14, "the model only repeats itself"


@pytest.mark.parametrize(("family", "form", "group"), [IN_TEST, *IN_FULL], ids=str)
def test_sixteen_requests(models, family, form, group):
    check(models, models.path(family, form), group, make_jobs(family, LONG if family == "llama" else USUAL))


@pytest.mark.full
@pytest.mark.parametrize("group", FEW, ids=str)
def test_sixteen_requests_on_the_demo_model(models, group):
    check(models, MODEL_DIR, group, make_jobs("demo"))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "form", "group"), GRID, ids=str)
def test_sixteen_long_requests_everywhere(models, family, form, group):
    check(models, models.path(family, form), group, make_jobs(family, LONG, all_long=True))


@pytest.mark.full
@pytest.mark.parametrize("group", [(2, "ring"), pytest.param((4, "mpi"), marks=pytest.mark.soak)], ids=str)
def test_five_hundred_steps_of_a_random_conversation(models, group):
    """The generator of `unit/sched/test_simulated_lockstep.py` on real ranks."""
    path, rnd = models.path("llama"), random.Random(str(group))
    arriving = random.Random(f"arriving {group}")  # of its own, so that what is asked does not depend on time
    play = Play(512, longest_prompt=200, longest_answer=60)
    config = EngineConfig(
        model=str(path), max_num_seqs=6, kv_cache_gb=0.02, prefix_cache_gb=0.01, max_num_batched_tokens=40,
        tensor_parallel_size=group[0], backend=group[1], **PATIENT,
    )  # fmt: skip

    async def converse(driver: Driver) -> EngineStats:
        while (stats := await driver.engine.ping()).step < STEPS:
            for request in play.arrive(arriving) if stats.waiting < 10 else []:
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
    jobs = [job(r.prompt, r.stop.max_tokens, sorted(r.stop.stop_ids)) for r in play.requests.values()]
    answers = dict(zip(play.requests, models.answers(path, jobs), strict=True))
    whole = [request for i, request in play.requests.items() if i not in play.cancelled]
    wanted = [answers[request.id] for request in whole]
    for request, answer in zip(whole, wanted, strict=True):
        n = finished[request.id].n_tokens
        # A Finish that came after the end is not heard.
        assert n in (len(answer["tokens"]), play.finishes.get(request.id))
        answer["tokens"] = answer["tokens"][:n]
    assert compare([tokens[r.id][: finished[r.id].n_tokens] for r in whole], wanted) <= 1
