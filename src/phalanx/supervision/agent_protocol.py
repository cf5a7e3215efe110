"""The protocol between a server and the agents of other hosts: messages, and a mutual proof of the cluster's secret.

    agent                          server
    Challenge(nonce)        ->
                            <-     Proof(own nonce, HMAC(secret, "server", both nonces))
    Welcome(HMAC(secret, "agent", both nonces), python, directory)  ->
                            <-     AskPorts, Run, Signal, KeepAlive
    Ports, Started, Output, Ended, KeepAlive  ->

The server starts at most one process per connection, and the agent ends it with the connection. The messages are
authenticated at the start and not encrypted. Does not know what the process does.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from typing import TypeVar

import msgspec
from msgspec import Struct

from phalanx.dist.frames import frame, read_frame
from phalanx.dist.handshake import prove
from phalanx.errors import FrameError

NONCE_BYTES = 32
UNAUTHENTICATED_LIMIT = 4096  # bytes per message before the handshake is over
HANDSHAKE_S = 5.0
KEEP_ALIVE_S = 0.5  # between two `KeepAlive` messages
SILENT_S = 2.5  # without a message the other end counts as gone; a little longer than between ranks


class Challenge(Struct, frozen=True, tag=True):
    """The agent's first message."""

    nonce: bytes


class Proof(Struct, frozen=True, tag=True):
    """The server proves that it knows the secret."""

    nonce: bytes
    mac: bytes


class Welcome(Struct, frozen=True, tag=True):
    """The agent proves that it knows the secret. `python`: its interpreter; `directory`: for files and sockets."""

    mac: bytes
    python: str
    directory: str


class AskPorts(Struct, frozen=True, tag=True):
    """Ask for `count` free TCP ports on an address of the agent's host."""

    address: str
    count: int


class Ports(Struct, frozen=True, tag=True):
    """Ports that were free when the agent looked. Empty, with `problem` and `remedy`, if it found none."""

    numbers: list[int]
    problem: str = ""
    remedy: str = ""


class Run(Struct, frozen=True, tag=True):
    """Start a process. The agent first ends the process of an earlier connection."""

    command: list[str]
    variables: dict[str, str] = {}
    files: dict[str, str] = {}  # variable -> text; the agent writes a file and sets the variable to its path


class Started(Struct, frozen=True, tag=True):
    """The process runs."""

    pid: int


class Output(Struct, frozen=True, tag=True):
    """A piece of the process's stdout or stderr."""

    data: bytes


class Ended(Struct, frozen=True, tag=True):
    """The process has ended. `status` is negative for a signal; `problem` says why a process could not start."""

    status: int
    problem: str = ""


class Signal(Struct, frozen=True, tag=True):
    """Send a signal to the process and its descendants."""

    number: int


class KeepAlive(Struct, frozen=True, tag=True):
    """Heartbeat. The server sends it, the agent answers it."""


ToAgent = Proof | AskPorts | Run | Signal | KeepAlive
FromAgent = Challenge | Welcome | Ports | Started | Output | Ended | KeepAlive

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
        self.limit = UNAUTHENTICATED_LIMIT  # bytes per received message

    def send(self, message: object) -> None:
        """Queue a message without blocking; does nothing on a closed connection."""
        if not self._writer.is_closing():
            self._writer.write(frame(msgspec.msgpack.encode(message)))

    async def receive(self) -> object | None:
        """The next message; None after the other end has closed.

        Raises:
            FrameError: the bytes are not a message of this protocol, or exceed `limit`.
        """
        payload = await read_frame(self._reader, self.limit)
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
            said = "closed the connection" if message is None else f"sent {type(message).__name__}"
            raise FrameError(f"The other end {said} instead of {kind.__name__}.")
        return message

    def close(self) -> None:
        self._writer.close()


def nonce() -> bytes:
    """`NONCE_BYTES` random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proves(mac: bytes, secret: str, role: str, agents: bytes, servers: bytes) -> bool:
    """Whether both nonces have their length and `mac` is the proof for this secret and role. Constant time."""
    whole = len(agents) == len(servers) == NONCE_BYTES
    return whole and hmac.compare_digest(mac, proof(secret, role, agents, servers))


def proof(secret: str, role: str, agents: bytes, servers: bytes) -> bytes:
    """The MAC by which a role ("agent" or "server") proves that it knows the secret; over both nonces."""
    return prove(secret.encode(), role, agents, servers)
