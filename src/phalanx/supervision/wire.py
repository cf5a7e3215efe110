"""Messages between the server process and the leader: msgpack in frames (`dist/frames.py`).

Does not know what the messages mean (`types.py`) nor who starts whom (`process.py`, `boot.py`).
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
        """The whole frame."""
        return frame(self._encoder.encode(message))

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
