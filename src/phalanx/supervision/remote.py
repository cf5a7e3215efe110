"""A process on another host, through that host's agent, as if it were a child of this one.

Does not know what the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence

from phalanx.config import HostConfig
from phalanx.dist.frames import MAX_FRAME
from phalanx.errors import ExitCode, FrameError, HostUnreachable
from phalanx.supervision.agent_protocol import (
    BEAT_S,
    HANDSHAKE_S,
    SILENT_S,
    AgentConnection,
    AskPorts,
    Challenge,
    Ended,
    FromAgent,
    KeepAlive,
    Output,
    Ports,
    Proof,
    Run,
    Signal,
    Started,
    Welcome,
    nonce,
    proof,
    proves,
)

CONNECT_S = 2.0


class Reached:
    """A connection to an agent, before it runs something."""

    def __init__(self, host: HostConfig, connection: AgentConnection, welcome: Welcome) -> None:
        self.host = host
        self.python = welcome.python
        self.directory = welcome.directory
        self._connection = connection

    async def free_ports(self, address: str, count: int) -> list[int]:
        """TCP ports of the host that nobody uses now.

        Raises:
            HostUnreachable: the address is not the host's, all its ports are taken, or the agent has gone.
        """
        with _naming(self.host):
            self._connection.send(AskPorts(address, count))
            async with asyncio.timeout(HANDSHAKE_S):
                ports = await self._connection.expect(Ports)
        if ports.problem:
            raise HostUnreachable(f"{self.host.name}: {ports.problem}.", remedy=ports.remedy)
        return ports.numbers

    async def run(
        self, command: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str] | None = None
    ) -> RemoteProcess:
        """Start a process. `files`: variable -> text of a file on that host that it shall name.

        Raises:
            HostUnreachable: the process could not be started; says why.
        """
        with _naming(self.host):
            self._connection.send(Run(list(command), dict(variables), dict(files or {})))
            async with asyncio.timeout(HANDSHAKE_S + SILENT_S):
                answer = await self._connection.receive()
                while isinstance(answer, KeepAlive):
                    answer = await self._connection.receive()
        if isinstance(answer, Ended):
            raise HostUnreachable(f"{self.host.name}: {answer.problem}.")
        if not isinstance(answer, Started):
            raise HostUnreachable(f"{self.host.name}: its agent closed the connection.")
        return RemoteProcess(self.host, self._connection, answer.pid)

    def close(self) -> None:
        self._connection.close()


async def reach(host: HostConfig, port: int, secret: str) -> Reached:
    """Connect to the agent of a host.

    Raises:
        HostUnreachable: nobody answers there, or somebody who does not know the cluster's secret.
    """
    with _naming(host, port):
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host.address, port)
    connection = AgentConnection(reader, writer, FromAgent)
    try:
        with _naming(host, port):
            async with asyncio.timeout(HANDSHAKE_S):
                challenge = await connection.expect(Challenge)
                mine = nonce()
                connection.send(Proof(mine, proof(secret, "server", challenge.nonce, mine)))
                welcome = await connection.expect(Welcome)
            if not proves(welcome.mac, secret, "agent", challenge.nonce, mine):
                raise FrameError("it does not know this cluster's secret")
    except HostUnreachable:
        connection.close()
        raise
    connection.limit = MAX_FRAME
    return Reached(host, connection, welcome)


@contextlib.contextmanager
def _naming(host: HostConfig, port: int = 0) -> Iterator[None]:
    """Whatever breaks inside is an error that names the host."""
    try:
        yield
    except TimeoutError as error:
        raise _unreachable(host, port, "no answer") from error
    except (OSError, FrameError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreachable(host, port, said) from error


def _unreachable(host: HostConfig, port: int, why: str) -> HostUnreachable:
    where = f" at {host.address}" + (f" port {port}" if port else "")
    return HostUnreachable(
        f"The agent of {host.name}{where} cannot be used: {why.rstrip('.')}.",
        remedy=f"Is {host.name} on, and its cable in? `phalanx status` and `phalanx doctor` say what is wrong there.",
    )


class RemoteProcess:
    """What `asyncio.subprocess.Process` is for a child: the same names, the same meaning.

    When the agent falls silent the process counts as ended with `PEER_LOST`: it may live on for a moment, but nobody
    here will hear of it, and its agent ends it.
    """

    def __init__(self, host: HostConfig, connection: AgentConnection, pid: int) -> None:
        self.host = host
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: asyncio.StreamReader | None = asyncio.StreamReader()
        self._connection = connection
        self._ended = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._connection.send(Signal(number))

    async def _listen(self) -> None:
        status, why = int(ExitCode.PEER_LOST), "its agent closed the connection"
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    message = await self._connection.receive()
                if isinstance(message, Output):
                    assert self.stderr is not None
                    self.stderr.feed_data(message.data)
                elif isinstance(message, Ended):
                    status, why = message.status, ""
                    break
                elif message is None:
                    break
        except TimeoutError:
            why = f"its agent has been silent for {SILENT_S:g} s"
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

    async def _beat(self) -> None:
        while True:
            self._connection.send(KeepAlive())
            await asyncio.sleep(BEAT_S)
