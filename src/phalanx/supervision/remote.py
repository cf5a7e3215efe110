"""A process on another host, which that host's agent runs; used like a child process."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator

from phalanx.config import HostConfig
from phalanx.errors import ExitCode, FrameError, HostUnreachable
from phalanx.supervision.agent_protocol import (
    ANSWER_S,
    HEARTBEAT_TIMEOUT_S,
    KEEP_ALIVE_S,
    AgentConnection,
    AgentWelcome,
    AskPorts,
    FromAgent,
    KeepAlive,
    Output,
    Ports,
    ProcessEnded,
    RunDaemon,
    RunRank,
    Signal,
    Started,
)
from phalanx.tls.failures import explain
from phalanx.tls.host_credentials import Credentials, connecting

CONNECT_S = 2.0  # for TCP and TLS
OTHER_START = (
    "An agent of another start or cluster may listen there: `phalanx restart` gives all hosts new keys. "
    "If this comes again, something stands between the hosts."
)


class ReachedAgent:
    """An authenticated connection to an agent, before it runs a process."""

    def __init__(self, host: HostConfig, connection: AgentConnection, welcome: AgentWelcome) -> None:
        self.host = host
        self.python = welcome.python
        self.directory = welcome.directory
        self.credentials = welcome.credentials
        self._connection = connection

    async def free_ports(self, address: str, count: int) -> list[int]:
        """Free TCP ports on an address of the host.

        Raises:
            HostUnreachable: the address is not the host's, all its ports are taken, or the agent has gone.
        """
        with _errors_name_host(self.host):
            self._connection.send(AskPorts(address, count))
            async with asyncio.timeout(ANSWER_S):
                ports = await self._connection.expect(Ports)
        if ports.problem:
            raise HostUnreachable(f"{self.host.name}: {ports.problem}.", remedy=ports.remedy)
        if len(set(ports.numbers)) != count:
            raise HostUnreachable(f"{self.host.name}: its agent named {len(ports.numbers)} ports instead of {count}.")
        return ports.numbers

    async def run(self, program: RunRank | RunDaemon) -> RemoteProcess:
        """Start a process on the host.

        Raises:
            HostUnreachable: the agent could not start the process; says why.
        """
        with _errors_name_host(self.host):
            self._connection.send(program)
            async with asyncio.timeout(ANSWER_S + HEARTBEAT_TIMEOUT_S):
                answer = await self._connection.receive()
                while isinstance(answer, KeepAlive):
                    answer = await self._connection.receive()
        if isinstance(answer, ProcessEnded):
            raise HostUnreachable(f"{self.host.name}: {answer.problem}.")
        if not isinstance(answer, Started):
            raise HostUnreachable(f"{self.host.name}: its agent closed the connection.")
        return RemoteProcess(self.host, self._connection, answer.pid)

    def close(self) -> None:
        """Close the connection; the agent ends a process that it started for it."""
        self._connection.close()


async def reach(host: HostConfig, port: int, credentials: Credentials, *, place: int) -> ReachedAgent:
    """Connect to the agent of a host.

    Args:
        credentials: of this host, the first one; agents take orders from no other.
        place: of the host in its cluster.

    Raises:
        HostUnreachable: no answer from this address, or what answers is not that host.
    """
    with _errors_name_host(host, port):
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                host.address, port, ssl=connecting(credentials, peer=place), server_hostname=""
            )
    connection = AgentConnection(reader, writer, FromAgent)
    try:
        with _errors_name_host(host, port):
            try:
                async with asyncio.timeout(ANSWER_S):
                    welcome = await connection.expect(AgentWelcome)
            except FrameError as error:
                why = "it refuses this server, whose certificate is not that of its first host"
                raise _unreachable(host, port, why, OTHER_START) from error
    except HostUnreachable:
        connection.close()
        raise
    return ReachedAgent(host, connection, welcome)


@contextlib.contextmanager
def _errors_name_host(host: HostConfig, port: int = 0) -> Iterator[None]:
    """Turn timeouts and errors of the connection into `HostUnreachable`, which names the host."""
    try:
        yield
    except TimeoutError as error:
        raise _unreachable(host, port, "no answer") from error
    except ssl.SSLError as error:
        raise _unreachable(host, port, explain(error), OTHER_START) from error
    except OSError as error:
        raise _unreachable(host, port, explain(error)) from error
    except FrameError as error:
        raise _unreachable(host, port, error.message) from error


def _unreachable(host: HostConfig, port: int, why: str, remedy: str = "") -> HostUnreachable:
    where = f" at {host.address}" + (f" port {port}" if port else "")
    return HostUnreachable(
        f"The agent of {host.name}{where} cannot be used: {why.rstrip('.')}.",
        remedy=remedy
        or f"Is the host {host.name} on, and its cable in? `phalanx status` and `phalanx doctor` say more.",
    )


class _Fullness(asyncio.ReadTransport):
    """The transport of a `StreamReader`, which pauses it while much is unread."""

    full = False

    def pause_reading(self) -> None:
        self.full = True

    def resume_reading(self) -> None:
        self.full = False


class RemoteProcess:
    """A process on another host, with the interface of `asyncio.subprocess.Process` (`launch.Child`).

    When the agent is silent for `HEARTBEAT_TIMEOUT_S`, the process counts as ended with `PEER_LOST`; the
    agent ends it. Output that arrives faster than it is read is dropped, so that a host cannot fill this one's memory.
    """

    def __init__(self, host: HostConfig, connection: AgentConnection, pid: int) -> None:
        self.host = host
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: asyncio.StreamReader | None = asyncio.StreamReader()
        self._unread = _Fullness()
        self.stderr.set_transport(self._unread)
        self._connection = connection
        self._ended = asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send_keep_alives())]

    async def wait(self) -> int:
        """Wait for the end. Returns the status, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and its descendants."""
        self._connection.send(Signal(number))

    async def _receive(self) -> None:
        """Feed the process's output into `stderr` until the process ends or the agent is lost."""
        status, why = int(ExitCode.PEER_LOST), "its agent closed the connection"
        try:
            while True:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    message = await self._connection.receive()
                if isinstance(message, Output):
                    assert self.stderr is not None
                    if not self._unread.full:
                        self.stderr.feed_data(message.data)
                    await asyncio.sleep(0)  # for its reader, however much has arrived here
                elif isinstance(message, ProcessEnded):
                    status, why = message.status, ""
                    break
                elif message is None:
                    break
        except TimeoutError:
            why = f"its agent has been silent for {HEARTBEAT_TIMEOUT_S:g} s"
        except (FrameError, OSError) as error:
            why = f"the connection to its agent failed: {error}"
        assert self.stderr is not None
        if why:
            self.stderr.feed_data(f"{self.host.name} is lost: {why}\n".encode())
        self.stderr.feed_eof()
        self.returncode = status
        self._connection.close()
        self._tasks[1].cancel()
        self._ended.set()

    async def _send_keep_alives(self) -> None:
        while True:
            self._connection.send(KeepAlive())
            await asyncio.sleep(KEEP_ALIVE_S)
