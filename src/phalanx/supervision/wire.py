"""Messages between the server process and the leader: msgpack in frames (`dist/frames.py`).

`types.py` documents the messages.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from phalanx.dist.frames import frame
from phalanx.errors import EngineError
from phalanx.types import FromEngine, ToEngine

T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes any message and decodes messages of one union type."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def encode(self, message: object) -> bytes:
        """A message as a whole frame."""
        return frame(self._encoder.encode(message))

    def decode(self, payload: bytes) -> T:
        """A message from a frame's payload.

        Raises:
            EngineError: the payload is not a message of the union.
        """
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise EngineError(f"Unreadable message from the peer: {error}.") from error


def server_codec() -> Codec[FromEngine]:
    """The server process's codec: decodes the engine's messages."""
    return Codec(FromEngine)


def engine_codec() -> Codec[ToEngine]:
    """The engine's codec: decodes the server process's messages."""
    return Codec(ToEngine)
