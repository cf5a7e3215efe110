"""The engine as child processes: started, watched, restarted; an `EngineClient` for the server.

The supervisor of the local machine (design: Fail-stop, then resume): it starts the ranks, forwards their logs, asks the
leader for a sign of life every second, kills all when none comes or when one has ended, and starts them again unless a
restart cannot help. It does not know requests: what was unfinished is submitted again by the server's journal. Runs on
one asyncio loop.
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

RESTARTS = 3  # within
RESTART_WINDOW_S = 300.0  # seconds; more means that restarting does not help
EXIT_WAIT_S = 5.0  # after Shutdown, before SIGTERM, and again before SIGKILL
GRACE_S = 3.0  # that ranks get to notice that one of them has ended, before SIGKILL
HOST_RETRY_S = 1.0  # between attempts to reach a host that is away
RDMA_COOL_DOWN_S = 30.0  # a JACCL device is busy for so long after a process that used it was killed (F7, EBUSY)
MPIRUN_NOTICE = re.compile(r"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+signal (\d+)")
STDERR_LINES = 20  # of the child's last words that are kept for the reason


@dataclass(frozen=True)
class Launched:
    """Rank processes that have been started, and the socket at which the leader's connection is awaited."""

    ranks: RankProcesses
    path: Path
    listener: asyncio.Server
    connected: asyncio.Future[Streams]


class EngineProcess(EngineConnection):
    """One engine at a time, of one or more rank processes, under one socket directory.

    Args:
        stall_s: seconds without an answer from the engine's loop after which it is killed and restarted.
        cluster: the hosts of the ranks, and the secret of their agents; None is this machine alone.
    """

    def __init__(
        self, config: EngineConfig, *, stall_s: float = 60.0, cluster: tuple[ClusterConfig, str] | None = None
    ) -> None:
        super().__init__(stall_s=stall_s)
        self._config = config
        self._cluster = cluster
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: RankProcesses | None = None
        self._launched: Launched | None = None  # and not supervised yet
        self._choice: ChosenBackend | None = None
        self._generation = 0
        self._stall_reason = ""
        self._why_down = "the engine is starting"  # once every host is there
        self._last_words: deque[str] = deque(maxlen=STDERR_LINES)
        self._crashes: deque[float] = deque()
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Of the running leader."""
        return None if self._ranks is None else self._ranks.leader_pid

    @property
    def rank_pids(self) -> dict[int, int]:
        """rank -> process id of the running ranks."""
        return {} if self._ranks is None else self._ranks.rank_pids()

    async def launch(self) -> None:
        """Start this machine's ranks, which load while the caller does other work. Those of hosts wait for `start`.

        Raises:
            ConfigError: the backend that was asked for is not there.
        """
        directory = self._prepare()
        if self._cluster is None:
            with contextlib.suppress(OSError):  # met again, and reported, by the supervision
                self._launched = await self._launch(directory)

    async def start(self) -> None:
        """Start the processes, unless `launch` did, and their supervision; returns at once (`state` says how it goes).

        Raises:
            ConfigError: the backend that was asked for is not there.
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
            self._launched.ranks.signal_all(signal.SIGTERM)  # there is no connection for a Shutdown yet
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

    # -- the life of processes -------------------------------------------------------------------------------------

    async def _supervise(self, directory: Path) -> None:
        """Run one engine process after the other until one ends for good."""
        while True:
            try:
                end = await self._run_once(directory)
            except HostUnreachable as error:  # nothing has crashed: it starts when the host is back
                self._state = replace(self._state, reason=str(error))
                await asyncio.sleep(HOST_RETRY_S)
                continue
            except (OSError, ConfigError) as error:  # a program is not there any more, or cannot be run
                self._down("failed", f"the ranks could not be started: {error}", ExitCode.CONFIG)
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
                self._down("failed", reason, exit_code)
                return
            self._why_down = reason
            self._down("restarting", reason, None)
            await asyncio.sleep(self._back_off())
            self._config = replace(self._config, inject=None)  # a drill happens once

    def _back_off(self) -> float:
        """Seconds until the next start."""
        pause = float(min(10.0, 0.1 * 4 ** (len(self._crashes) - 1)))
        rdma = self._choice is not None and self._choice.backend.startswith("jaccl")
        killed = self._ranks is not None and (self._ranks.killed or bool(self._ranks.ended_by(signal.SIGKILL)))
        return max(pause, RDMA_COOL_DOWN_S) if rdma and killed else pause

    async def _run_once(self, directory: Path) -> End:
        """Start the ranks, serve the leader's connection until one has ended; no process is left afterwards."""
        launched, self._launched = self._launched or await self._launch(directory), None
        ranks = launched.ranks
        self._last_sign = time.monotonic()
        self._state = replace(self._state, reason=self._why_down)
        logs = [asyncio.create_task(self._forward_log(process)) for process in ranks.processes.values()]
        connection = asyncio.create_task(self._serve(launched.connected), name="engine connection")
        watch = asyncio.create_task(self._watch(ranks), name="engine watch")
        tasks = [*logs, connection, watch]
        try:
            end = await ranks.first_end()
            if not await ranks.all_ended(GRACE_S):
                log.warning("killing what is left of the group: %s", ranks.describe())
            await asyncio.wait([*logs, connection], timeout=1.0)  # the last words and messages
        finally:
            ranks.signal_all(signal.SIGKILL)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._hang_up()
            await self._clean_up(launched)
        return end

    async def _launch(self, directory: Path) -> Launched:
        """Start the ranks, and listen for the leader.

        Raises:
            HostUnreachable, OSError, ConfigError: a rank cannot be started.
        """
        self._generation += 1
        self._failure, self._stall_reason = None, ""
        self._last_words.clear()
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
        """Close the socket and remove the files of ranks that have been told to end; kill those that do not."""
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
        """Shutdown was asked for; SIGTERM and SIGKILL only if that does not help."""
        for step in (None, signal.SIGTERM, signal.SIGKILL):
            if step is not None:
                ranks.signal_all(step)
            if await ranks.all_ended(EXIT_WAIT_S):
                return

    def _describe_end(self, end: End) -> str:
        if self._stall_reason:
            return self._stall_reason
        who = "the engine process" if self._config.tensor_parallel_size == 1 else end.name
        if self._ranks is not None and (unjoined := self._ranks.ended_by(signal.SIGALRM)):
            ranks = " and ".join(f"{name}{self._join_address(name)}" for name in unjoined)
            return (
                f"{ranks} could not join the group within {self._config.join_seconds:g} s: a rank is missing, or "
                "something else is connected to the port"
            )
        if end.status < 0:
            return _ended_by(who, -end.status)
        if found := MPIRUN_NOTICE.search(" ".join(self._last_words)):
            rank, pid, host, number = found.groups()
            return _ended_by(f"rank {rank} ({host}, pid {pid})", int(number))
        if self._failure is not None:
            return self._failure.message
        words = next((line for line in reversed(self._last_words) if line.strip(" -")), "")
        return f"{who} ended with status {end.status}" + (f": {words}" if words else "")

    def _exit_code(self, end: End) -> ExitCode:
        """That of the cause: a launcher's own status may be that of a rank it ended on the way."""
        said = None if self._failure is None else _as_exit_code(self._failure.code)
        return said if said is not None and not said.restart_helps else _as_exit_code(end.status)

    def _join_address(self, name: str) -> str:
        """Where a rank tried to join, from its log."""
        said = re.search(rf"^{name}: joining .* at (\S+),", "\n".join(self._last_words), re.MULTILINE)
        return f" at {said[1]}" if said else ""

    # -- what a live process needs ---------------------------------------------------------------------------------

    async def _forward_log(self, process: Child) -> None:
        assert process.stderr is not None
        while line := await _read_line(process.stderr):
            text = line.decode(errors="replace").rstrip("\n")
            self._last_words.append(text)
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    async def _serve(self, connected: asyncio.Future[Streams]) -> None:
        await self._converse(await connected)

    async def _watch(self, ranks: RankProcesses) -> None:
        """End the processes when the leader gives no sign of life."""
        stuck = await self._until_stuck()
        self._stall_reason = f"the engine ({ranks.describe()}) {stuck}"
        ranks.signal_all(signal.SIGKILL)


def _ended_by(who: str, number: int) -> str:
    """That a signal ended a process, and what that usually means."""
    name = signal.Signals(number).name
    return f"{who} was ended by {name}" + (" (out of memory, or killed by hand)" if name == "SIGKILL" else "")


def _as_exit_code(status: int) -> ExitCode:
    try:
        return ExitCode(status)
    except ValueError:
        return ExitCode.CRASH


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """A line, however long (an overlong one comes in pieces); empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
