"""What an agent runs, with which variables and files, and what it refuses to run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from phalanx.dist.collective_backend import Mpi
from phalanx.environment import child_environment
from phalanx.errors import ConfigError
from phalanx.supervision import programs
from phalanx.supervision.agent_protocol import RunDaemon, RunRank, ToAgent
from phalanx.supervision.programs import daemon, daemon_arguments, rank

ARGUMENTS = [
    "--leave-session-attached",
    "--prtemca",
    "ess",
    "env",
    "--prtemca",
    "uri",
    "prte@0.0;tcp://10.0.0.1:5:64,24",
]
DAEMON = '/o/bin/prted --leave-session-attached --prtemca ess "env" --prtemca uri "prte@0.0;tcp://10.0.0.1:5:64,24"'
PATHS = "PRTE_PREFIX=/o;export PRTE_PREFIX;LD_LIBRARY_PATH=/o/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;"


def test_a_rank_is_this_agents_own_phalanx(tmp_path: Path) -> None:
    command, variables = rank(RunRank(["demo", "--rank", "1"], {"MLX_RANK": "1"}, {"MLX_HOSTFILE": "[]"}), tmp_path)
    assert command == [sys.executable, "-P", "-m", "phalanx", "rank", "demo", "--rank", "1"]
    file = Path(variables["MLX_HOSTFILE"])
    assert file.parent == tmp_path and file.read_text() == "[]" and file.stat().st_mode & 0o077 == 0
    assert variables["MLX_RANK"] == "1" and variables["PATH"] == os.environ["PATH"]


def test_secrets_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_API_KEY", "a key")
    monkeypatch.setenv("PHALANX_GROUP_SECRET", "a secret")
    monkeypatch.setattr(programs, "find_mpi", lambda: Mpi("/o/bin/mpirun", "/o/lib/libmpi.so"))
    for variables in (
        rank(RunRank([]), tmp_path).variables,
        daemon(RunDaemon([]), tmp_path).variables,
        child_environment(),
    ):
        assert not {"a key", "a secret"} & set(variables.values())


def test_what_an_agent_runs_has_a_temporary_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the host's, where MLX would load compiled code that another user left, and Open MPI make its session."""
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    monkeypatch.setattr(programs, "find_mpi", lambda: Mpi("/o/bin/mpirun", "/o/lib/libmpi.so"))
    for variables in (rank(RunRank([]), tmp_path).variables, daemon(RunDaemon([]), tmp_path).variables):
        assert variables["TMPDIR"] == str(tmp_path)


def test_a_host_sets_for_its_rank_what_others_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that the refusal names: the variables of the host itself."""
    monkeypatch.setattr(programs, "find_mpi", lambda: Mpi("/o/bin/mpirun", "/o/lib/libmpi.so"))
    own = {"NCCL_NET_PLUGIN": "/site/plugin.so", "UCX_CONFIG_DIR": "/site", "CUDA_CACHE_PATH": "/site", "ANY": "x",
           "MLX_PTX_CACHE_DIR": "/site", "OMPI_MCA_plm_ssh_agent": "/site/agent"}  # fmt: skip
    for name, value in own.items():
        with pytest.raises(ConfigError, match=f"the server: {name} may not be set"):
            rank(RunRank([], {name: value}), tmp_path)
        monkeypatch.setenv(name, value)
    for variables in (rank(RunRank([]), tmp_path).variables, daemon(RunDaemon([]), tmp_path).variables):
        assert own.items() <= variables.items()


def test_the_server_says_which_rank_it_is(tmp_path: Path) -> None:
    told = dict.fromkeys(programs.OF_THE_SERVER, "1")
    assert told.items() <= rank(RunRank([], told), tmp_path).variables.items()


def test_a_link_where_a_file_belongs_is_not_followed(tmp_path: Path) -> None:
    """A rank can plant it: the directory is its own as well."""
    victim, own = tmp_path / "victim", tmp_path / "own"
    victim.write_text("mine")
    own.mkdir()
    (own / "MLX_HOSTFILE.json").symlink_to(victim)
    rank(RunRank([], {}, {"MLX_HOSTFILE": "[]"}), own)
    assert victim.read_text() == "mine" and (own / "MLX_HOSTFILE.json").read_text() == "[]"


@pytest.mark.parametrize("order", [{"type": "Run", "command": ["/bin/sh"]}, {"type": "RunShell", "arguments": []}])
def test_no_other_program_can_be_named(order: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=ToAgent)


def test_no_other_file_can_be_named() -> None:
    order = {"type": "RunRank", "arguments": [], "files": {"../../.bashrc": "x"}}
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=ToAgent)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PHALANX_API_KEY", "OMPI_MCA_plm_ssh_agent"])
def test_a_server_may_not_set_what_chooses_code(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the server: {name} may not be set"):
        rank(RunRank([], {name: "x"}), tmp_path)


def test_an_argument_with_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NUL"):
        rank(RunRank(["demo\0"]), tmp_path)


# Open MPI's daemon ------------------------------------------------------------------------------------------------


def test_the_daemon_is_of_this_hosts_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find_mpi", lambda: Mpi("/own/bin/mpirun", "/own/lib/libmpi.so"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site")
    command, variables = daemon(RunDaemon(ARGUMENTS), tmp_path)
    assert command == ["/own/bin/prted", *ARGUMENTS]
    assert variables["PRTE_PREFIX"] == variables["PMIX_PREFIX"] == "/own"
    assert variables["LD_LIBRARY_PATH"] == "/own/lib:/site"
    monkeypatch.setattr(programs, "find_mpi", lambda: None)
    with pytest.raises(ConfigError, match="no Open MPI"):
        daemon(RunDaemon([]), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(DAEMON, id="no prefix"),
        pytest.param(PATHS + DAEMON, id="bash and zsh"),
        pytest.param(f"( test ! -r ./.profile || . ./.profile; {PATHS}{DAEMON} )", id="sh and ksh"),
        pytest.param("setenv PRTE_PREFIX /o;if ( $?X == 1 ) set have;" + DAEMON, id="csh"),
        pytest.param("touch /tmp/pwned; $(id); " + DAEMON, id="what stands before runs nowhere"),
    ],
)
def test_mpiruns_command_line_is_read(line: str) -> None:
    assert daemon_arguments(line) == ARGUMENTS


def test_what_a_shell_would_expand_stays_text() -> None:
    assert daemon_arguments("prted $(id) `id` $HOME *") == ["$(id)", "`id`", "$HOME", "*"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rm -rf /", "'rm -rf /' instead of prted"),
        ("prted; rm -rf /", "'rm -rf /' instead of prted"),
        ("prted & rm", "'&' after prted"),
        ("prted | sh", "'|' after prted"),
        ("", "'' instead of prted"),
        ('prted "', "No closing quotation"),
    ],
)
def test_other_command_lines_are_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        daemon_arguments(line)
    assert said in refused.value.message
