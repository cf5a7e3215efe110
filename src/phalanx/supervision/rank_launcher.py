"""Starts, finds and ends the processes of a group on this machine.

A group is one process per rank, or one `mpirun` that starts the ranks. Every start gets new ports, a new nonce and a
new socket for control connections. `process.py` decides whether to start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from phalanx.config import NONCE_BITS, RUN_PHALANX, EngineConfig, GroupConfig
from phalanx.dist.collective_backend import (
    ChosenBackend,
    environment_of,
    file_variables,
    mpirun_command,
    ring_hostfile,
)
from phalanx.dist.gpus import gpu_variables, usable_gpus
from phalanx.dist.ports import LOOPBACK, free_ports
from phalanx.dist.topology import Topology
from phalanx.environment import KERNELS_VARIABLE, child_environment
from phalanx.errors import ConfigError


class Child(Protocol):
    """A process of a group: `asyncio.subprocess.Process`, or `RemoteProcess` on another host (`remote.py`)."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stderr(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...


CONTROL_SUFFIX = ".ctl"  # of the control socket; no longer than ".sock", since such paths have at most 104 bytes
POLL_S = 0.05  # between checks of ending processes


@dataclass(frozen=True)
class End:
    """How the first process of a group ended. `status` is negative for a signal, as in `subprocess`."""

    name: str
    status: int


class RankProcesses:
    """The processes of one start.

    Args:
        processes: name -> process; the names are "rank 0", "rank 1", ..., or "mpirun", or "mpirun of stage 0", ...
        pid_files: rank -> the file in which the rank writes its process id.
    """

    def __init__(self, processes: dict[str, Child], pid_files: Sequence[Path]) -> None:
        self.processes = processes
        self._pid_files = pid_files
        self.numbers: dict[int, int] = {}
        """Process id -> rank, of this machine's ranks when the first process ended."""
        self.killed = False
        """Whether a process was sent SIGKILL."""

    @property
    def leader_pid(self) -> int | None:
        """The process id of rank 0, once it is known."""
        if (process := self.processes.get("rank 0")) is not None:
            return process.pid if process.returncode is None else None
        return self.rank_pids().get(0)

    def rank_pids(self) -> dict[int, int]:
        """rank -> process id of the ranks of this machine that run."""
        return {rank: pid for rank, pid in self._written_pids() if _is_rank(pid)}

    def _written_pids(self) -> Iterator[tuple[int, int]]:
        for rank, file in enumerate(self._pid_files):
            with contextlib.suppress(OSError, ValueError):
                yield rank, int(file.read_text())

    async def first_end(self) -> End:
        """Wait until one of the processes has ended."""
        waits = {asyncio.create_task(process.wait()): name for name, process in self.processes.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        self.numbers = {pid: rank for rank, pid in self._written_pids()}
        # A process that a signal ended is the cause; the others exited because they lost it.
        ends = [End(waits[task], task.result()) for task in done]
        return min(ends, key=lambda end: (end.status >= 0, end.name))

    def ended_by(self, number: signal.Signals) -> list[str]:
        """Names of the processes that a signal has ended (mpirun reports its rank's as 128 + n)."""
        statuses = (-number, 128 + number)
        return [name for name, process in self.processes.items() if process.returncode in statuses]

    async def all_ended(self, timeout_s: float) -> bool:
        """Wait until all processes have ended; False after `timeout_s` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(process.returncode is None for process in self.processes.values()) or self.rank_pids():
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process that runs, and to ranks that outlived their mpirun."""
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(number)
                self.killed = self.killed or number == signal.SIGKILL
        for pid in self.rank_pids().values():
            self.killed = self.killed or number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(number)

    def describe(self) -> str:
        """The processes that run, for a message."""
        left = [f"{name} (pid {p.pid})" for name, p in self.processes.items() if p.returncode is None]
        return ", ".join(left or [f"rank {rank} (pid {pid})" for rank, pid in self.rank_pids().items()])


async def start_ranks(
    config: EngineConfig, choice: ChosenBackend | None, socket_path: Path, *, shared_memory: Path | None = None
) -> RankProcesses:
    """Start all ranks of all stages.

    Args:
        choice: None if no stage has more than one rank and so needs a backend.
        socket_path: on which the server process waits for rank 0, in a private directory, which is also the ranks'
            temporary directory.
        shared_memory: directory for Open MPI's segments; None leaves the choice to it.

    Raises:
        OSError: a process cannot be started.
    """
    base = [sys.executable, *RUN_PHALANX, "rank", config.model, "--socket", str(socket_path)]
    base += ["--config", msgspec.json.encode(config).decode()]
    topology = Topology(config.widths)
    pid_files = [pid_file(socket_path, rank) for rank in range(topology.size)]
    common = file_variables(socket_path.parent, shared_memory) | ({} if config.cpu_kernels else {KERNELS_VARIABLE: "0"})
    if topology.size == 1:
        return RankProcesses({"rank 0": await spawn([*base, "--rank", "0"], common)}, pid_files)
    backend = None if choice is None else choice.backend
    ports = free_ports(topology.size if backend == "ring" else 0)
    group = GroupConfig(
        size=topology.size,
        widths=topology.widths,
        backend=backend,
        nonce=secrets.randbits(NONCE_BITS),
        control=str(socket_path.with_suffix(CONTROL_SUFFIX)),
        addresses=tuple(f"{LOOPBACK}:{port}" for port in ports),
        ranks_here=topology.size,
    )
    base += ["--group", msgspec.json.encode(group).decode()]
    processes: dict[str, Child] = {}
    for stage in range(topology.n_stages):
        ranks = topology.ranks(stage)
        if backend == "mpi" and len(ranks) > 1:
            own = {**common, **environment_of("mpi", None, None)}
            words = [*base, "--stage", str(stage)]
            name = "mpirun" if topology.n_stages == 1 else f"mpirun of stage {stage}"
            processes[name] = await spawn(mpirun_command(len(ranks), config.collective, words, _gpus(ranks)), own)
        else:
            processes |= await _start_each(base, group, ranks, socket_path.with_suffix(f".{stage}.json"), common)
    return RankProcesses(processes, pid_files)


async def _start_each(
    base: Sequence[str], group: GroupConfig, ranks: range, hostfile: Path, common: dict[str, str]
) -> dict[str, Child]:
    """Start the ranks of a stage, each as a process of this one, with the `common` variables and its own."""
    backend, meeting = group.backend, ""
    if backend == "ring":
        _write_hostfile(hostfile, [group.addresses[rank] for rank in ranks])
    elif backend == "nccl":
        meeting = f"{LOOPBACK}:{free_ports(1)[0]}"
    processes: dict[str, Child] = {}
    for tp_rank, rank in enumerate(ranks):
        variables = {**common, **gpu_variables(rank, usable_gpus())}
        if backend is not None and len(ranks) > 1:
            variables |= environment_of(backend, tp_rank, hostfile, size=len(ranks), meeting=meeting)
        processes[f"rank {rank}"] = await spawn([*base, "--rank", str(rank)], variables)
    return processes


def _write_hostfile(file: Path, addresses: Sequence[str]) -> None:
    file.write_text(ring_hostfile(addresses))


def _gpus(ranks: range) -> list[str]:
    """This machine's GPUs, beginning with the one of the first of these ranks."""
    gpus = list(usable_gpus())
    first = ranks.start % len(gpus) if gpus else 0
    return [*gpus[first:], *gpus[:first]]


async def spawn(command: Sequence[str], variables: dict[str, str]) -> asyncio.subprocess.Process:
    """Start a child process with a pipe for its stderr, in `child_environment` plus `variables`."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**child_environment(), **variables},
        process_group=0,  # Ctrl-C is for the server, which drains and then ends the ranks
    )


def pid_file(socket_path: Path, rank: int) -> Path:
    """The file in which a rank writes its process id, because mpirun and job schedulers do not report it."""
    return socket_path.with_name(f"{socket_path.name}.rank{rank}.pid")


def write_pid_file(socket_path: Path, rank: int) -> None:
    """Write this process's id beside the server's socket. Follows no link: other users may write there.

    Raises:
        ConfigError: the file cannot be written.
    """
    file = pid_file(socket_path, rank)
    try:
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(str(os.getpid()))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}.",
            remedy="The server's socket belongs in a directory of yours.",
        ) from error


def _is_rank(pid: int) -> bool:
    """Whether this process runs phalanx: the system may have given a dead rank's id to another program."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "phalanx" in process.cmdline()
    except psutil.Error:
        return False
