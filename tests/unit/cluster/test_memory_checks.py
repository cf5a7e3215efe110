"""What the doctor says of one host's memory, with stand-ins for the system's tools and for MLX's answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.cluster import machine, memory_checks
from phalanx.cluster.check_results import CheckResult, ExamineRequest, HostFacts, ModelFacts
from phalanx.cluster.supervisor import RunDirectory
from phalanx.config import HostConfig
from phalanx.dist.topology import LayerCost, Parts
from phalanx.errors import ClusterError
from phalanx.memory import GB, MachineMemory, read_machine

ASKED = ExamineRequest(host=HostConfig(name="a", address="10.0.0.1"), rank=0)
MAC = MachineMemory(107 * GB, 107 * GB, "metal", outside=21 * GB)
GPU = MachineMemory(24 * GB, 23 * GB, "cuda", device="GPU-1")


def facts(system: str, shard_gb: int | None = None) -> HostFacts:
    model = None if shard_gb is None else ModelFacts(path="/m", bytes=shard_gb * GB, digest="d")
    return HostFacts(host="a", system=system, clock=0.0, versions={}, model=model)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The results of the check, on a host whose ranks have this memory."""

    def run(
        found: MachineMemory, about: HostFacts, asked: ExamineRequest = ASKED, wired_mb: str = "0\n"
    ) -> list[CheckResult]:
        said = {"iogpu.wired_limit_mb": wired_mb, "phalanx.model.device_memory": msgspec.json.encode(found).decode()}
        monkeypatch.setattr(machine, "tool", lambda *command: said[command[-1]])
        return list(memory_checks.memory(asked, about, RunDirectory(tmp_path)))

    return run


def test_a_mac_explains_both_limits(checked: Any) -> None:
    (limit,) = checked(MAC, facts("macOS"))
    assert (limit.check, limit.level) == ("GPU memory", "ok")
    assert limit.seen.startswith("the GPU may use 107.0 of 128 GiB (macOS's own choice); weights and caches are wired")
    assert "`sudo sysctl iogpu.wired_limit_mb=117964`" in limit.remedy
    assert "--no-wired-limit" in limit.remedy and "prepare count underflow" in limit.remedy


def test_a_limit_as_high_as_it_should_be_is_not_to_be_raised(checked: Any) -> None:
    most = MachineMemory(117964 << 20, 117964 << 20, "metal", outside=128 * GB - (117964 << 20))
    (limit,) = checked(most, facts("macOS"), wired_mb="117964\n")
    assert limit.level == "ok" and "(iogpu.wired_limit_mb=117964)" in limit.seen and "sysctl" not in limit.remedy


def test_a_limit_that_leaves_macos_too_little_is_a_warning(checked: Any) -> None:
    (limit,) = checked(MachineMemory(126 * GB, 126 * GB, "metal", outside=2 * GB), facts("macOS"), wired_mb="129024\n")
    assert limit.level == "warning" and "iogpu.wired_limit_mb=129024" in limit.seen
    assert limit.wanted == "at most 117964 MiB" and "iogpu.wired_limit_mb=117964" in limit.remedy


def test_a_shard_is_compared_with_what_the_gpu_may_use(checked: Any) -> None:
    _, fits = checked(MAC, facts("macOS", shard_gb=102))
    assert fits.level == "ok" and fits.seen == "107.0 GiB available to the GPU for a shard of 102.00 GiB"
    _, short = checked(MAC, facts("macOS", shard_gb=110))
    assert short.level == "bad" and "iogpu.wired_limit_mb=117964`), or use more hosts" in short.remedy
    (gpu,) = checked(GPU, facts("Linux", shard_gb=22))
    assert gpu.level == "bad" and "; 2.4 GiB of it must stay free" in gpu.seen and "nvidia-smi" in gpu.remedy
    shared = msgspec.structs.replace(ASKED, peers=(HostConfig(name="b", address="10.0.0.2"),))
    assert checked(GPU, facts("Linux", shard_gb=22), shared)[0].level == "ok"


def test_what_a_host_has_for_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is enough is seen from all hosts together; the first one knows what the model's layers need."""
    asked, run_dir = msgspec.structs.replace(ASKED, staged=True, guard_gb=3.0), RunDirectory(tmp_path)
    about, parts = facts("Linux", shard_gb=900), Parts(LayerCost(1), (LayerCost(2),), LayerCost(3))
    monkeypatch.setattr(machine, "rank_memory", lambda: GPU)
    monkeypatch.setattr(machine, "stage_parts", lambda path: parts)
    known = memory_checks.with_room(asked, about, run_dir)
    assert (known.room, known.parts) == (20 * GB, parts) and list(memory_checks.memory(asked, known, run_dir)) == []
    assert memory_checks.with_room(msgspec.structs.replace(asked, rank=1), about, run_dir).parts is None
    assert memory_checks.with_room(ASKED, about, run_dir) == about


def test_why_a_model_has_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"stdout": "", "stderr": "a warning\nm cannot be cut.\n"}
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, **said))
    with pytest.raises(ClusterError, match=r"^m cannot be cut\.$"):
        machine.stage_parts("/m")


def test_a_guard_that_is_no_number_is_named(checked: Any) -> None:
    (bad,) = checked(GPU, facts("Linux", shard_gb=1), msgspec.structs.replace(ASKED, guard_gb=-1.0))
    assert bad.level == "bad" and "--memory-guard-gb" in bad.seen


def test_without_a_model_only_a_mac_is_asked(checked: Any) -> None:
    assert checked(GPU, facts("Linux")) == []
    assert checked(read_machine(), facts("macOS")) == []  # MLX on its CPU


def test_without_mlx_the_hosts_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "tool", lambda *_: "")
    assert machine.rank_memory().total == read_machine().total
    assert machine.rank_memory().kind == "host" and machine.wired_limit_mb() == 0


def test_mlx_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=msgspec.json.encode(GPU).decode(), stderr="")

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine.rank_memory() == GPU
    assert commands == [(sys.executable, "-P", "-m", "phalanx.model.device_memory")]
