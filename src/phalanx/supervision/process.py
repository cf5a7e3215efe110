"""The engine as child processes that the server process starts, watches and restarts; an `EngineClient`.

The supervisor (design: Fail-stop, then resume) starts the ranks, forwards their logs and pings the leader every second.
It kills all ranks when the leader is silent for too long or one rank has ended, and starts them again unless a restart
cannot help. Does not know requests: the server's journal submits unfinished ones again. Runs on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from phalanx.config import ClusterConfig, EngineConfig, runtime_dir
from phalanx.dist.backend import ChosenBackend, choose
from phalanx.errors import ConfigError, EngineUnavailable, ExitCode, HostUnreachable
from phalanx.supervision.engine_connection import EngineConnection, Streams
from phalanx.supervision.hosts import start_on_hosts
from phalanx.supervision.launch import Child, End, RankProcesses, pid_file, start_ranks
from phalanx.types import Shutdown

log = logging.getLogger("phalanx.engine")

RESTARTS = 3  # crashes within `RESTART_WINDOW_S` that are restarted; after one more the engine has failed
RESTART_WINDOW_S = 300.0
EXIT_WAIT_S = 5.0  # between Shutdown and SIGTERM, and between SIGTERM and SIGKILL
GRACE_S = 3.0  # between one rank's end and SIGKILL for ranks that have not noticed it
HOST_RETRY_S = 1.0  # between attempts to reach a host
RDMA_COOL_DOWN_S = 30.0  # a JACCL device is busy for so long after a process that used it was killed (F7, EBUSY)
MPIRUN_NOTICE = re.compile(r"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+signal (\d+)")
STDERR_LINES = 20  # last lines of the ranks' logs, from which the reason of a crash is read


@dataclass(frozen=True)
class Launched:
    """Started rank processes, and the Unix socket to which their leader connects."""

    ranks: RankProcesses
    path: Path
    listener: asyncio.Server
    connected: asyncio.Future[Streams]


class EngineProcess(EngineConnection):
    """Runs one engine at a time, of one or more rank processes.

    Args:
        stall_s: seconds without an answer from the engine's loop after which it is killed and restarted.
        cluster: the hosts of the ranks, and the secret of their agents; None for this machine alone.
    """

    def __init__(
        self, config: EngineConfig, *, stall_s: float = 60.0, cluster: tuple[ClusterConfig, str] | None = None
    ) -> None:
        super().__init__(stall_s=stall_s)
        self._config = config
        self._cluster = cluster
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: RankProcesses | None = None
        self._launched: Launched | None = None  # by `launch`, until the supervisor takes it over
        self._choice: ChosenBackend | None = None
        self._generation = 0
        self._stall_reason = ""
        self._down_reason = "the engine is starting"
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_LINES)
        self._crashes: deque[float] = deque()
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The process id of the running leader."""
        return None if self._ranks is None else self._ranks.leader_pid

    @property
    def rank_pids(self) -> dict[int, int]:
        """rank -> process id of the running ranks."""
        return {} if self._ranks is None else self._ranks.rank_pids()

    async def launch(self) -> None:
        """Start the ranks, which load while the caller does other work. The ranks of a cluster wait for `start`.

        Raises:
            ConfigError: the configured backend is not available.
        """
        directory = self._prepare()
        if self._cluster is None:
            with contextlib.suppress(OSError):  # the supervisor tries again and reports it
                self._launched = await self._launch(directory)

    async def start(self) -> None:
        """Start the supervisor, and the ranks unless `launch` did. Returns at once; `state` tells the progress.

        Raises:
            ConfigError: the configured backend is not available.
        """
        self._supervisor = asyncio.create_task(self._supervise(self._prepare()), name="engine supervisor")

    def _prepare(self) -> Path:
        """Choose the backend and make the directory for sockets, once."""
        if self._directory is None:
            size = self._config.tensor_parallel_size
            if size > 1:
                hosts = () if self._cluster is None else self._cluster[0].hosts
                cabled = all(host.rdma for host in hosts)
                machines = max(1, len(hosts))
                self._choice = choose(self._config.backend, self._config.collective, machines=machines, cabled=cabled)
                log.info("%d ranks over %s: %s", size, *self._choice)
            self._directory = tempfile.TemporaryDirectory(prefix="phalanx-", dir=runtime_dir())
        return Path(self._directory.name)

    async def close(self) -> None:
        self._closing = True
        if self._launched is not None:
            self._launched.ranks.signal_all(signal.SIGTERM)  # there is no connection for `Shutdown` yet
            await self._clean_up(self._launched)
            self._launched = self._ranks = None
        if self._ranks is not None:
            with contextlib.suppress(EngineUnavailable):
                self._write(Shutdown())
            await self._end_processes(self._ranks)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        self._fail_pings("closed")
        self._state = replace(self._state, phase="stopped", reason="closed")

    # -- start and restart -----------------------------------------------------------------------------------------

    async def _supervise(self, directory: Path) -> None:
        """Run the engine, and run it again after every crash that a restart can mend."""
        while True:
            try:
                end = await self._run_once(directory)
            except HostUnreachable as error:  # not a crash: try until the host is back
                self._state = replace(self._state, reason=str(error))
                await asyncio.sleep(HOST_RETRY_S)
                continue
            except (OSError, ConfigError) as error:  # a program is missing or cannot be run
                self._report_down("failed", f"the ranks could not be started: {error}", ExitCode.CONFIG)
                return
            if self._closing:
                return
            reason = self._describe_end(end)
            now = time.monotonic()
            self._crashes.append(now)
            while self._crashes and now - self._crashes[0] > RESTART_WINDOW_S:
                self._crashes.popleft()
            exit_code = self._exit_code(end)
            if not exit_code.restart_helps or len(self._crashes) > RESTARTS:
                if exit_code.restart_helps:
                    reason = f"{len(self._crashes)} crashes in {RESTART_WINDOW_S:g} s, the last: {reason}"
                self._report_down("failed", reason, exit_code)
                return
            self._down_reason = reason
            self._report_down("restarting", reason, None)
            await asyncio.sleep(self._back_off())
            self._config = replace(self._config, inject=None)  # a fault is injected once

    def _back_off(self) -> float:
        """Seconds until the next start: 0.1, 0.4, 1.6, ... up to 10; longer after a killed JACCL process."""
        pause = float(min(10.0, 0.1 * 4 ** (len(self._crashes) - 1)))
        rdma = self._choice is not None and self._choice.backend.startswith("jaccl")
        killed = self._ranks is not None and (self._ranks.killed or bool(self._ranks.ended_by(signal.SIGKILL)))
        return max(pause, RDMA_COOL_DOWN_S) if rdma and killed else pause

    async def _run_once(self, directory: Path) -> End:
        """Start the ranks, serve the leader's connection until one has ended; no process is left afterwards."""
        launched, self._launched = self._launched or await self._launch(directory), None
        ranks = launched.ranks
        self._last_message_at = time.monotonic()
        self._state = replace(self._state, reason=self._down_reason)
        logs = [asyncio.create_task(self._forward_log(process)) for process in ranks.processes.values()]
        connection = asyncio.create_task(self._serve(launched.connected), name="engine connection")
        watch = asyncio.create_task(self._watch(ranks), name="engine watch")
        tasks = [*logs, connection, watch]
        try:
            end = await ranks.first_end()
            if not await ranks.all_ended(GRACE_S):
                log.warning("killing what is left of the group: %s", ranks.describe())
            await asyncio.wait([*logs, connection], timeout=1.0)  # for the last log lines and messages
        finally:
            ranks.signal_all(signal.SIGKILL)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_connection()
            await self._clean_up(launched)
        return end

    async def _launch(self, directory: Path) -> Launched:
        """Start the ranks, and listen for their leader.

        Raises:
            HostUnreachable, OSError, ConfigError: a rank cannot be started.
        """
        self._generation += 1
        self._failure, self._stall_reason = None, ""
        self._stderr_tail.clear()
        path = directory / f"engine-{self._generation}.sock"
        connected: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()
            else:
                connected.set_result((reader, writer))

        listener = await asyncio.start_unix_server(accept, path)
        try:
            ranks = self._ranks = await self._start_ranks(path)
        except HostUnreachable:
            listener.close()
            path.unlink(missing_ok=True)
            raise
        return Launched(ranks, path, listener, connected)

    async def _clean_up(self, launched: Launched) -> None:
        """Close the socket, wait for ranks that were told to end, kill those that remain, and delete their files."""
        launched.listener.close()
        if not await launched.ranks.all_ended(EXIT_WAIT_S):
            launched.ranks.signal_all(signal.SIGKILL)
            await launched.ranks.all_ended(EXIT_WAIT_S)
        ranks = range(self._config.tensor_parallel_size)
        for file in (launched.path, *(pid_file(launched.path, rank) for rank in ranks)):
            file.unlink(missing_ok=True)

    async def _start_ranks(self, path: Path) -> RankProcesses:
        if self._cluster is None or self._choice is None:
            return await start_ranks(self._config, self._choice, path)
        cluster, secret = self._cluster
        return await start_on_hosts(self._config, self._choice, path, cluster, secret)

    async def _end_processes(self, ranks: RankProcesses) -> None:
        """Wait for the ranks to end after `Shutdown`; then send SIGTERM, then SIGKILL."""
        for step in (None, signal.SIGTERM, signal.SIGKILL):
            if step is not None:
                ranks.signal_all(step)
            if await ranks.all_ended(EXIT_WAIT_S):
                return

    def _describe_end(self, end: End) -> str:
        if self._stall_reason:
            return self._stall_reason
        process = "the engine process" if self._config.tensor_parallel_size == 1 else end.name
        if self._ranks is not None and (unjoined := self._ranks.ended_by(signal.SIGALRM)):
            ranks = " and ".join(f"{name}{self._join_address(name)}" for name in unjoined)
            return (
                f"{ranks} could not join the group within {self._config.join_seconds:g} s: a rank is missing, or "
                "something else is connected to the port"
            )
        if end.status < 0:
            return _ended_by(process, -end.status)
        if found := MPIRUN_NOTICE.search(" ".join(self._stderr_tail)):
            rank, pid, host, number = found.groups()
            return _ended_by(f"rank {rank} ({host}, pid {pid})", int(number))
        if self._failure is not None:
            return self._failure.message
        words = next((line for line in reversed(self._stderr_tail) if line.strip(" -")), "")
        return f"{process} ended with status {end.status}" + (f": {words}" if words else "")

    def _exit_code(self, end: End) -> ExitCode:
        """The exit code of the cause. mpirun may report the status of another rank, which it ended itself."""
        reported = None if self._failure is None else _as_exit_code(self._failure.code)
        return reported if reported is not None and not reported.restart_helps else _as_exit_code(end.status)

    def _join_address(self, name: str) -> str:
        """The address at which a rank tried to join, from its log; with " at " before it."""
        joining = re.search(rf"^{name}: joining .* at (\S+),", "\n".join(self._stderr_tail), re.MULTILINE)
        return f" at {joining[1]}" if joining else ""

    # -- while the ranks run ---------------------------------------------------------------------------------------

    async def _forward_log(self, process: Child) -> None:
        assert process.stderr is not None
        while line := await _read_line(process.stderr):
            text = line.decode(errors="replace").rstrip("\n")
            self._stderr_tail.append(text)
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    async def _serve(self, connected: asyncio.Future[Streams]) -> None:
        await self._receive_messages(await connected)

    async def _watch(self, ranks: RankProcesses) -> None:
        """Kill all ranks once the leader is stuck."""
        stuck = await self._wait_until_stuck()
        self._stall_reason = f"the engine ({ranks.describe()}) {stuck}"
        ranks.signal_all(signal.SIGKILL)


def _ended_by(process: str, number: int) -> str:
    """A sentence on the signal that ended a process, with its usual cause."""
    name = signal.Signals(number).name
    return f"{process} was ended by {name}" + (" (out of memory, or killed by hand)" if name == "SIGKILL" else "")


def _as_exit_code(status: int) -> ExitCode:
    try:
        return ExitCode(status)
    except ValueError:
        return ExitCode.CRASH


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or a part of a line that exceeds the stream's buffer; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
