"""Choosing a backend, and reading other launchers' variables (F1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.config import EngineConfig
from phalanx.dist import collective_backend, gpus
from phalanx.errors import ConfigError


@pytest.fixture
def bare(monkeypatch):
    """A Linux machine on which nothing is installed."""
    monkeypatch.setattr(collective_backend, "find_mpi", lambda: None)
    monkeypatch.setattr(collective_backend, "rdma_devices", list)
    monkeypatch.setattr(collective_backend.shutil, "which", lambda name: None)
    monkeypatch.setattr(collective_backend.sys, "platform", "linux")
    return monkeypatch


def test_auto_takes_the_ring_without_other_backends_and_gives_the_reason(bare):
    assert collective_backend.choose("auto", machines=1) == ("ring", "no MPI library is there")
    assert collective_backend.choose("auto", machines=2) == ("ring", "no MPI library is there, nor an RDMA device")


def test_auto_takes_mpi_on_linux_when_it_is_installed(bare):
    bare.setattr(collective_backend, "find_mpi", lambda: collective_backend.Mpi("/x/mpirun", "/x/libmpi.so.40"))
    bare.setattr(collective_backend, "is_private_network_possible", lambda: True)
    choice = collective_backend.choose("auto", machines=1)
    assert choice.backend == "mpi"
    assert "/x/mpirun" in choice.reason


def test_auto_opens_no_daemon_to_strangers(bare):
    """In a container that allows no namespaces, Open MPI's daemon would listen on all addresses, and obey."""
    bare.setattr(collective_backend, "find_mpi", lambda: collective_backend.Mpi("/x/mpirun", "/x/libmpi.so.40"))
    bare.setattr(collective_backend, "is_private_network_possible", lambda: False)
    assert collective_backend.choose("auto", machines=1).backend == "ring"
    assert "no private network" in collective_backend.choose("auto", machines=1).reason
    assert collective_backend.choose("mpi", machines=1).backend == "mpi", (
        "who asks for it gets it, and a line in the log"
    )


def test_auto_prefers_rdma_between_machines(bare):
    bare.setattr(collective_backend, "rdma_devices", lambda: ["rdma_en5"])
    assert collective_backend.choose("auto", machines=2).backend == "jaccl"


def test_rdma_joins_no_ranks_of_one_machine(bare):
    bare.setattr(collective_backend, "rdma_devices", lambda: ["rdma_en5"])
    assert collective_backend.choose("auto", machines=1).backend == "ring"
    with pytest.raises(ConfigError, match="--backend jaccl joins machines over RDMA; here all ranks are on one"):
        collective_backend.choose("jaccl", machines=1)


@pytest.mark.parametrize("machines", [1, 2])
def test_auto_takes_nccl_where_every_rank_has_a_gpu(bare, machines):
    bare.setattr(collective_backend, "find_mpi", lambda: collective_backend.Mpi("/x/mpirun", "/x/libmpi.so.40"))
    assert collective_backend.choose("auto", machines=machines, gpu_shortage="").backend == "nccl"
    assert collective_backend.choose("auto", "ring", machines=machines, gpu_shortage="").backend != "nccl", (
        "it has no such choice"
    )
    assert collective_backend.choose("ring", machines=machines, gpu_shortage="").backend == "ring"


def test_nccl_without_a_gpu_for_every_rank_is_refused(bare):
    with pytest.raises(ConfigError, match=r"--backend nccl: .* shortage: 4 ranks, but 2 GPUs that MLX can use"):
        collective_backend.choose("nccl", machines=1, gpu_shortage=gpus.shortage(4, {"this machine": 2}))


@pytest.mark.parametrize(
    ("ranks", "known", "said"),
    [
        (2, {"here": 2}, ""),
        (2, {"here": 8}, ""),
        (2, {"here": 1}, "2 ranks, but 1 GPU that MLX can use"),
        (2, {"here": 0}, "2 ranks, but 0 GPUs that MLX can use"),
        (2, {"a": 1, "b": 1}, ""),
        (3, {"a": 8, "b": 0, "c": 0}, "no GPU that MLX can use is known on b, c"),
    ],
)
def test_a_shortage_of_gpus_is_put_in_words(ranks, known, said):
    assert gpus.shortage(ranks, known) == said


A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (None, (A, B, C)),
        ("2,0", (C, A)),
        ("GPU-b", (B,)),
        ("1,7,0", (B,)),  # as CUDA reads it: what is wrong ends the list
        ("-1", ()),
        ("", ()),
    ],
)
def test_the_users_own_choice_of_gpus_counts(given, left):
    assert gpus.allowed([A, B, C], given) == left


def test_each_rank_sees_one_gpu():
    assert [gpus.gpu_variables(rank, (A, B)) for rank in range(3)] == [{gpus.VARIABLE: name} for name in (A, B, A)]
    assert gpus.gpu_variables(1, (A,)) == gpus.gpu_variables(1, ()) == {}


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """A machine with two GPUs, made of a stand-in for nvidia-smi; and the packages of MLX that are installed."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=uuid ] && printf "{A}\\n{B}\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    packages = {"mlx-cuda-12"}
    monkeypatch.setattr(gpus, "_installed", packages.__contains__)
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    gpus.usable_gpus.cache_clear()
    yield packages
    gpus.usable_gpus.cache_clear()


def test_gpus_are_found_where_mlx_is_built_for_them(nvidia):
    assert gpus.usable_gpus() == (A, B)


def test_an_mlx_for_processors_uses_no_gpu(nvidia):
    nvidia.clear()
    assert gpus.usable_gpus() == ()


def test_mpirun_shares_out_the_gpus(monkeypatch):
    monkeypatch.setattr(collective_backend, "find_mpi", lambda: collective_backend.Mpi("mpirun", "libmpi.so"))
    found = collective_backend.mpirun_command(3, "auto", ["p", "rank"], (A, B))
    ranks = [["-np", "1", "-x", f"{gpus.VARIABLE}={name}", "p", "rank"] for name in (A, B, A)]
    assert found[found.index("-np") :] == [*ranks[0], ":", *ranks[1], ":", *ranks[2]]
    assert collective_backend.mpirun_command(3, "auto", ["p"], (A,))[-3:] == ["-np", "3", "p"]


@pytest.mark.parametrize("asked", ["mpi", "jaccl", "jaccl-ring", "nccl"])
def test_a_backend_that_was_asked_for_and_is_not_there_is_an_error(bare, asked):
    with pytest.raises(ConfigError, match=f"--backend {asked}:"):
        collective_backend.choose(asked, machines=2)


def test_an_algorithm_needs_the_backend_that_has_a_choice(bare):
    with pytest.raises(ConfigError, match="--collective star needs --backend mpi"):
        collective_backend.choose("ring", "star", machines=1)


def test_mpirun_gets_the_algorithm(monkeypatch):
    monkeypatch.setattr(collective_backend, "find_mpi", lambda: collective_backend.Mpi("mpirun", "libmpi.so"))
    command = collective_backend.mpirun_command(4, "ring", ["python", "x.py"])
    assert "mpirun" in command
    assert command[-2:] == ["python", "x.py"]
    assert command[command.index("coll_tuned_allreduce_algorithm") + 1] == "4"
    assert "coll_tuned_allreduce_algorithm" not in collective_backend.mpirun_command(4, "auto", ["x"])


def test_mpirun_gives_every_host_its_own_command(monkeypatch):
    monkeypatch.setattr(collective_backend, "find_mpi", lambda: collective_backend.Mpi("mpirun", "libmpi.so"))
    commands = [["p0", "rank", "--rank", "0"], ["p1", "rank", "--rank", "1"]]
    agent = "python -m phalanx reach c.json"
    found = collective_backend.mpirun_on_hosts(["a", "b"], "star", commands, {"SECRET": "x"}, agent)
    assert found[found.index("plm_ssh_agent") + 1] == agent
    assert found[found.index("coll_tuned_allreduce_algorithm") + 1] == "1"
    first = found.index("-np")
    assert found[first:] == [
        *("-np", "1", "--host", "a:1", "-x", "SECRET", *commands[0], ":"),
        *("-np", "1", "--host", "b:1", "-x", "SECRET", *commands[1]),
    ]
    assert "x" not in found, "values stay in the environment"


def test_rdma_is_not_chosen_for_machines_without_known_cables(monkeypatch):
    monkeypatch.setattr(collective_backend, "rdma_devices", lambda: ["rdma_en5"])
    monkeypatch.setattr(collective_backend, "find_mpi", lambda: None)
    assert collective_backend.choose("auto", machines=2).backend == "jaccl"
    assert collective_backend.choose("auto", machines=2, cabled=False).backend == "ring"


def test_mpirun_is_recognised():
    found = collective_backend.foreign_launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert found == (1, 4, "mpi")


def test_the_ring_of_mlx_launch_is_recognised(tmp_path):
    file = tmp_path / "hosts.json"
    file.write_text(collective_backend.ring_hostfile(["127.0.0.1:1", "127.0.0.1:2"]))
    assert json.loads(file.read_text()) == [["127.0.0.1:1"], ["127.0.0.1:2"]]
    assert collective_backend.foreign_launcher({"MLX_RANK": "1", "MLX_HOSTFILE": str(file)}) == (1, 2, "ring")


def test_jaccl_of_mlx_launch_is_recognised(tmp_path):
    file = tmp_path / "devices.json"
    file.write_text('[[null, "rdma_en5"], ["rdma_en5", null]]')
    variables = {"MLX_RANK": "0", "MLX_IBV_DEVICES": str(file)}
    assert collective_backend.foreign_launcher(variables) == (0, 2, "jaccl")
    assert collective_backend.foreign_launcher({**variables, "MLX_JACCL_RING": "0"}) == (0, 2, "jaccl-ring")


def test_no_launcher_is_none():
    assert collective_backend.foreign_launcher({}) is None


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"MLX_RANK": "abc"}, "MLX_RANK='abc' is not a number"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE='' is not a number"),
        ({"MLX_RANK": "0"}, "neither MLX_HOSTFILE"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "/nowhere/x.json"}, "MLX_HOSTFILE: /nowhere/x.json cannot be read"),
    ],
)
def test_damaged_variables_are_named(variables, named):
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        collective_backend.foreign_launcher(variables)


def test_the_device_file_must_be_an_array(tmp_path):
    file = tmp_path / "devices.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="does not hold a JSON array"):
        collective_backend.foreign_launcher({"MLX_RANK": "0", "MLX_IBV_DEVICES": str(file)})


def test_the_environment_of_a_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(collective_backend, "find_mpi", lambda: collective_backend.Mpi("mpirun", "libmpi.so"))
    assert collective_backend.environment_of("ring", 1, tmp_path) == {"MLX_RANK": "1", "MLX_HOSTFILE": str(tmp_path)}
    monkeypatch.setattr(collective_backend, "environment", dict)
    assert collective_backend.environment_of("mpi", None, None) == {
        "MLX_MPI_LIBNAME": "libmpi.so",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    }
    monkeypatch.setattr(collective_backend, "environment", lambda: {"OMPI_MCA_btl": "self,tcp"})
    assert collective_backend.environment_of("mpi", None, None)["OMPI_MCA_btl"] == "self,tcp"
    assert collective_backend.environment_of("nccl", 0, None, size=2, meeting="10.0.0.1:5000") == {
        "MLX_RANK": "0",
        "MLX_WORLD_SIZE": "2",
        "NCCL_HOST_IP": "10.0.0.1",
        "NCCL_PORT": "5000",
    }


def test_the_default_group_is_one_rank():
    assert EngineConfig(model="demo").tensor_parallel_size == 1


def test_ranks_and_mpirun_leave_their_files_in_a_directory_of_their_own(tmp_path, monkeypatch):
    """Open MPI loads code from ~/.openmpi: without a home, that is not a directory where others may write, as /tmp."""
    mine = {"TMPDIR": str(tmp_path), "HOME": str(Path.home())}
    assert collective_backend.file_variables(tmp_path) == mine
    memory = {"OMPI_MCA_btl_sm_backing_directory": "/dev/shm/mine"}
    assert collective_backend.file_variables(tmp_path, Path("/dev/shm/mine")) == mine | memory
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", "/dev/hugepages")
    wanted = "/dev/hugepages"
    assert collective_backend.file_variables(tmp_path, tmp_path)["OMPI_MCA_btl_sm_backing_directory"] == wanted

    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert collective_backend.file_variables(tmp_path) == {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
