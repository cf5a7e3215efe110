"""Starts the processes of a group on this machine, and finds and ends those that are left.

A group is one process per rank, or one `mpirun` that starts the ranks. Every start gets new ports, a new nonce and a
new secret. Does not know why a group ended or whether it starts again (`process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from phalanx.config import KERNELS_VARIABLE, SECRET_VARIABLE, EngineConfig, GroupConfig, environment
from phalanx.dist.backend import ChosenBackend, environment_of, mpirun_command, ring_hostfile
from phalanx.dist.ports import LOOPBACK, free_ports


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


NONCE_BITS = 48
POLL_S = 0.05  # between two looks at processes that are ending


@dataclass(frozen=True)
class End:
    """How the first process of a group ended. `status` is negative for a signal, as in `subprocess`."""

    name: str
    status: int


class RankProcesses:
    """The processes of one start.

    Args:
        processes: name -> process; the names are "rank 0", "rank 1", ..., or "mpirun" alone.
        pid_files: rank -> the file in which the rank leaves its process id.
    """

    def __init__(self, processes: dict[str, Child], pid_files: Sequence[Path]) -> None:
        self.processes = processes
        self._pid_files = pid_files
        self.killed = False
        """Whether a process had to be ended by SIGKILL."""

    @property
    def leader_pid(self) -> int | None:
        """The process id of rank 0, once it is known."""
        if (process := self.processes.get("rank 0")) is not None:
            return process.pid if process.returncode is None else None
        return next(iter(self.rank_pids().values()), None)

    def rank_pids(self) -> dict[int, int]:
        """rank -> process id of the ranks of this machine that run."""
        found = {}
        for rank, file in enumerate(self._pid_files):
            with contextlib.suppress(OSError, ValueError):
                pid = int(file.read_text())
                if _is_rank(pid):
                    found[rank] = pid
        return found

    async def first_end(self) -> End:
        """Wait until one of the processes has ended."""
        waits = {asyncio.create_task(process.wait()): name for name, process in self.processes.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
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


async def start_ranks(config: EngineConfig, choice: ChosenBackend | None, socket_path: Path) -> RankProcesses:
    """Start all ranks of a group.

    Args:
        choice: None for a single rank, which needs no backend.
        socket_path: on which the server process waits for rank 0.

    Raises:
        OSError: a process cannot be started.
    """
    base = [sys.executable, "-m", "phalanx", "rank", config.model, "--socket", str(socket_path)]
    base += ["--config", msgspec.json.encode(config).decode()]
    size = config.tensor_parallel_size
    pid_files = [pid_file(socket_path, rank) for rank in range(size)]
    kernels = {} if config.cpu_kernels else {KERNELS_VARIABLE: "0"}
    if choice is None:
        return RankProcesses({"rank 0": await spawn([*base, "--rank", "0"], kernels)}, pid_files)
    ports = free_ports(1 + {"ring": size, "nccl": 1}.get(choice.backend, 0))
    group = GroupConfig(
        size=size,
        backend=choice.backend,
        nonce=secrets.randbits(NONCE_BITS),
        control=f"{LOOPBACK}:{ports[0]}",
        addresses=tuple(f"{LOOPBACK}:{port}" for port in ports[1:]) if choice.backend == "ring" else (),
        ranks_here=size,
    )
    base += ["--group", msgspec.json.encode(group).decode()]
    secret = {**kernels, SECRET_VARIABLE: secrets.token_hex(32)}
    if choice.backend == "mpi":
        variables = {**secret, **environment_of("mpi", None, None)}
        command = mpirun_command(size, config.collective, base)
        return RankProcesses({"mpirun": await spawn(command, variables)}, pid_files)
    hostfile = socket_path.with_suffix(".hosts.json")
    hostfile.write_text(ring_hostfile(group.addresses))
    processes: dict[str, Child] = {}
    for rank in range(size):
        meeting = f"{LOOPBACK}:{ports[-1]}"
        variables = {**secret, **environment_of(choice.backend, rank, hostfile, size=size, meeting=meeting)}
        processes[f"rank {rank}"] = await spawn([*base, "--rank", str(rank)], variables)
    return RankProcesses(processes, pid_files)


async def spawn(command: Sequence[str], variables: dict[str, str]) -> asyncio.subprocess.Process:
    """Start a child process with a pipe for its stderr, in this process's environment plus `variables`."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**environment(), **variables},
        process_group=0,  # Ctrl-C is for the server, which drains and then ends the ranks
    )


def pid_file(socket_path: Path, rank: int) -> Path:
    """The file in which a rank writes its process id, because mpirun and job schedulers do not report it."""
    return socket_path.with_name(f"{socket_path.name}.rank{rank}.pid")


def _is_rank(pid: int) -> bool:
    """Whether this process runs phalanx: the system may have given a dead rank's id to another program."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "phalanx" in process.cmdline()
    except psutil.Error:
        return False
