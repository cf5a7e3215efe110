"""JSON of clients and replicas: whatever is wrong with it is one kind of error."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """What reads JSON as `kind`. It passes over a byte order mark, as a server does.

    Raises (the decoder):
        msgspec.DecodeError: it is no JSON, is nested too deeply, or has bytes that are no UTF-8.
        msgspec.ValidationError: it is another kind of JSON; a DecodeError too.
    """
    read = msgspec.json.Decoder(kind).decode

    def decode(data: bytes) -> T:
        try:
            return read(data.removeprefix(BOM_UTF8))
        except RecursionError as error:
            raise msgspec.DecodeError("it is nested too deeply") from error
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"byte 0x{error.object[error.start]:02x} is no UTF-8") from error

    return decode
