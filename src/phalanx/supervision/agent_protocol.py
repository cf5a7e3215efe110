"""The protocol between a server and the agents of other hosts, inside TLS, in which each end verifies
the other.

    agent                                       server
    Welcome(python, directory, credentials)  ->
                                             <- AskPorts, RunRank, RunDaemon, Signal, KeepAlive
    Ports, Started, Output, Ended, KeepAlive ->

The server starts at most one process per connection, and the agent ends it with the connection.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from phalanx.dist.frames import frame, read_frame
from phalanx.errors import FrameError
from phalanx.tls.failures import explain

ANSWER_S = 5.0  # for an answer that takes the other end no work
FRAME_LIMIT = 1 << 20  # bytes per message, either way
MAX_UNSENT = 1 << 22  # bytes of output that wait for a slow network: some 40,000 lines
KEEP_ALIVE_S = 0.5  # between two `KeepAlive` messages
HEARTBEAT_TIMEOUT_S = 2.5  # without a message the other end counts as gone; a little longer than between ranks

AgentPath = Annotated[str, Meta(pattern=r"^/[^\x00-\x1f\x7f]*\Z", max_length=4096)]
"""A whole path, so that it can be no option and no separator of the command lines that it becomes a part of."""
FileVariable = Literal["MLX_HOSTFILE", "MLX_IBV_DEVICES"]
"""Environment variables that name a file for MLX's backend."""


class AgentWelcome(Struct, frozen=True, tag="Welcome"):
    """The agent's first message. Paths on its host: its interpreter, a directory for sockets, its credentials' file."""

    python: AgentPath
    directory: AgentPath
    credentials: AgentPath


class AskPorts(Struct, frozen=True, tag="AskPorts"):
    """Ask for `count` free TCP ports on an address of the agent's host."""

    address: str
    count: Annotated[int, Meta(ge=1, le=64)]


class Ports(Struct, frozen=True, tag="Ports"):
    """Ports that were free when the agent looked. Empty, with `problem` and `remedy`, if it found none."""

    numbers: list[Annotated[int, Meta(ge=1, le=65535)]]
    problem: str = ""
    remedy: str = ""


class RunRank(Struct, frozen=True, tag="RunRank"):
    """Start `phalanx rank`. The agent first ends the process of an earlier connection."""

    arguments: list[str]
    variables: dict[str, str] = {}
    files: dict[FileVariable, str] = {}  # -> text; the agent writes a file and sets the variable to its path


class RunDaemon(Struct, frozen=True, tag="RunDaemon"):
    """Start Open MPI's daemon `prted`, as `RunRank` starts a rank."""

    arguments: list[str]


class Started(Struct, frozen=True, tag="Started"):
    """The process runs."""

    pid: int


class Output(Struct, frozen=True, tag="Output"):
    """A piece of the process's stdout or stderr."""

    data: bytes


class ProcessEnded(Struct, frozen=True, tag="Ended"):
    """The process has ended. `status` is negative for a signal; `problem` says why a process could not start."""

    status: Annotated[int, Meta(ge=-64, le=255)]
    problem: str = ""


class Signal(Struct, frozen=True, tag="Signal"):
    """Send a signal to the process and its descendants."""

    number: Annotated[int, Meta(ge=1, le=31)]


class KeepAlive(Struct, frozen=True, tag="KeepAlive"):
    """Heartbeat. The server sends it, the agent answers it."""


ToAgent = AskPorts | RunRank | RunDaemon | Signal | KeepAlive
FromAgent = AgentWelcome | Ports | Started | Output | ProcessEnded | KeepAlive

Expected = TypeVar("Expected")


class AgentConnection:
    """One end of a connection: sends and receives whole messages.

    Args:
        union: the messages that this end receives; the decoder refuses others.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, union: object) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(union)

    def send(self, message: object) -> None:
        """Queue a message without blocking; does nothing on a closed connection."""
        if not self._writer.is_closing():
            self._writer.write(frame(msgspec.msgpack.encode(message)))

    def offer(self, message: object) -> None:
        """As `send`, but leaves the message out while more than `MAX_UNSENT` bytes wait to be sent."""
        if not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() <= MAX_UNSENT:
            self.send(message)

    async def receive(self) -> object | None:
        """The next message; None after the other end has closed.

        Raises:
            FrameError: the bytes are not a message of this protocol, exceed the limit, or were changed on the way; or
                the other end refuses the connection.
        """
        try:
            payload = await read_frame(self._reader, FRAME_LIMIT)
        except ssl.SSLError as error:
            refused = "ALERT" in (error.reason or "")
            what = "It refuses the connection" if refused else "Its bytes were changed on the way"
            raise FrameError(f"{what} ({explain(error)}).") from error
        try:
            return None if payload is None else self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise FrameError(f"Unreadable message from the other end: {error}.") from error

    async def expect(self, kind: type[Expected]) -> Expected:
        """The next message other than `KeepAlive`, which must be of this kind.

        Raises:
            FrameError: it is of another kind, or the other end has closed.
        """
        while isinstance(message := await self.receive(), KeepAlive):
            pass
        if not isinstance(message, kind):
            what = "closed the connection" if message is None else f"sent {type(message).__name__}"
            raise FrameError(f"The other end {what} instead of {kind.__name__}.")
        return message

    def close(self) -> None:
        """Close the connection, after what was queued has been sent."""
        self._writer.close()
