"""The agent of a host runs one process for the server on the first host (design: Fail-stop, then resume).

The agent listens on one address and takes commands from the first host of its cluster alone. It starts a rank or Open
MPI's daemon (`programs.py`), copies the process's output to the server and to its own stderr, and reports the exit
status. When the connection closes or is silent for `HEARTBEAT_TIMEOUT_S`, the agent ends the process: the server is
gone, and the next one starts all ranks anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from phalanx.dist.ports import free_ports
from phalanx.errors import ConfigError, ExitCode, FrameError
from phalanx.private_files import is_open_to_others
from phalanx.supervision.agent_protocol import (
    HEARTBEAT_TIMEOUT_S,
    AgentConnection,
    AgentWelcome,
    AskPorts,
    KeepAlive,
    Output,
    Ports,
    ProcessEnded,
    RunDaemon,
    RunRank,
    Signal,
    Started,
    ToAgent,
)
from phalanx.supervision.owned_directory import OwnedDirectory
from phalanx.supervision.programs import DAEMON, daemon, rank
from phalanx.supervision.tls_listener import TlsListener
from phalanx.tls.host_credentials import Credentials, accepting

log = logging.getLogger("phalanx.agent")

GRACE_S = 2.0  # between SIGTERM and SIGKILL: a rank has nothing to save
LEAVE_S = 10.0  # after the agent's own SIGTERM: the server may end the process in order
READ_BYTES = 1 << 16  # largest piece of output per message


class Agent:
    """Runs one process at a time.

    Args:
        credentials: this host's, which it read from `credentials_file`; the rank that it starts reads them as well.
        directory: in which the agent makes a directory of its own, which it deletes at the end; and `directory` itself,
            if the agent made that. What killed agents left in there goes as well.
    """

    def __init__(self, credentials: Credentials, credentials_file: Path, directory: Path) -> None:
        self._credentials = credentials
        self._credentials_file = credentials_file
        self._parent = directory
        self._own: OwnedDirectory | None = None  # in there, while it listens
        self._process: _AgentProcess | None = None
        self._start_lock = asyncio.Lock()  # held while a process is replaced

    async def serve(self, host: str, port: int) -> int:
        """Listen until SIGTERM or SIGINT. Returns the exit code.

        Raises:
            ConfigError: the agent cannot listen on the address, or not write into its directory.
        """
        with _directory_in(self._parent) as self._own:
            await self._serve(host, port)
        return ExitCode.OK

    def _directory(self) -> Path:
        """The agent's own directory; a new one, if a cleaner of old files has taken it.

        Raises:
            OSError: it cannot be made.
        """
        assert self._own is not None
        _make(self._parent)
        self._own.restore()
        return self._own.path

    async def _serve(self, host: str, port: int) -> None:
        leave = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave.set)
        listener = TlsListener(accepting(self._credentials, peers=[0]), self._accept)
        try:
            await listener.listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"The agent cannot listen on {host} port {port}: {error.strerror or error}.",
                remedy="End what uses the port (`phalanx down`), or choose another with `phalanx up --agent-port`.",
            ) from error
        log.info("listening on %s port %d", host, port)
        await leave.wait()
        await listener.close()
        if self._process is not None:
            await self._process.finish(LEAVE_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        connection = AgentConnection(reader, writer, ToAgent)
        try:
            directory = self._directory()
            connection.send(AgentWelcome(sys.executable, str(directory), str(self._credentials_file)))
            await self._handle_messages(connection, directory)
        except (FrameError, OSError) as error:  # TimeoutError is an OSError
            why = "it fell silent" if isinstance(error, TimeoutError) else error
            log.warning("the server's connection from %s ended: %s", address, why)
        finally:
            connection.close()

    async def _handle_messages(self, connection: AgentConnection, directory: Path) -> None:
        """Answer the server until it closes the connection, then end the process that it started here."""
        process: _AgentProcess | None = None
        try:
            while True:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    message = await connection.receive()
                match message:
                    case None:
                        return
                    case KeepAlive():
                        connection.send(KeepAlive())
                    case AskPorts():
                        connection.send(_ports(message))
                    case RunRank() | RunDaemon() if process is None:
                        process = await self._run(connection, message, directory)
                    case Signal() if process is not None:
                        process.signal(message.number)
                    case _:
                        raise FrameError(f"{type(message).__name__} out of turn")
        finally:
            if process is not None:
                await process.finish(0.0)

    async def _run(
        self, connection: AgentConnection, run: RunRank | RunDaemon, directory: Path
    ) -> _AgentProcess | None:
        """Start a program, after ending an earlier connection's process. None if it cannot be started."""
        async with self._start_lock:
            if self._process is not None:
                await self._process.finish(0.0)
            try:
                program = rank(run, directory) if isinstance(run, RunRank) else daemon(run, directory)
                process = await asyncio.create_subprocess_exec(
                    *program.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env=program.variables,
                    start_new_session=True,
                )
            except (OSError, ConfigError) as error:
                name = "phalanx rank" if isinstance(run, RunRank) else DAEMON
                connection.send(ProcessEnded(ExitCode.CONFIG, f"{name} cannot be run: {error}"))
                return None
            connection.send(Started(process.pid))
            self._process = _AgentProcess(process, connection)
            return self._process


class _AgentProcess:
    """A running process. Copies its output to stderr and to the server, then reports its exit status.

    The server's copy lacks what the process writes faster than the network takes it.
    """

    def __init__(self, process: asyncio.subprocess.Process, connection: AgentConnection) -> None:
        self._process = process
        self._connection = connection
        self._report = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(READ_BYTES):
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
            self._connection.offer(Output(piece))
        status = await self._process.wait()
        log.info("process %d ended with status %d", self._process.pid, status)
        self._connection.send(ProcessEnded(status))

    def signal(self, number: int) -> None:
        """Send a signal to the process and its descendants of the same process group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def finish(self, patience_s: float) -> None:
        """Wait `patience_s` seconds for the process to end, then send SIGTERM, then SIGKILL."""
        for number, seconds in ((None, patience_s), (signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            if number is not None:
                self.signal(number)
            done, _ = await asyncio.wait([self._report], timeout=seconds)
            if done:
                return


@contextlib.contextmanager
def _directory_in(parent: Path) -> Iterator[OwnedDirectory]:
    """A new directory, deleted at the end; so is its parent, if it was made for it and nothing else is in it.

    Raises:
        ConfigError: it cannot be made, or other users could replace it.
    """
    made = not parent.exists()
    try:
        _make(parent)
        own = OwnedDirectory(parent)
    except OSError as error:
        raise ConfigError(
            f"--directory {parent}: {error.strerror or error}.", remedy="Name a directory of yours, or a new one."
        ) from error
    try:
        yield own
    finally:
        own.remove()
        if made:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()


def _make(parent: Path) -> None:
    """Make the directory that the agent's own one lies in.

    Raises:
        OSError: it cannot be made; or it is there, and other users could replace what lies in it.
    """
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if is_open_to_others(parent):
        raise PermissionError(errno.EACCES, "it is another user's, or others may rename what lies there")


def _ports(asked: AskPorts) -> Ports:
    """Free ports, or the reason why there are none."""
    try:
        return Ports(free_ports(asked.count, asked.address))
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            return Ports([], why)
        host = socket.gethostname()
        return Ports([], f"{asked.address} is not an address of {host}: {why}", "Correct `ips` in the hostfile.")
