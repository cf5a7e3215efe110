"""Speculation on groups of real ranks: the tokens of mlx-lm's single process, whoever drafts (A2, A5, A7).

Every combination is tried by `make soak`; CI runs a set in which every drafter meets two ranks. Four have a draft model
that is sometimes right, so that they keep tokens and take tokens back.
"""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest
from groups import group_server, named, through_a_fault
from support.driver import PATIENT, running
from support.lockstep import LONG, Models, assert_lockstep, compare, make_jobs, run_jobs
from support.reference import Job
from support.speculation import with_noise

from phalanx.config import EngineConfig
from phalanx.speculation_config import (
    DraftModelSpeculation,
    NgramSpeculation,
    RandomSpeculation,
    SpeculativeConfig,
    SuffixSpeculation,
)
from phalanx.types import EngineStats

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

FAMILIES = ["llama", "qwen3", "deepseek_v3", "gpt_oss", "demo"]
METHODS = ["ngram", "suffix", "draft model", "oracle", "hostile"]
KS = range(1, 9)
ROWS = [1, 4, 16]
TWO, FOUR = (2, "mpi"), (4, "mpi")
SMALL = [
    ("llama", "ngram", 4, 16, TWO),
    ("qwen3", "draft model", 3, 16, FOUR),
    ("deepseek_v3", "oracle", 8, 4, TWO),
    ("gpt_oss", "hostile", 2, 16, (2, "ring")),
    ("demo", "suffix", 5, 16, TWO),
    ("llama", "hostile", 7, 16, TWO),
    ("demo", "oracle", 6, 4, TWO),
]
SOAK = [
    (FAMILIES[(m + k) % len(FAMILIES)], method, k, ROWS[(m + k) % len(ROWS)], group)
    for (m, method), k, group in product(enumerate(METHODS), KS, [(1, "auto"), TWO])
] + [(family, method, 4, 16, FOUR) for family, method in product(FAMILIES, METHODS)]


def config_of(models: Models, method: str, family: str, k: int) -> SpeculativeConfig:
    """A draft model is the family's own with noise on its weights, sometimes right; an oracle is the model itself."""
    fields: dict[str, Any] = {"num_speculative_tokens": k, "control": "always"}
    path = models.path(family)
    match method:
        case "ngram":
            return NgramSpeculation(**fields)
        case "suffix":
            return SuffixSpeculation(**fields)
        case "hostile":
            return RandomSpeculation(**fields)
        case "oracle":
            return DraftModelSpeculation(model=str(path), **fields)
    noisy = models.folder / f"{family}-noisy"
    return DraftModelSpeculation(model=str(noisy if noisy.exists() else with_noise(path, noisy, 0.02)), **fields)


def check(models: Models, family: str, method: str, k: int, rows: int, group: tuple[int, str], jobs: list[Job]) -> None:
    path = models.path(family)
    wanted = models.answers(path, jobs)
    config = EngineConfig(
        model=str(path), kv_cache_gb=0.25, prefix_cache_gb=0.02, max_num_batched_tokens=160,
        max_num_seqs=rows, tensor_parallel_size=group[0], backend="auto" if group[0] == 1 else group[1],
        speculative_config=config_of(models, method, family, k), **PATIENT,
    )  # fmt: skip

    async def main() -> tuple[list[list[int]], EngineStats]:
        async with running(config) as driver:
            info = driver.engine.info
            assert info is not None
            native = info.kernels.startswith("native")
            assert info.speculation.endswith("rows packed") == (native and family != "deepseek_v3")
            return await run_jobs(driver, jobs)

    got, stats = asyncio.run(main())
    assert_lockstep(stats, group[0])
    assert compare(got, wanted) <= 1
    assert stats.spec is not None
    if method in ("hostile", "draft model", "oracle"):
        assert stats.spec.drafted > len(jobs) * k
    if method == "oracle":
        assert stats.spec.accepted > 0.95 * stats.spec.drafted
    if method == "draft model":
        assert 0 < stats.spec.accepted < stats.spec.drafted


@pytest.mark.parametrize(("family", "method", "k", "rows", "group"), SMALL, ids=str)
def test_sixteen_requests(models, family, method, k, rows, group):
    check(models, family, method, k, rows, group, make_jobs(family))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "method", "k", "rows", "group"), SOAK, ids=str)
def test_sixteen_long_requests_everywhere(models, family, method, k, rows, group):
    check(models, family, method, k, rows, group, make_jobs(family, LONG))


def test_a_rank_that_is_killed_while_speculating(group_model, expected, tmp_path):
    """Streams go on with the tokens of an undisturbed run without speculation, at temperature 0.8; the draft model is
    sometimes right."""
    noisy = with_noise(group_model, tmp_path / "noisy", 0.02)
    config = DraftModelSpeculation(model=str(noisy), num_speculative_tokens=3, control="always")
    with group_server(group_model, 2, "mpi", inject="kill:rank=1,step=12", speculative_config=config) as server:
        named(through_a_fault(server, expected), "rank 1")
        stats = server.wait_for(server.engine.ping())
    assert 0 < stats.spec.accepted < stats.spec.drafted
