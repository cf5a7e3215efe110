"""What a rank's process gets from the process that starts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from phalanx.config import EngineConfig
from phalanx.dist.collective_backend import ChosenBackend
from phalanx.errors import ConfigError
from phalanx.supervision import rank_launcher
from phalanx.supervision.rank_launcher import RankProcesses, pid_file, spawn, start_ranks, write_pid_file


def test_a_child_gets_no_keys_and_no_settings_of_others(monkeypatch: pytest.MonkeyPatch):
    for name in ("PHALANX_API_KEY", "PHALANX_GROUP_SECRET", "PHALANX_OF_TOMORROW", "PHALANX_MEMORY_GUARD_GB"):
        monkeypatch.setenv(name, "from the server")
    monkeypatch.setenv("HF_HOME", "as it is")

    async def main() -> dict[str, str]:
        tell = "import json, os, sys; json.dump(dict(os.environ), sys.stderr)"
        child = await spawn([sys.executable, "-c", tell], {"PHALANX_CPU_KERNELS": "0"})
        assert child.stderr is not None
        return json.loads(await child.stderr.read())

    found = asyncio.run(main())
    kept = {name: value for name, value in found.items() if name.startswith("PHALANX_")}
    assert kept == {"PHALANX_CPU_KERNELS": "0", "PHALANX_MEMORY_GUARD_GB": "from the server"}
    assert found["HF_HOME"] == "as it is" and "PATH" in found


def test_each_rank_of_a_machine_sees_one_of_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started: list[dict[str, str]] = []

    async def note(command: Sequence[str], variables: dict[str, str]) -> None:
        started.append(variables)

    monkeypatch.setattr(rank_launcher, "spawn", note)
    monkeypatch.setattr(rank_launcher, "usable_gpus", lambda: ("GPU-a", "GPU-b"))
    config = EngineConfig(model="demo", tensor_parallel_size=2, backend="nccl")
    asyncio.run(start_ranks(config, ChosenBackend("nccl", ""), tmp_path / "engine.sock"))
    assert [one["CUDA_VISIBLE_DEVICES"] for one in started] == ["GPU-a", "GPU-b"]
    assert [one["MLX_RANK"] for one in started] == ["0", "1"] and "NCCL_HOST_IP" in started[0]


@pytest.mark.parametrize("backend", [None, "ring", "mpi"])
def test_every_process_of_a_group_has_the_groups_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: Literal["ring", "mpi"] | None
):
    """Not the system's, from which MLX would load compiled code that another user left there."""
    started: list[dict[str, str]] = []

    async def note(command: Sequence[str], variables: dict[str, str]) -> None:
        started.append(variables)

    monkeypatch.setenv("TMPDIR", "/var/tmp")
    monkeypatch.setattr(rank_launcher, "spawn", note)
    monkeypatch.setattr(rank_launcher, "mpirun_command", lambda *_: ["mpirun"])
    config = EngineConfig(model="demo", tensor_parallel_size=1 if backend is None else 2)
    choice = None if backend is None else ChosenBackend(backend, "")
    asyncio.run(start_ranks(config, choice, tmp_path / "engine.sock"))
    assert [one["TMPDIR"] for one in started] == [str(tmp_path)] * (2 if backend == "ring" else 1)


def test_a_rank_follows_no_link_to_leave_its_process_id(tmp_path: Path):
    """A server's socket may lie where others may write, such as /tmp."""
    mine, path = tmp_path / "mine", tmp_path / "engine.sock"
    mine.write_text("precious")
    pid_file(path, 0).symlink_to(mine)
    write_pid_file(path, 0)
    assert mine.read_text() == "precious"
    assert pid_file(path, 0).read_text() == str(os.getpid())
    assert stat.S_IMODE(pid_file(path, 0).lstat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=r"rank0\.pid cannot be written"):
        write_pid_file(tmp_path / "missing" / "engine.sock", 0)


def test_another_program_with_the_id_of_a_dead_rank_is_no_rank(tmp_path: Path):
    """The system gives ids again: what runs under a dead rank's must not be signalled."""
    path = tmp_path / "engine.sock"
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            pid_file(path, 0).write_text(str(other.pid))
            ranks = RankProcesses({}, [pid_file(path, 0)])
            assert ranks.rank_pids() == {}
            ranks.signal_all(signal.SIGKILL)
            assert other.poll() is None
        finally:
            other.kill()
