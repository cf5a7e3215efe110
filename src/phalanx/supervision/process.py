"""The engine as child processes that the server process starts, watches and restarts; an `EngineClient`.

The supervisor (design: Fail-stop, then resume) starts the ranks, forwards their logs and pings the leader every second.
It kills all ranks when the leader is silent for too long or one rank has ended, and starts them again unless a restart
cannot help. Ranks that could not join do not count as a crash: another program may have connected to one of their
ports, and the next start takes others. The server's journal submits unfinished requests again. Runs on one
asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from phalanx.config import EngineConfig
from phalanx.dist.collective_backend import ChosenBackend, choose
from phalanx.dist.gpus import shortage, usable_gpus
from phalanx.environment import runtime_dir
from phalanx.errors import ConfigError, EngineUnavailable, ExitCode, HostUnreachable, PhalanxError
from phalanx.log_limits import RepeatCounter, kind_of
from phalanx.supervision.engine_connection import EngineConnection, Streams
from phalanx.supervision.host_ranks import KnownCluster, start_on_hosts
from phalanx.supervision.owned_directory import OwnedDirectory, new_directory
from phalanx.supervision.rank_launcher import Child, End, RankProcesses, pid_file, start_ranks
from phalanx.supervision.rank_log import SERVING, RankLog
from phalanx.supervision.restarts import Restarts
from phalanx.text.printable import printable
from phalanx.types import Shutdown

log = logging.getLogger("phalanx.engine")

SHARED_MEMORY = Path("/dev/shm")  # Linux; Open MPI makes its segments there
EXIT_WAIT_S = 5.0  # between Shutdown and SIGTERM, and between SIGTERM and SIGKILL
GRACE_S = 3.0  # between one rank's end and SIGKILL for those that still run
EXHAUSTED = (
    errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EADDRINUSE,
)  # fmt: skip
"""Errors of a start without enough processes, memory, files, disk or ports, which other programs may have taken."""
HOST_RETRY_S = 1.0  # between attempts to reach a host
RDMA_COOL_DOWN_S = 30.0  # a JACCL device stays busy (EBUSY) after its process was killed
MPIRUN_NOTICE = re.compile(r"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+signal (\d{1,3})\b")
LINE_CHARS = 4000  # of a line of a rank's log
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
        cluster: the hosts of the ranks; None for this machine alone.
    """

    def __init__(self, config: EngineConfig, *, stall_s: float = 60.0, cluster: KnownCluster | None = None) -> None:
        super().__init__(stall_s=stall_s)
        self._config = config
        self._cluster = cluster
        self._directory: OwnedDirectory | None = None
        self._shared_memory: OwnedDirectory | None = None  # of Open MPI's ranks on this machine
        self._ranks: RankProcesses | None = None
        self._launched: Launched | None = None  # by `launch`, until the supervisor takes it over
        self._choice: ChosenBackend | None = None
        self._generation = 0
        self._stall_reason = ""
        self._down_reason = "the engine is starting"
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_LINES)
        self._rank_log = self._new_log()
        self._restarts = Restarts()
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
        self._supervisor.add_done_callback(self._supervisor_ended)

    def _supervisor_ended(self, supervisor: asyncio.Task[None]) -> None:
        """Report an engine without a supervisor as failed, so that the server ends."""
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            log.error("the engine's supervisor crashed", exc_info=error)
            self._report_down("failed", f"the engine's supervisor crashed: {error!r}", ExitCode.CRASH)

    def _prepare(self) -> Path:
        """Choose the backend and make the directory for sockets, once."""
        if self._directory is None:
            widths = self._config.widths
            if max(widths) > 1:
                hosts = () if self._cluster is None else self._cluster.config.hosts
                cabled = all(host.rdma for host in hosts)
                gpus = {host.name: host.gpus for host in hosts} or {"this machine": len(usable_gpus())}
                self._choice = choose(
                    self._config.backend,
                    self._config.collective,
                    machines=max(1, len(hosts)),
                    cabled=cabled,
                    gpu_shortage=shortage(sum(widths), gpus),
                )
                log.info("%s ranks over %s: %s", " + ".join(map(str, widths)), *self._choice)
            self._directory = new_directory(runtime_dir())
            if self._choice is not None and self._choice.backend == "mpi" and SHARED_MEMORY.is_dir():
                self._shared_memory = new_directory(SHARED_MEMORY)
        return self._directory.path

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
        self._print_held()
        for directory in (self._directory, self._shared_memory):
            if directory is not None:
                directory.remove()
        self._directory = self._shared_memory = None
        self._fail_pings("closed")
        self._state = replace(self._state, phase="stopped", reason="closed")

    # -- start and restart -----------------------------------------------------------------------------------------

    async def _supervise(self, directory: Path) -> None:
        """Run the engine, again after every crash that a restart can mend."""
        while True:
            try:
                for owned in (self._directory, self._shared_memory):
                    if owned is not None:
                        owned.restore()
                end = await self._run_once(directory if self._directory is None else self._directory.path)
            except HostUnreachable as error:  # not a crash: try until the host is back
                self._state = replace(self._state, reason=str(error))
                await asyncio.sleep(HOST_RETRY_S)
                continue
            except (OSError, ConfigError) as error:
                reason, unjoined = f"the ranks could not be started: {error}", False
                code = ExitCode.CRASH if isinstance(error, OSError) and error.errno in EXHAUSTED else ExitCode.CONFIG
            else:
                reason, code, unjoined = self._describe_end(end), self._exit_code(end), self._failed_to_join(end)
                reason = self._rank_log.in_full(reason)
                self._print_held()
            if self._closing:
                return
            served_s = None if self._ready_at is None else time.monotonic() - self._ready_at
            pause_s = self._restarts.pause_s(served_s, code)
            if pause_s is None:
                tried = f"{self._restarts.failed} starts failed, the last: " if code.restart_helps else ""
                self._report_down("failed", tried + reason, code)
                return
            self._down_reason = reason
            if unjoined:
                log.warning("the ranks did not find each other, and start again on other ports: %s", reason)
                self._state = replace(self._state, reason=reason)
            else:
                self._report_down("restarting", reason, None)
            await asyncio.sleep(self._cooled_down(pause_s))
            self._config = replace(self._config, inject=None)  # a fault is injected once

    def _cooled_down(self, pause: float) -> float:
        """A pause in seconds; longer after a killed JACCL process."""
        rdma = self._choice is not None and self._choice.backend.startswith("jaccl")
        killed = self._ranks is not None and (self._ranks.killed or bool(self._ranks.ended_by(signal.SIGKILL)))
        return max(pause, RDMA_COOL_DOWN_S) if rdma and killed else pause

    async def _run_once(self, directory: Path) -> End:
        """Start the ranks and serve the leader's connection until a rank has ended; then end all."""
        launched, self._launched = self._launched or await self._launch(directory), None
        ranks = launched.ranks
        self._last_message_at = time.monotonic()
        self._state = replace(self._state, reason=self._down_reason)
        logs = [asyncio.create_task(self._forward_log(name, process)) for name, process in ranks.processes.items()]
        connection = asyncio.create_task(self._serve(launched.connected), name="engine connection")
        watch = asyncio.create_task(self._watch(ranks), name="engine watch")
        tasks = [*logs, connection, watch]
        try:
            end = await ranks.first_end()
            if not await ranks.all_ended(GRACE_S):
                log.warning("killing the remaining ranks: %s", ranks.describe())
            await asyncio.wait([*logs, connection], timeout=1.0)  # for the last log lines and messages
        finally:
            ranks.signal_all(signal.SIGKILL)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_connection()
            await self._clean_up(launched)
        return end

    def _new_log(self) -> RankLog:
        """The log of a start. Each host of a cluster keeps a log of its own rank, in full."""
        return RankLog(logging.DEBUG if self._cluster is not None else log.getEffectiveLevel())

    async def _launch(self, directory: Path) -> Launched:
        """Start the ranks, and listen for their leader.

        Raises:
            HostUnreachable, OSError, ConfigError: a rank cannot be started.
        """
        self._generation += 1
        self._failure, self._stall_reason, self._ready_at = None, "", None
        self._stderr_tail.clear()
        self._log_complete.clear()
        self._rank_log = self._new_log()
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
        except (OSError, PhalanxError):
            listener.close()
            path.unlink(missing_ok=True)
            raise
        return Launched(ranks, path, listener, connected)

    async def _clean_up(self, launched: Launched) -> None:
        """Close the socket, wait for ranks that are ending, kill those that remain, and delete their files."""
        launched.listener.close()
        if not await launched.ranks.all_ended(EXIT_WAIT_S):
            launched.ranks.signal_all(signal.SIGKILL)
            await launched.ranks.all_ended(EXIT_WAIT_S)
        ranks = range(self._config.n_ranks)
        for file in (launched.path, *(pid_file(launched.path, rank) for rank in ranks)):
            file.unlink(missing_ok=True)

    async def _start_ranks(self, path: Path) -> RankProcesses:
        if self._cluster is None:
            memory = None if self._shared_memory is None else self._shared_memory.path
            return await start_ranks(self._config, self._choice, path, shared_memory=memory)
        return await start_on_hosts(self._config, self._choice, path, self._cluster)

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
        process = "the engine process" if self._config.n_ranks == 1 else end.name
        if self._ranks is not None and (unjoined := self._ranks.ended_by(signal.SIGALRM)):
            return (
                f"{' and '.join(unjoined)} could not join the group"
                f"{','.join(self._joining(name) for name in unjoined)}: a rank is missing, or something else is "
                "connected to the port"
            )
        if end.status < 0:
            return _ended_by(process, -end.status)
        if found := MPIRUN_NOTICE.search(" ".join(self._stderr_tail)):
            rank, pid, host, number = found.groups()
            numbers = {} if self._ranks is None else self._ranks.numbers
            rank = numbers.get(int(pid), rank)  # mpirun counts within a stage
            return _ended_by(f"rank {rank} ({host}, pid {pid})", int(number))
        if self._failure is not None:
            return self._failure.message
        words = next((line for line in reversed(self._stderr_tail) if line.strip(" -")), "")
        return f"{process} ended with status {end.status}" + (f": {words.strip()}" if words else "")

    def _exit_code(self, end: End) -> ExitCode:
        """The exit code of the cause. mpirun may report the status of another rank, which it ended itself."""
        reported = None if self._failure is None else _as_exit_code(self._failure.code)
        return reported if reported is not None and not reported.restart_helps else _as_exit_code(end.status)

    def _failed_to_join(self, end: End) -> bool:
        """Whether this start ended because the ranks did not join."""
        if self._ready_at is not None or self._ranks is None or self._stall_reason:
            return False
        if self._ranks.ended_by(signal.SIGALRM):
            return True
        statuses = {end.status, *(process.returncode for process in self._ranks.processes.values())}
        return end.status >= 0 and self._exit_code(end).restart_helps and ExitCode.GROUP in statuses

    def _joining(self, name: str) -> str:
        """Where a rank tried to join and how long it had, from its log: " at 127.0.0.1:7000 within 7 s"."""
        found = re.search(rf"^{name}: joining .* at (\S+), (\S+) s at", "\n".join(self._stderr_tail), re.MULTILINE)
        return f" at {found[1]} within {found[2]} s" if found else ""

    # -- while the ranks run ---------------------------------------------------------------------------------------

    async def _forward_log(self, name: str, process: Child) -> None:
        """Copy a process's lines to stderr; of many that differ in numbers only, write how many there were. Errors are
        held until the ranks have ended."""
        assert process.stderr is not None
        repeats = RepeatCounter()
        try:
            while line := await _read_line(process.stderr):
                text = printable(line.decode(errors="replace").rstrip("\n"))[:LINE_CHARS]
                if text == SERVING:
                    self._log_complete.set()
                    continue
                await asyncio.sleep(0)  # a rank that logs without end must not keep clients waiting
                self._stderr_tail.append(text)
                for count in repeats.ended():
                    print(count, file=sys.stderr, flush=True)
                for admitted in self._rank_log.admit(name, text):
                    if repeats.admit(kind_of(admitted), admitted):
                        print(admitted, file=sys.stderr, flush=True)
        finally:
            for count in repeats.ended(now=True):
                print(count, file=sys.stderr, flush=True)

    def _print_held(self) -> None:
        """Print the held errors that are not in the reason of the ranks' end."""
        for line in self._rank_log.held():
            print(line, file=sys.stderr, flush=True)

    async def _serve(self, connected: asyncio.Future[Streams]) -> None:
        await self._receive_messages(await connected)

    async def _watch(self, ranks: RankProcesses) -> None:
        """Kill all ranks once the leader is stuck."""
        stuck = await self._wait_until_stuck()
        self._stall_reason = f"the engine ({ranks.describe()}) {stuck}"
        ranks.signal_all(signal.SIGKILL)


def _ended_by(process: str, number: int) -> str:
    """A sentence on the signal that ended a process, with its usual cause."""
    known = {one.value: one.name for one in signal.Signals}  # not all real-time signals are
    name = known.get(number, f"signal {number}")
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
