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
from phalanx.rank_variables import check_variable, read_variable
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
    for variables in (rank(RunRank([]), tmp_path).variables, daemon(RunDaemon([])).variables, child_environment()):
        assert not {"a key", "a secret"} & set(variables.values())


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


def test_the_daemon_is_of_this_hosts_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find_mpi", lambda: Mpi("/own/bin/mpirun", "/own/lib/libmpi.so"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site")
    command, variables = daemon(RunDaemon(ARGUMENTS))
    assert command == ["/own/bin/prted", *ARGUMENTS]
    assert variables["PRTE_PREFIX"] == variables["PMIX_PREFIX"] == "/own"
    assert variables["LD_LIBRARY_PATH"] == "/own/lib:/site"
    monkeypatch.setattr(programs, "find_mpi", lambda: None)
    with pytest.raises(ConfigError, match="no Open MPI"):
        daemon(RunDaemon([]))


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


# variables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    ["LD_PRELOAD=/x.so", "DYLD_INSERT_LIBRARIES=/x", "PYTHONPATH=/x", "PYTHONSTARTUP=/x", "PATH=/x", "HOME=/x",
     "PHALANX_API_KEY=x", "PHALANX_GROUP_SECRET=x", "BASH_ENV=/x", "GLIBC_TUNABLES=x", "XDG_RUNTIME_DIR=/x",
     "MLX_MPI_LIBNAME=/x.so", "OMPI_MCA_mca_base_component_path=/x", "PRTE_MCA_plm_ssh_agent=/x",
     "OMPI_MCA_mca_base_param_files=/x", "OPAL_PKGLIBDIR=/x", "PMIX_LIBDIR=/x", "UCX_MODULE_DIR=/x",
     "FI_PROVIDER_PATH=/x", "OMP_TOOL_LIBRARIES=/x.so", "NCCL_NET_PLUGIN=/x.so", "NCCL_CONF_FILE=/x",
     "OPENSSL_CONF=/x"],
)  # fmt: skip
def test_variables_that_choose_code_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=rf"hosts\.json: {entry.partition('=')[0]} may not be set for ranks"):
        read_variable(entry, "hosts.json")


@pytest.mark.parametrize("entry", ["A", "=x", "A B=x", "A\n=x", "Ä=x", "", "1A=x", "A\0=x"])
def test_names_of_variables(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^--env: .*(has no value|is not the name of a variable)"):
        read_variable(entry, "--env")


@pytest.mark.parametrize("value", ["x\ny", "x\0", "x\ry", "\x1b[2J"])
def test_values_are_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match="--env: the value of A has a line break"):
        check_variable("A", value, "--env")


@pytest.mark.parametrize(
    "entry", ["MLX_METAL_FAST_SYNCH=1", "OMP_NUM_THREADS=4", "OMPI_MCA_btl_tcp_if_include=en0", "NCCL_DEBUG=", "A=b=c"]
)
def test_other_variables_may_be_set(entry: str) -> None:
    name, value = read_variable(entry, "x")
    assert f"{name}={value}" == entry
