"""The agent of a host runs one process for the server on the first host (design: Fail-stop, then resume).

The agent listens on one address and authenticates the server by the cluster's secret. It starts the command that the
server sends, copies the process's output to the server and to its own stderr, and reports the exit status. When the
connection closes or is silent for `SILENT_S`, the agent ends the process: the server is gone, and the next one starts
all ranks anew. Does not know what the process does, nor why it is started.
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
from pathlib import Path

from phalanx.config import environment
from phalanx.dist.ports import free_ports
from phalanx.errors import ConfigError, ExitCode, FrameError
from phalanx.supervision.agent_protocol import (
    HANDSHAKE_S,
    SILENT_S,
    AgentConnection,
    AskPorts,
    Challenge,
    Ended,
    KeepAlive,
    Output,
    Ports,
    Proof,
    Run,
    Signal,
    Started,
    ToAgent,
    Welcome,
    nonce,
    proof,
    proves,
)

log = logging.getLogger("phalanx.agent")

GRACE_S = 2.0  # between SIGTERM and SIGKILL
LEAVE_S = 10.0  # after the agent's own SIGTERM: the server may end the process in order
READ_BYTES = 1 << 16  # largest piece of output per message
FRAME_LIMIT = 1 << 20  # bytes per message after the handshake


class Agent:
    """Runs one process at a time.

    Args:
        secret: of the cluster; the server must prove that it knows it.
        directory: for the files of `Run`. The agent makes it, and deletes it at the end.
    """

    def __init__(self, secret: str, directory: Path) -> None:
        self._secret = secret
        self._directory = directory
        self._process: _AgentProcess | None = None
        self._start_lock = asyncio.Lock()  # held while a process is replaced

    async def serve(self, host: str, port: int) -> int:
        """Listen until SIGTERM or SIGINT. Returns the exit code.

        Raises:
            ConfigError: the agent cannot listen on the address.
        """
        leave = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave.set)
        try:
            listener = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise ConfigError(
                f"The agent cannot listen on {host} port {port}: {error.strerror or error}.",
                remedy="End what uses the port (`phalanx down`), or choose another with `phalanx up --agent-port`.",
            ) from error
        log.info("listening on %s port %d", host, port)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        await leave.wait()
        listener.close()
        if self._process is not None:
            await self._process.finish(LEAVE_S)
        for file in self._directory.iterdir():
            file.unlink()
        self._directory.rmdir()
        return ExitCode.OK

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = AgentConnection(reader, writer, ToAgent)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._authenticate(connection)
            connection.limit = FRAME_LIMIT
            await self._handle_messages(connection)
        except (FrameError, TimeoutError, ConnectionError) as error:
            log.warning("a connection from %s ended: %s", writer.get_extra_info("peername"), error or "it fell silent")
        finally:
            connection.close()

    async def _authenticate(self, connection: AgentConnection) -> None:
        """The handshake of `agent_protocol.py`, the agent's side."""
        mine = nonce()
        connection.send(Challenge(mine))
        theirs = await connection.expect(Proof)
        if not proves(theirs.mac, self._secret, "server", mine, theirs.nonce):
            raise FrameError("it does not know this cluster's secret")
        mac = proof(self._secret, "agent", mine, theirs.nonce)
        connection.send(Welcome(mac, sys.executable, str(self._directory)))

    async def _handle_messages(self, connection: AgentConnection) -> None:
        """Answer the server until it closes the connection, then end the process that it started here."""
        process: _AgentProcess | None = None
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    message = await connection.receive()
                match message:
                    case None:
                        return
                    case KeepAlive():
                        connection.send(KeepAlive())
                    case AskPorts():
                        connection.send(_ports(message))
                    case Run() if process is None:
                        process = await self._run(connection, message)
                    case Signal() if process is not None:
                        process.signal(message.number)
                    case _:
                        raise FrameError(f"{type(message).__name__} out of turn")
        finally:
            if process is not None:
                await process.finish(0.0)

    async def _run(self, connection: AgentConnection, run: Run) -> _AgentProcess | None:
        """Start the command, after ending an earlier connection's process. None if it cannot be started."""
        async with self._start_lock:
            if self._process is not None:
                await self._process.finish(0.0)
            variables = {**environment(), **run.variables}
            for name, text in run.files.items():
                file = self._directory / f"{Path(name).name}.json"
                file.write_text(text)
                variables[name] = str(file)
            try:
                process = await asyncio.create_subprocess_exec(
                    *run.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env=variables,
                    start_new_session=True,
                )
            except OSError as error:
                connection.send(Ended(ExitCode.CONFIG, f"{run.command[0]} cannot be run: {error.strerror or error}"))
                return None
            connection.send(Started(process.pid))
            self._process = _AgentProcess(process, connection)
            return self._process


class _AgentProcess:
    """A running process. Copies its output to the server and to stderr, then reports its exit status."""

    def __init__(self, process: asyncio.subprocess.Process, connection: AgentConnection) -> None:
        self._process = process
        self._connection = connection
        self._report = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(READ_BYTES):
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
            self._connection.send(Output(piece))
        status = await self._process.wait()
        log.info("process %d ended with status %d", self._process.pid, status)
        self._connection.send(Ended(status))

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


def _ports(asked: AskPorts) -> Ports:
    """Free ports, or the reason why there are none."""
    try:
        return Ports(free_ports(asked.count, asked.address))
    except OSError as error:
        said = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            return Ports([], said)
        host = socket.gethostname()
        return Ports([], f"{asked.address} is not an address of {host}: {said}", "Correct `ips` in the hostfile.")
