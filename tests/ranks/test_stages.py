"""Pipeline stages of real ranks give the tokens of mlx-lm's single process (P1-P4).

CI cuts every family once, into each kind of pipeline among them, with short answers; where memory is scarce, rows are
preempted and a prompt is cancelled. It meets the faults that are found in different ways, on as few ranks as have them.
`make soak` adds every combination, long answers, and all faults on two stages of two ranks.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from groups import group_server, named, signal_to, through_a_fault
from support.driver import Driver, ask, running
from support.lockstep import LONG, Models, compare, make_jobs, run_jobs
from support.reference import Job, job

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.dist.topology import Topology
from phalanx.sched.admission import GRANULE
from phalanx.speculation_config import NgramSpeculation
from phalanx.types import Cancel, EngineStats, ResetPrefixCache

FAMILIES = ["llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "kimi_k25", "qwen3_next"]
PIPELINES: dict[str, dict[str, Any]] = {
    "2": {"pipeline_parallel_size": 2},
    "3": {"pipeline_parallel_size": 3},
    "2 x 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "backend": "mpi"},
    "2 and 1": {"pipeline_parallel_size": 2, "tensor_parallel_size": (2, 1), "backend": "mpi"},
}
GRID = [(family, pipeline, drafts) for family in FAMILIES for pipeline in PIPELINES for drafts in (False, True)]
WIDER = {"llama": "2 x 2", "qwen3": "3", "deepseek_v3": "2 and 1"}  # processes take more than what they compute
SMALL = [
    pytest.param(family, WIDER.get(family, "2"), i % 2 == 1, marks=[pytest.mark.full] * (family != "gemma3"))
    for i, family in enumerate(FAMILIES)
]
SCARCE_GB = {"gemma3": 0.0003, "deepseek_v3": 0.0005}
"""Too little memory for the rows that are admitted: rows grow by the page, or all together by `GRANULE` tokens."""
LAYERS = 4
BRIEF = 10  # tokens of an answer in CI: prompts of up to 150 tokens are cut into chunks, which takes most steps

pytestmark = pytest.mark.timeout(900)  # mlx-lm's references take minutes on a busy machine


def check(
    models: Models, path: Path, pipeline: str, drafts: bool, jobs: list[Job], scarce_gb: float | None = None
) -> None:
    """The tokens are mlx-lm's.

    Args:
        scarce_gb: too little memory for rows. Then rows are preempted and computed again, and the last job is cancelled
            while chunks of its prompt follow each other, before it is computed.
    """
    wanted = models.answers(path, jobs)
    config = EngineConfig(
        model=str(path), kv_cache_gb=scarce_gb or 0.25, prefix_cache_gb=0.02, max_num_batched_tokens=48,
        speculative_config=NgramSpeculation() if drafts else None, **PIPELINES[pipeline],
    )  # fmt: skip

    async def main() -> tuple[list[list[int]], EngineStats]:
        async with running(config) as driver:
            info = driver.engine.info
            assert info is not None and (info.stages, info.ranks) == (len(config.widths), config.n_ranks)
            if scarce_gb is None:
                return await run_jobs(driver, jobs)
            got, stats = await run_jobs(driver, jobs[:-1])
            assert stats.preemptions > 0
            return [*got, await cancelled_and_asked_again(driver, jobs[-1])], await driver.engine.ping()

    got, stats = asyncio.run(main())
    assert [rank.rank for rank in stats.ranks] == list(range(config.n_ranks))
    assert all(rank.steps == rank.matches == stats.step for rank in stats.ranks)
    assert compare(got, wanted) <= 1


async def cancelled_and_asked_again(driver: Driver, entry: Job) -> list[int]:
    """The tokens of a request that was cancelled amid its prefill before: what was computed then is found again."""
    prompt, computed, attempts = entry["prompt"], 0, 0
    while not 0 < computed < len(prompt):  # else it came too late
        attempts += 1
        driver.engine.send(ResetPrefixCache())
        before = (await driver.engine.ping()).prefill_tokens
        driver.submit(ask(f"cancelled {attempts}", prompt, entry["max_tokens"]))
        while (await driver.engine.ping()).prefill_tokens == before:
            pass
        driver.engine.send(Cancel(f"cancelled {attempts}"))
        stats = await driver.engine.ping()
        computed = stats.prefill_tokens - before
    (tokens,) = await driver.generate(ask("again", prompt, entry["max_tokens"]))
    assert (await driver.engine.ping()).prefix_hits == stats.prefix_hits + computed
    return tokens


def brief_jobs(family: str) -> list[Job]:
    """With scarce memory: two of the rows outgrow what all have at first, and one more has a prompt of many chunks."""
    jobs = [{**entry, "max_tokens": BRIEF + i % 4} for i, entry in enumerate(make_jobs(family))]
    if family in SCARCE_GB:
        rnd = random.Random(family)
        for i in (2, 9):
            jobs[i] = job([rnd.randrange(3, 512) for _ in range(GRANULE - 6)], BRIEF)
        jobs.append(job([rnd.randrange(3, 512) for _ in range(400)], BRIEF))
    return jobs


@pytest.fixture(scope="module")
def briefly_answered(models: Models) -> Models:
    """The models of all families, with mlx-lm's answers to the brief jobs."""
    models.ask_together({models.path(family, layers=LAYERS): brief_jobs(family) for family in FAMILIES})
    return models


@pytest.mark.parametrize(("family", "pipeline", "drafts"), SMALL, ids=str)
def test_sixteen_requests(briefly_answered, family, pipeline, drafts):
    models: Models = briefly_answered
    check(models, models.path(family, layers=LAYERS), pipeline, drafts, brief_jobs(family), SCARCE_GB.get(family))


@pytest.mark.soak  # a trained model: its answers do not repeat themselves
@pytest.mark.parametrize("pipeline", ["3", "2 and 1"], ids=str)
def test_sixteen_requests_on_the_demo_model(models, pipeline):
    check(models, MODEL_DIR, pipeline, True, make_jobs("demo"))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "pipeline", "drafts"), GRID, ids=str)
def test_sixteen_long_requests_everywhere(models, family, pipeline, drafts):
    check(models, models.path(family, layers=LAYERS), pipeline, drafts, make_jobs(family, LONG, all_long=True))


# Faults ----------------------------------------------------------------------------------------------------------

PAIR, WIDE, SQUARE = (1, 1), (2, 1), (2, 2)
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {  # -> what is injected, and what /health says
    "cut": ("cut:rank={sender},step=30", ("rank {sender} on", "to rank 0 on", "the connection broke")),
    "lose": ("lose:rank={sender},step=30", ("rank {sender} on", "to rank 0 on", "did not come in time")),
    "repeat": ("repeat:rank={sender},step=30", ("rank {sender} on", "to rank 0 on", "came again")),
    "corrupt": ("corrupt:rank={sender},step=30", ("rank {sender} on", "to rank 0 on", "corrupted", "checksum")),
    "the leader in a prefill": ("kill:rank=0,step=2", ("rank 0", "SIGKILL")),
    "wedge": ("wedge:rank={other},step=30", ("rank {other}", "step")),
    "tamper": ("tamper:rank={sender},step=30", ("rank {sender}", "Desync", "row digest")),
    "crash": ("crash:rank={other},step=30", ("rank {other} ", "crashed: IndexError: injected at step 30")),
    "garbage": (
        "garbage:rank={other},step=30,layer=1",
        ("CollectiveFault", "the all-reduce is wrong at", "on rank {other} on "),
    ),
}
IN_SOAK = [pytest.param(fault, SQUARE, marks=pytest.mark.soak) for fault in FAULTS]


@pytest.mark.full
@pytest.mark.parametrize(("fault", "widths"), [("garbage", WIDE), *IN_SOAK], ids=str)
def test_faults_of_links_and_stages(group_model, expected, fault, widths):
    first = Topology(widths).ranks(0)
    ranks = {"sender": first[0], "other": first[-1]}
    injected, said = FAULTS[fault]
    with group_server(
        group_model, widths, "mpi", inject=injected.format_map(ranks), step_timeout_seconds=2.0
    ) as running:
        named(through_a_fault(running, expected), *(words.format_map(ranks) for words in said))


@pytest.mark.full
@pytest.mark.parametrize(
    ("widths", "fault", "said"),
    [(PAIR, "corrupt", "checksum"), pytest.param(SQUARE, "kill", "SIGKILL", marks=pytest.mark.soak)],  # of two mpiruns
    ids=str,
)
def test_stages_that_fail_one_after_the_other(group_model, expected, widths, fault, said):
    """On one pipeline.

    The first stage or its link fails first, then one of its ranks is stopped, then the rank with the logits is killed.
    """
    first = Topology(widths).ranks(0)
    with group_server(group_model, widths, "mpi", inject=f"{fault}:rank={first[0]},step=30") as running:
        named(through_a_fault(running, expected), f"rank {first[0]}", said)
        stop = signal_to(running, first[-1], signal.SIGSTOP)
        named(through_a_fault(running, expected, stop), f"rank {first[-1]}", "no sign of life")
        named(through_a_fault(running, expected, signal_to(running, 0, signal.SIGKILL)), "rank 0", "SIGKILL")
