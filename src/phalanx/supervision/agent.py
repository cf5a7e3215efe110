"""The agent of a host: runs a process here for the server on the first host (design: Fail-stop, then resume).

It listens on one address, lets in whoever knows the cluster's secret, starts what it is told to, passes its output on
and into a log file, and reports its end. When the connection ends or falls silent, the process is ended: the server has
gone, and will start everything afresh. Does not know what the process does, nor why it is started.
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

GRACE_S = 2.0  # between SIGTERM and SIGKILL, when the server is gone
LEAVE_S = 10.0  # after SIGTERM, for the server to end the process in its own way
PIECE = 1 << 16  # bytes of output at a time
FRAME_LIMIT = 1 << 20  # once the server has proved itself


class Agent:
    """One process at a time.

    Args:
        directory: for files that processes need; it and its files belong to the agent.
    """

    def __init__(self, secret: str, directory: Path) -> None:
        self._secret = secret
        self._directory = directory
        self._process: _AgentProcess | None = None
        self._turn = asyncio.Lock()  # to start a process

    async def serve(self, host: str, port: int) -> int:
        """Listen until SIGTERM; the exit code.

        Raises:
            ConfigError: the address cannot be listened on.
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
            await self._converse(connection)
        except (FrameError, TimeoutError, ConnectionError) as error:
            log.warning("a connection from %s ended: %s", writer.get_extra_info("peername"), error or "it fell silent")
        finally:
            connection.close()

    async def _authenticate(self, connection: AgentConnection) -> None:
        mine = nonce()
        connection.send(Challenge(mine))
        theirs = await connection.expect(Proof)
        if not proves(theirs.mac, self._secret, "server", mine, theirs.nonce):
            raise FrameError("it does not know this cluster's secret")
        mac = proof(self._secret, "agent", mine, theirs.nonce)
        connection.send(Welcome(mac, sys.executable, str(self._directory)))

    async def _converse(self, connection: AgentConnection) -> None:
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
        async with self._turn:
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
    """A process, its output on its way to the server and into this agent's log, and its end."""

    def __init__(self, process: asyncio.subprocess.Process, connection: AgentConnection) -> None:
        self._process = process
        self._connection = connection
        self._report = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(PIECE):
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
            self._connection.send(Output(piece))
        status = await self._process.wait()
        log.info("process %d ended with status %d", self._process.pid, status)
        self._connection.send(Ended(status))

    def signal(self, number: int) -> None:
        """To the process and those of its session that it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def finish(self, patience_s: float) -> None:
        """See the process gone: by itself within `patience_s` seconds, else SIGTERM, else SIGKILL."""
        for number, seconds in ((None, patience_s), (signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            if number is not None:
                self.signal(number)
            done, _ = await asyncio.wait([self._report], timeout=seconds)
            if done:
                return


def _ports(asked: AskPorts) -> Ports:
    try:
        return Ports(free_ports(asked.count, asked.address))
    except OSError as error:
        said = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            return Ports([], said)
        host = socket.gethostname()
        return Ports([], f"{asked.address} is not an address of {host}: {said}", "Correct `ips` in the hostfile.")
