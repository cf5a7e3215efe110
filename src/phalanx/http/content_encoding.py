"""Decodes bodies that were sent with a Content-Encoding, in pieces of bounded size.

A small body may decode to a large one (a "zip bomb"), so the caller counts the bytes of every piece before it takes the
next one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

from phalanx.errors import InvalidRequest, WrongMediaType

PIECE_BYTES = 1 << 16  # decoded at a time, in a tenth of a millisecond
GZIP = 16 + zlib.MAX_WBITS  # zlib's number for gzip's header and checksum


class Decoding(Protocol):
    """The decoder of one body."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decode more of the body, piece by piece; a piece may be empty.

        Raises:
            InvalidRequest: the data is damaged.
        """

    def finish(self) -> None:
        """Check that the body is whole.

        Raises:
            InvalidRequest: it is not.
        """


def decoding_of(header: str) -> Decoding:
    """The decoder for a Content-Encoding header.

    Raises:
        WrongMediaType: an encoding that this server does not read.
    """
    name = header.strip().lower()
    if name in ("", "identity"):
        return _Identity()
    if name in ("gzip", "x-gzip"):
        return _Gzip()
    raise WrongMediaType(f"Content-Encoding is {name[:80]!r}; this server reads gzip, and bodies without an encoding.")


class _Identity:
    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data

    def finish(self) -> None:
        pass


class _Gzip:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate.eof:
                raise InvalidRequest("The gzip body goes on after its end; send one member.")
            try:
                piece = self._inflate.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise InvalidRequest(f"The gzip body is damaged: {error}.") from error
            yield piece
            data = self._inflate.unconsumed_tail or self._inflate.unused_data

    def finish(self) -> None:
        if not self._inflate.eof:
            raise InvalidRequest("The gzip body ends before its end.")
