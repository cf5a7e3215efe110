"""Model files that can be split: the greedy tokens of two real ranks are those of mlx-lm in one process.

One pair of processes decodes for all families, and one process of mlx-lm's for all references. `make soak` decodes with
every family. `make test-full` decodes with those of each kind, by where the recipe is from and what the cache is made
of; `mlx/test_shard.py` compares the logits of every family's prompt, all ranks in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.examples import SOAK
from support.lockstep import NEAR_TIE
from support.models import make_model
from support.reference import job, reference_many
from support.splitting import KINDS, OVERRIDES, SPLIT, UNCHECKED

from phalanx.dist.collective_backend import choose, environment_of, mpirun_command, ring_hostfile
from phalanx.dist.ports import free_ports

PROMPT = [5, 9, 30, 7, 8, 100, 200, 33, 2, 11]
TOKENS = 12
FOUR = ["deepseek_v3", "glm4_moe", "gpt_oss", "kimi_k25", "llama", "olmo2", "qwen3", "qwen3_moe"]

RANK = Path(__file__).with_name("greedy_rank.py")

pytestmark = pytest.mark.full


def decode(jobs: list[dict[str, Any]], size: int, backend: str, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank of a group answered."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    out = folder / f"{backend}{size}"
    command = [sys.executable, str(RANK), str(folder / "jobs.json"), str(out), str(size), backend]
    if backend == "mpi":
        launches = [(mpirun_command(size, "auto", command), environment_of("mpi", None, None))]
    else:
        hosts = folder / "hosts.json"
        hosts.write_text(ring_hostfile([f"127.0.0.1:{port}" for port in free_ports(size)]))
        launches = [(command, environment_of("ring", rank, hosts)) for rank in range(size)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **extra}, stderr=subprocess.PIPE, text=True)
        for command, extra in launches
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A job per family, on a tiny random model of it."""
    folder = tmp_path_factory.mktemp("families")
    made = {}
    for family in SPLIT if SOAK else sorted({*FOUR, *KINDS}):
        path = make_model(family, folder / family.replace(":", "_"), **OVERRIDES.get(family, {}))
        made[family] = {**job(PROMPT, TOKENS), "model": str(path)}
    return made


@pytest.fixture(scope="module")
def references(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """mlx-lm's tokens, and how sure it was of each."""
    return dict(zip(jobs, reference_many(list(jobs.values())), strict=True))


def disagreement(tokens: list[int], reference: dict[str, Any]) -> str:
    """The first token that differs and is no near tie, in words."""
    for i, (ours, theirs, gap) in enumerate(zip(tokens, reference["tokens"], reference["gaps"], strict=True)):
        if ours != theirs:
            return "" if gap < NEAR_TIE else f"token {i} is {ours}, not {theirs} (gap {gap:.3g})"
    return ""


def assert_greedy(
    families: list[str], answers: list[list[dict[str, Any]]], references: dict[str, dict[str, Any]]
) -> None:
    for family in families:
        assert len(set(references[family]["tokens"])) >= TOKENS / 3, family
    problems = [
        f"{family}, rank {rank}: {problem}"
        for rank, answer in enumerate(answers)
        for family, result in zip(families, answer, strict=True)
        if (problem := disagreement(result["tokens"], references[family]))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.grows
@pytest.mark.timeout(600)
def test_two_ranks_decode_as_one_process_does(
    jobs: dict[str, dict[str, Any]], references: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    answers = decode(list(jobs.values()), 2, choose("auto", machines=1).backend, tmp_path)
    assert_greedy(list(jobs), answers, references)
    for family, result in zip(jobs, answers[0], strict=True):
        assert result["sums"] > 0, family
        assert set(result["unchecked"]) == UNCHECKED.get(family, set()), family


def test_four_ranks_share_key_heads(
    jobs: dict[str, dict[str, Any]], references: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    backend = choose("auto", machines=1).backend
    if backend == "ring":
        pytest.skip("a ring of four spins on more cores than there may be")
    assert_greedy(FOUR, decode([jobs[family] for family in FOUR], 4, backend, tmp_path), references)


@pytest.mark.soak  # two of these families, and two more, decode on rings in `test_lockstep.py`
def test_the_ring_gives_the_same(
    jobs: dict[str, dict[str, Any]], references: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    families = FOUR[:4]
    assert_greedy(families, decode([jobs[family] for family in families], 2, "ring", tmp_path), references)
