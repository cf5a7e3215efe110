"""What a server and the agents of other hosts say to each other: messages, and the proof that both may.

    agent                          server
    Challenge(nonce)        ->
                            <-     Proof(own nonce, HMAC(secret, "server", both nonces))
    Welcome(HMAC(secret, "agent", both nonces), python, directory)  ->
                            <-     AskPorts, Run, Signal, KeepAlive
    Ports, Started, Output, Ended, KeepAlive  ->

A connection has one process at most, which ends with it. This authenticates; it does not encrypt. Does not know what is
run.
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
STRANGER_BYTES = 4096  # per message before the proof
HANDSHAKE_S = 5.0
BEAT_S = 0.5
SILENT_S = 2.5  # without a message the other end is taken for gone: a little later than a rank notices


class Challenge(Struct, frozen=True, tag=True):
    """The agent's first word."""

    nonce: bytes


class Proof(Struct, frozen=True, tag=True):
    """The server knows the secret."""

    nonce: bytes
    mac: bytes


class Welcome(Struct, frozen=True, tag=True):
    """The agent knows it as well, and says what commands here begin with and where files may go."""

    mac: bytes
    python: str
    directory: str


class AskPorts(Struct, frozen=True, tag=True):
    """Find TCP ports that nobody uses on an address of the agent's host."""

    address: str
    count: int


class Ports(Struct, frozen=True, tag=True):
    """Free a moment ago; none if the address is not this host's or all are taken, with the reason and what to do."""

    numbers: list[int]
    problem: str = ""
    remedy: str = ""


class Run(Struct, frozen=True, tag=True):
    """Start a process. Whatever ran for an earlier connection is ended first."""

    command: list[str]
    variables: dict[str, str] = {}
    files: dict[str, str] = {}  # variable -> text of a file that it shall name


class Started(Struct, frozen=True, tag=True):
    pid: int


class Output(Struct, frozen=True, tag=True):
    """A piece of the process's stdout or stderr."""

    data: bytes


class Ended(Struct, frozen=True, tag=True):
    """The process is gone; negative for a signal. `problem` if it could not even start."""

    status: int
    problem: str = ""


class Signal(Struct, frozen=True, tag=True):
    """Send the process (and those below it) a signal."""

    number: int


class KeepAlive(Struct, frozen=True, tag=True):
    """A sign of life, both ways."""


ToAgent = Proof | AskPorts | Run | Signal | KeepAlive
FromAgent = Challenge | Welcome | Ports | Started | Output | Ended | KeepAlive

Expected = TypeVar("Expected")


class AgentConnection:
    """One end of a connection: whole messages in, whole messages out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, union: object) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(union)
        self.limit = STRANGER_BYTES

    def send(self, message: object) -> None:
        """Hand over a message; nothing happens on a line that is closed."""
        if not self._writer.is_closing():
            self._writer.write(frame(msgspec.msgpack.encode(message)))

    async def receive(self) -> object | None:
        """The next message; None at the end.

        Raises:
            FrameError: the other end is not one of us.
        """
        payload = await read_frame(self._reader, self.limit)
        try:
            return None if payload is None else self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise FrameError(f"Unreadable message from the other end: {error}.") from error

    async def expect(self, kind: type[Expected]) -> Expected:
        """The next message, which must be of this kind; beats are passed over.

        Raises:
            FrameError: it is another one, or the line has ended.
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
    return secrets.token_bytes(NONCE_BYTES)


def proves(mac: bytes, secret: str, role: str, agents: bytes, servers: bytes) -> bool:
    """Whether a MAC is right: nonces whole, secret known, role as claimed."""
    whole = len(agents) == len(servers) == NONCE_BYTES
    return whole and hmac.compare_digest(mac, proof(secret, role, agents, servers))


def proof(secret: str, role: str, agents: bytes, servers: bytes) -> bytes:
    return prove(secret.encode(), role, agents, servers)
