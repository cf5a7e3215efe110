"""Reads request bodies, and decodes those with a Content-Encoding, in pieces of bounded size.

A small body may decode to a large one (a "zip bomb"), so the bytes of every piece are counted before the next one is
decoded.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Protocol

from phalanx.errors import InvalidRequest, RequestTooLarge, WrongMediaType
from phalanx.http.body_budget import BodyLease

PIECE_BYTES = 1 << 16  # decoded at a time, in a tenth of a millisecond
GZIP = 16 + zlib.MAX_WBITS  # zlib's number for gzip's header and checksum


class Upload(Protocol):
    """A request, as the reader of its body sees it."""

    headers: Mapping[str, str]

    def pieces(self) -> AsyncGenerator[bytes]:
        """The body, as it comes.

        Raises:
            ConnectionError: the client left before its end.
            InvalidRequest: it is not valid HTTP.
        """


async def read_body(request: Upload, most: int, memory: BodyLease, *, n_before: int = 0) -> bytes:
    """The request's body, decoded. The caller frees its memory.

    Args:
        most: bytes that it may have, both as sent and decoded.
        n_before: bytes before it that count towards neither `most` nor `memory`.

    Raises:
        WrongMediaType: the Content-Encoding is neither gzip nor none.
        RequestTooLarge: by its Content-Length, or while it is read.
        QueueFull: there is no memory for it.
        ConnectionError, InvalidRequest: as `Upload.pieces`, or the encoding is damaged.
    """
    too_large = RequestTooLarge(f"The request body is larger than the {most} bytes this server accepts.")
    most += n_before
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > most:
        raise too_large
    gzip = _Gzip() if _is_gzip(request.headers.get("content-encoding", "")) else None
    body = bytearray()
    n_received = 0
    async with aclosing(request.pieces()) as chunks:
        async for chunk in chunks:
            n_received += len(chunk)
            for piece in (chunk,) if gzip is None else gzip.feed(chunk):
                body += piece
                if max(len(body), n_received) > most:
                    raise too_large
                memory.grow(len(body) - n_before)
                await asyncio.sleep(0)  # a chunk may decode to a thousand times its size
    if gzip is not None:
        gzip.finish()
    return bytes(body)


def _is_gzip(header: str) -> bool:
    """Whether this Content-Encoding is gzip, rather than none.

    Raises:
        WrongMediaType: an encoding that this server does not read.
    """
    name = header.strip().lower()[:80]
    if name not in ("", "identity", "gzip", "x-gzip"):
        raise WrongMediaType(f"Content-Encoding is {name!r}; this server reads gzip, and bodies without an encoding.")
    return name.endswith("gzip")


class _Gzip:
    """The decoder of one body."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decode more of the body, piece by piece; a piece may be empty.

        Raises:
            InvalidRequest: the data is damaged.
        """
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
        """Check that the body is whole, at its end.

        Raises:
            InvalidRequest: it is not whole.
        """
        if not self._inflate.eof:
            raise InvalidRequest("The gzip body ends before its end.")
