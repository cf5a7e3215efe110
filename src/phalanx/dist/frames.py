"""Frames: how phalanx separates messages in a stream of bytes, on all its sockets.

A frame is a version byte, a 4-byte little-endian length, and the payload. The version is that of this layout only;
payloads have versions of their own. A foreign peer is recognised by its first bytes (HTTP's `G` is not the version, a
random length exceeds the limit) before anything is stored.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from phalanx.errors import FrameError

VERSION = 1
MAX_FRAME = 256 << 20  # bytes; a request of a million token ids is 5 MB
_HEADER = struct.Struct("<BI")


def frame(payload: bytes) -> bytes:
    """The frame of a payload.

    Raises:
        FrameError: the payload is longer than a receiver accepts.
    """
    if len(payload) > MAX_FRAME:
        raise FrameError(f"A message of {len(payload)} bytes exceeds the frame limit of {MAX_FRAME}.")
    return _HEADER.pack(VERSION, len(payload)) + payload


def _check_version(start: bytes | bytearray) -> None:
    if start[0] != VERSION:
        raise FrameError(f"The peer does not send frames of version {VERSION}; it sent {bytes(start[:16])!r}.")


def _announced(header: bytes | bytearray, limit: int) -> int:
    """The length of the payload that follows a header, in bytes."""
    _check_version(header)
    _, length = _HEADER.unpack_from(header)
    if length > limit:
        raise FrameError(f"The peer announces a frame of {length} bytes; the limit is {limit}.")
    return int(length)


class Splitter:
    """Splits a stream, which arrives in pieces of any size, into payloads.

    `limit` is the largest accepted payload, in bytes; it may change between calls. The splitter buffers at most `limit`
    bytes and one piece.
    """

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Add a piece. Returns the payloads that it completes, in order.

        Raises:
            FrameError: the stream does not have this layout; it cannot be read any further.
        """
        self._buffer += piece
        payloads = []
        while self._buffer:
            _check_version(self._buffer)  # the first byte is enough to recognise a foreign peer
            if len(self._buffer) < _HEADER.size:
                break
            end = _HEADER.size + _announced(self._buffer, self.limit)
            if len(self._buffer) < end:
                break
            payloads.append(bytes(memoryview(self._buffer)[_HEADER.size : end]))
            del self._buffer[:end]
        return payloads

    @property
    def between_frames(self) -> bool:
        """Whether no frame is incomplete."""
        return not self._buffer


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> bytes | None:
    """The next payload, of at most `limit` bytes; None at the end of the stream.

    Raises:
        FrameError: as `Splitter.feed`.
    """
    try:
        header = await reader.readexactly(_HEADER.size)
        return await reader.readexactly(_announced(header, limit))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_frame(connection: socket.socket) -> bytes | None:
    """The next payload from a blocking socket; None at the end of the stream.

    Raises:
        FrameError: as `Splitter.feed`.
    """
    header = _receive_exactly(connection, _HEADER.size)
    return None if header is None else _receive_exactly(connection, _announced(header, MAX_FRAME))


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
