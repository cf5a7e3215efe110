"""Groups that somebody else starts: `phalanx rank` under mpirun and mlx.launch, behind `phalanx serve --attach`; and
`phalanx selftest`, which starts one itself (F1, F4)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.driver import PATIENT
from support.reference import job, reference_greedy

from phalanx.dist.collective_backend import environment_of, find_mpi, mpirun_command, ring_hostfile
from phalanx.errors import ExitCode

PHALANX = [sys.executable, "-m", "phalanx"]
WAIT_S = 240


@contextmanager
def process(command: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A child with a group of its own, all of which is gone afterwards."""
    child = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(120)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def launcher(name: str, command: list[str]) -> tuple[list[str], dict[str, str]]:
    if name == "mpirun":
        return mpirun_command(2, "auto", command), environment_of("mpi", None, None)
    script = str(Path(sys.executable).with_name("mlx.launch"))
    return [script, "-n", "2", "--backend", "ring", "--", *command], {}


@pytest.mark.full
@pytest.mark.parametrize("name", ["mpirun", "mlx.launch"])
def test_ranks_under_another_launcher_serve_behind_an_attached_server(group_model, tmp_path, name):
    if name == "mpirun" and find_mpi() is None:
        pytest.skip("needs the mpi extra")
    line = tmp_path / "engine.sock"
    config = json.dumps({"model": str(group_model), **PATIENT})
    ranks, variables = launcher(name, [*PHALANX, "rank", str(group_model), "--socket", str(line), "--config", config])
    with process([*PHALANX, "serve", str(group_model), "--attach", str(line), "--port", "0"]) as server:
        while not line.exists():
            assert server.poll() is None
            time.sleep(0.05)
        with process(ranks, **variables):
            assert server.stdout is not None
            ready = re.search(r"phalanx is ready: (\S+)/v1", server.stdout.readline())
            assert ready is not None
            with httpx.Client(base_url=ready[1], timeout=WAIT_S) as client:
                body = {"model": str(group_model), "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0,
                        "return_token_ids": False, "ignore_eos": True}  # fmt: skip
                body.pop("return_token_ids")
                text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
                (wanted,) = reference_greedy(group_model, [job([5, 6, 7], 20)])
                told = client.post("/detokenize", json={"model": str(group_model), "tokens": wanted}).json()["prompt"]
                assert text == told
                answer = client.get("/health").json()
                assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
                assert all(rank["mismatches"] == 0 for rank in answer["ranks"])


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "hosts.json"}, "17 ranks were started; a group has 16 at most"),
        ({}, "Start the server first: `phalanx serve --attach"),
    ],
)
def test_ranks_that_cannot_serve_say_why(group_model, tmp_path, variables, said):
    (tmp_path / "hosts.json").write_text(ring_hostfile([f"127.0.0.1:{port}" for port in range(50000, 50017)]))
    command = [*PHALANX, "rank", str(group_model), "--socket", str(tmp_path / "nobody.sock")]
    found = subprocess.run(
        command, env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
    )
    assert found.returncode == ExitCode.CONFIG
    assert said in found.stderr.replace("\n", " ")


@pytest.mark.full
def test_the_selftest_command(group_model):
    command = [*PHALANX, "selftest", str(group_model), "--tp", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    test = answer["info"]["self_test"]
    assert (test["total"], test["expected"]) == (3.0, 3.0)
    assert test["tokens"] == 8 and test["reductions"] == 6 and test["unchecked"] == 0
    assert [figure["bytes"] for figure in test["all_reduce"]] == [4, 4096, 65536, 1 << 20]
    assert all(figure["median_us"] > 0 for figure in test["all_reduce"])
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert all(rank["active_bytes"] > 0 for rank in answer["ranks"])


def test_the_selftest_command_fails_with_the_reason(group_model):
    command = [*PHALANX, "selftest", str(group_model), "--tp", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 64
    assert "3" in done.stderr and "--tp 1, 2 or 4." in done.stderr
