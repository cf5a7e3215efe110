"""Choosing a backend, and reading other launchers' variables (F1)."""

from __future__ import annotations

import json

import pytest

from phalanx.config import EngineConfig
from phalanx.dist import backend
from phalanx.errors import ConfigError


@pytest.fixture
def bare(monkeypatch):
    """A Linux machine on which nothing is installed."""
    monkeypatch.setattr(backend, "find_mpi", lambda: None)
    monkeypatch.setattr(backend, "rdma_devices", list)
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    monkeypatch.setattr(backend.sys, "platform", "linux")
    return monkeypatch


def test_auto_takes_the_ring_without_other_backends_and_gives_the_reason(bare):
    assert backend.choose("auto", machines=1) == ("ring", "no MPI library is there")
    assert backend.choose("auto", machines=2) == ("ring", "no MPI library is there, nor an RDMA device")


def test_auto_takes_mpi_on_linux_when_it_is_installed(bare):
    bare.setattr(backend, "find_mpi", lambda: backend.Mpi("/x/mpirun", "/x/libmpi.so.40"))
    choice = backend.choose("auto", machines=1)
    assert choice.backend == "mpi"
    assert "/x/mpirun" in choice.reason


def test_auto_prefers_rdma_between_machines(bare):
    bare.setattr(backend, "rdma_devices", lambda: ["rdma_en5"])
    assert backend.choose("auto", machines=2).backend == "jaccl"


def test_rdma_joins_no_ranks_of_one_machine(bare):
    bare.setattr(backend, "rdma_devices", lambda: ["rdma_en5"])
    assert backend.choose("auto", machines=1).backend == "ring"
    with pytest.raises(ConfigError, match="--backend jaccl joins machines over RDMA; here all ranks are on one"):
        backend.choose("jaccl", machines=1)


@pytest.mark.parametrize("asked", ["mpi", "jaccl", "jaccl-ring", "nccl"])
def test_a_backend_that_was_asked_for_and_is_not_there_is_an_error(bare, asked):
    with pytest.raises(ConfigError, match=f"--backend {asked}:"):
        backend.choose(asked, machines=2)


def test_an_algorithm_needs_the_backend_that_has_a_choice(bare):
    with pytest.raises(ConfigError, match="--collective star needs --backend mpi"):
        backend.choose("ring", "star", machines=1)


def test_mpirun_gets_the_algorithm(monkeypatch):
    monkeypatch.setattr(backend, "find_mpi", lambda: backend.Mpi("mpirun", "libmpi.so"))
    command = backend.mpirun_command(4, "ring", ["python", "x.py"])
    assert command[0] == "mpirun"
    assert command[-2:] == ["python", "x.py"]
    assert command[command.index("coll_tuned_allreduce_algorithm") + 1] == "4"
    assert "coll_tuned_allreduce_algorithm" not in backend.mpirun_command(4, "auto", ["x"])


def test_mpirun_gives_every_host_its_own_command(monkeypatch):
    monkeypatch.setattr(backend, "find_mpi", lambda: backend.Mpi("mpirun", "libmpi.so"))
    commands = [["p0", "rank", "--rank", "0"], ["p1", "rank", "--rank", "1"]]
    found = backend.mpirun_on_hosts(["a", "b"], "star", commands, {"SECRET": "x"}, "python -m phalanx reach c.json")
    assert found[found.index("plm_ssh_agent") + 1] == "python -m phalanx reach c.json"
    assert found[found.index("coll_tuned_allreduce_algorithm") + 1] == "1"
    first = found.index("-np")
    assert found[first:] == [
        *("-np", "1", "--host", "a:1", "-x", "SECRET", *commands[0], ":"),
        *("-np", "1", "--host", "b:1", "-x", "SECRET", *commands[1]),
    ]
    assert "x" not in found, "values stay in the environment"


def test_rdma_is_not_chosen_for_machines_without_known_cables(monkeypatch):
    monkeypatch.setattr(backend, "rdma_devices", lambda: ["rdma_en5"])
    monkeypatch.setattr(backend, "find_mpi", lambda: None)
    assert backend.choose("auto", machines=2).backend == "jaccl"
    assert backend.choose("auto", machines=2, cabled=False).backend == "ring"


def test_mpirun_is_recognised():
    found = backend.foreign_launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert found == (1, 4, "mpi")


def test_the_ring_of_mlx_launch_is_recognised(tmp_path):
    file = tmp_path / "hosts.json"
    file.write_text(backend.ring_hostfile(["127.0.0.1:1", "127.0.0.1:2"]))
    assert json.loads(file.read_text()) == [["127.0.0.1:1"], ["127.0.0.1:2"]]
    assert backend.foreign_launcher({"MLX_RANK": "1", "MLX_HOSTFILE": str(file)}) == (1, 2, "ring")


def test_jaccl_of_mlx_launch_is_recognised(tmp_path):
    file = tmp_path / "devices.json"
    file.write_text('[[null, "rdma_en5"], ["rdma_en5", null]]')
    variables = {"MLX_RANK": "0", "MLX_IBV_DEVICES": str(file)}
    assert backend.foreign_launcher(variables) == (0, 2, "jaccl")
    assert backend.foreign_launcher({**variables, "MLX_JACCL_RING": "0"}) == (0, 2, "jaccl-ring")


def test_no_launcher_is_none():
    assert backend.foreign_launcher({}) is None


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
        backend.foreign_launcher(variables)


def test_the_device_file_must_be_an_array(tmp_path):
    file = tmp_path / "devices.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="does not hold a JSON array"):
        backend.foreign_launcher({"MLX_RANK": "0", "MLX_IBV_DEVICES": str(file)})


def test_the_environment_of_a_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "find_mpi", lambda: backend.Mpi("mpirun", "libmpi.so"))
    assert backend.environment_of("ring", 1, tmp_path) == {"MLX_RANK": "1", "MLX_HOSTFILE": str(tmp_path)}
    monkeypatch.setattr(backend, "environment", dict)
    assert backend.environment_of("mpi", None, None) == {
        "MLX_MPI_LIBNAME": "libmpi.so",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    }
    monkeypatch.setattr(backend, "environment", lambda: {"OMPI_MCA_btl": "self,tcp"})
    assert backend.environment_of("mpi", None, None)["OMPI_MCA_btl"] == "self,tcp"
    assert backend.environment_of("nccl", 0, None, size=2, meeting="10.0.0.1:5000") == {
        "MLX_RANK": "0",
        "MLX_WORLD_SIZE": "2",
        "NCCL_HOST_IP": "10.0.0.1",
        "NCCL_PORT": "5000",
    }


def test_the_default_group_is_one_rank():
    assert EngineConfig(model="demo").tensor_parallel_size == 1
