"""Decodes JSON of clients and replicas; every fault in it is one kind of error."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """A function that decodes JSON as `kind`, after a byte order mark if there is one.

    Raises (the decoder):
        msgspec.DecodeError: it is not JSON, is nested too deeply, or is not UTF-8.
        msgspec.ValidationError: it is JSON of another kind; a DecodeError too.
    """
    read = msgspec.json.Decoder(kind).decode

    def decode(data: bytes) -> T:
        try:
            return read(data.removeprefix(BOM_UTF8))
        except RecursionError as error:
            raise msgspec.DecodeError("it is nested too deeply") from error
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"byte 0x{error.object[error.start]:02x} is not UTF-8") from error

    return decode
