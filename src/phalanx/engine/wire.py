"""Frames between the server process and the leader: a 4-byte little-endian length and a msgpack message.

Does not know what the messages mean (`types.py`) nor who starts whom (`process.py`, `boot.py`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Generic, TypeVar

import msgspec

from phalanx.errors import EngineError
from phalanx.types import FromEngine, ToEngine

T = TypeVar("T")

MAX_FRAME = 256 << 20  # bytes; a request of a million token ids is 5 MB
_LENGTH = struct.Struct("<I")


class Codec(Generic[T]):
    """Encodes any message and decodes messages of one union type."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: object) -> bytes:
        """The whole frame."""
        payload = self._encoder.encode(message)
        if len(payload) > MAX_FRAME:
            raise EngineError(f"A message of {len(payload)} bytes exceeds the frame limit of {MAX_FRAME}.")
        return _LENGTH.pack(len(payload)) + payload

    def decode(self, payload: bytes) -> T:
        """A message from a frame's payload.

        Raises:
            EngineError: the peer speaks another protocol.
        """
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise EngineError(f"Unreadable message from the peer: {error}.") from error


def server_codec() -> Codec[FromEngine]:
    """For the server's side: reads what the engine sends."""
    return Codec(FromEngine)


def engine_codec() -> Codec[ToEngine]:
    """For the engine's side: reads what the server sends."""
    return Codec(ToEngine)


def _checked(length: int) -> int:
    if length > MAX_FRAME:
        raise EngineError(f"The peer announces a frame of {length} bytes; the limit is {MAX_FRAME}.")
    return length


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next payload, or None at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(_checked(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next payload from a blocking socket, or None at the end of the stream."""
    header = _receive_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    return _receive_exactly(connection, _checked(length))


def _receive_exactly(connection: socket.socket, n: int) -> bytes | None:
    buffer = bytearray(n)
    view, got = memoryview(buffer), 0
    while got < n:
        try:
            count = connection.recv_into(view[got:])
        except ConnectionError:
            return None
        if count == 0:
            return None
        got += count
    return bytes(buffer)
