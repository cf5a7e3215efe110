"""Speculation on groups of real ranks: the tokens of mlx-lm's single process, whoever drafts (A2, A5, A7).

Every combination is tried by `make soak`; CI runs a set in which every method meets two ranks.
"""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from groups import group_server, through_a_fault
from support.driver import running
from support.models import make_model
from support.reference import reference
from support.speculation import disturbed
from test_lockstep import SIZES, assert_lockstep, compare, demo_prompts, make_jobs, run_jobs

from phalanx.config import (
    DraftModelSpeculation,
    EngineConfig,
    NgramSpeculation,
    RandomSpeculation,
    SpeculativeConfig,
    SuffixSpeculation,
)
from phalanx.demo import MODEL_DIR
from phalanx.types import EngineStats

pytestmark = pytest.mark.timeout(900)

FAMILIES = ["llama", "qwen3", "deepseek_v3", "gpt_oss", "demo"]
METHODS = ["ngram", "suffix", "draft model", "oracle", "hostile"]
KS = range(1, 9)
ROWS = [1, 4, 16]
TWO, FOUR = (2, "mpi"), (4, "mpi")
SMALL = [
    ("llama", "ngram", 4, 16, TWO),
    ("qwen3", "draft model", 3, 16, TWO),
    ("deepseek_v3", "oracle", 8, 4, TWO),
    ("gpt_oss", "hostile", 2, 16, (2, "ring")),
    ("demo", "suffix", 5, 16, TWO),
    ("llama", "hostile", 7, 16, FOUR),
    ("demo", "oracle", 6, 4, FOUR),
]
SOAK = [
    (FAMILIES[(m + k) % len(FAMILIES)], method, k, ROWS[(m + k) % len(ROWS)], group)
    for (m, method), k, group in product(enumerate(METHODS), KS, [(1, "auto"), TWO])
] + [(family, method, 4, 16, FOUR) for family, method in product(FAMILIES, METHODS)]


class Bench:
    """Models and mlx-lm's answers, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int], tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}

    def path(self, family: str) -> Path:
        path = MODEL_DIR if family == "demo" else self._folder / family
        return path if path.exists() else make_model(family, path, **SIZES)

    def config(self, method: str, family: str, k: int) -> SpeculativeConfig:
        fields: dict[str, Any] = {"num_speculative_tokens": k, "control": "always"}
        match method:
            case "ngram":
                return NgramSpeculation(**fields)
            case "suffix":
                return SuffixSpeculation(**fields)
            case "hostile":
                return RandomSpeculation(**fields)
            case "oracle":
                return DraftModelSpeculation(model=str(self.path(family)), **fields)
        path = self._folder / f"{family}-disturbed"
        return DraftModelSpeculation(
            model=str(path if path.exists() else disturbed(self.path(family), path, 0.02)), **fields
        )

    def jobs(self, family: str, longest: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        if (family, longest) not in self._known:
            demo = family == "demo"
            jobs = make_jobs(4096 if demo else 512, longest, demo_prompts() if demo else None)
            self._known[family, longest] = jobs, reference(self.path(family), jobs)
        return self._known[family, longest]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("speculation"))


def check(bench: Bench, family: str, method: str, k: int, rows: int, group: tuple[int, str], longest: int) -> None:
    jobs, wanted = bench.jobs(family, longest)
    config = EngineConfig(
        model=str(bench.path(family)), kv_cache_gb=0.25, prefix_cache_gb=0.02, max_num_batched_tokens=160,
        max_num_seqs=rows, tensor_parallel_size=group[0], backend="auto" if group[0] == 1 else group[1],
        speculative_config=bench.config(method, family, k),
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
def test_sixteen_requests(bench, family, method, k, rows, group):
    check(bench, family, method, k, rows, group, 96)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "method", "k", "rows", "group"), SOAK, ids=str)
def test_sixteen_long_requests_everywhere(bench, family, method, k, rows, group):
    check(bench, family, method, k, rows, group, 513)


@pytest.mark.parametrize("method", ["oracle", "hostile"])
def test_a_rank_that_is_killed_while_speculating(bench, group_model, expected, method):
    """Streams go on with the tokens of an undisturbed run without speculation, at temperature 0.8."""
    fields: dict[str, Any] = {"num_speculative_tokens": 3, "control": "always"}
    config = RandomSpeculation(**fields)
    if method == "oracle":
        config = DraftModelSpeculation(model=str(group_model), **fields)
    with group_server(group_model, 2, "mpi", inject="kill:rank=1,step=12", speculative_config=config) as server:
        reasons = through_a_fault(server, expected)
    assert any("rank 1" in reason for reason in reasons), reasons
