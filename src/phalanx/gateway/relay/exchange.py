"""One client's request and the answer it gets: reads the body, writes pieces, ends with an error where one has to be.

Knows the connection to the client, and no replica.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from phalanx.errors import InvalidRequest, PhalanxError, RequestTooLarge, WrongMediaType
from phalanx.gateway.relay.api_kinds import Dialect, dialect_of, error_event
from phalanx.http.body_budget import BodyLease
from phalanx.http.connection import READ_ENCODINGS, HttpConnection, raw_header
from phalanx.http.error_responses import error_body, failure_of, headers_of
from phalanx.http.request_ids import REQUEST_ID, request_id
from phalanx.http.shares import Shares

HEADERS = {"Server": "phalanx"}  # aiohttp would name itself and its version
JSON = "application/json"
ENCODINGS = frozenset(("", "identity", "gzip", "deflate"))
"""Those of bodies that aiohttp reads without further packages. It passes those over that it does not know."""
KEEP_ALIVE = {False: b": keep-alive\n\n", True: b" "}
"""What keeps a stream's client waiting, and means nothing; whether it is of lines of JSON."""


def body_lease(budget: Shares, owner: str) -> BodyLease:
    """The memory of one request's body.

    Args:
        owner: whose share it is of.
    """
    return BodyLease(budget, owner, "The gateway holds as many bytes of requests as it may (by --max-body-mb).")


class ClientExchange:
    """See the module's docstring.

    Args:
        arrived: when its header had come; monotonic seconds.
    """

    def __init__(self, request: web.BaseRequest, arrived: float) -> None:
        connection = request.protocol
        assert isinstance(connection, HttpConnection)
        self.request = request
        self.connection = connection
        self.arrived = arrived
        self.path = request.path.rstrip("/") or "/"
        self.raw_path = request.rel_url.raw_path.rstrip("/") or "/"
        """As the client wrote it, with its escapes."""
        self.dialect: Dialect = dialect_of(self.path)
        self.id = request_id(raw_header(request, b"x-request-id"), lambda: uuid.uuid4().hex)
        self.owner = ""
        self.response: web.StreamResponse | None = None
        self.first_text_s: float | None = None
        """From its arrival until the first text, reasoning or call of the answer was passed on (G3)."""
        self.n_read = 0
        """Bytes of its body."""
        self.n_tokens = 0
        """Of prompt and answer, that its key is charged if it ends now: as its client leaves, or with its answer."""

    @property
    def share(self) -> str:
        """Whose part of what all clients share it takes: its key's, without keys its address's."""
        return self.owner or self.connection.place.address

    @property
    def has_begun(self) -> bool:
        """A part of the answer is on its way, so that its status stands."""
        return self.response is not None

    async def read_body(self, most: int, memory: BodyLease) -> bytes:
        """The request's body, decoded if it came with a Content-Encoding. Its memory is the caller's to free.

        Raises:
            RequestTooLarge: it has more than `most` bytes.
            QueueFull: there is no memory for it.
            WrongMediaType: it has an encoding that the gateway does not read.
            InvalidRequest: its encoding is damaged, or it ended early.
        """
        encoding = self.request.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ENCODINGS:
            raise WrongMediaType(f"Content-Encoding is {encoding[:80]!r}; {READ_ENCODINGS}")
        pieces: list[bytes] = []
        if self.request.headers.get("Expect", "").lower() == "100-continue":
            await self.request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.request.writer.output_size = 0  # as aiohttp's own handler: the answer has not begun
        self.connection.body_begins()
        try:
            while piece := await self.request.content.readany():
                self.n_read += len(piece)
                if self.n_read > most:
                    raise RequestTooLarge(f"The body is larger than {most:,} bytes.")
                memory.grow(self.n_read)
                pieces.append(piece)
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"The body cannot be read: {error}.") from error
        finally:
            self.connection.body_ends()
        return b"".join(pieces)

    # The answer ----------------------------------------------------------------------------------------------

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of an answer whose length is not known."""
        self.response = web.StreamResponse(status=status, headers=self._headers(headers))
        await self.response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        """Send a piece. Waits for a client that reads slowly."""
        assert self.response is not None
        self.connection.note_written(len(data))
        await self.response.write(data)

    async def keep_alive(self) -> None:
        """Give the client of a stream a sign of life, unless bytes are on their way to it. Does not wait for it."""
        if not self.connection.n_unsent:
            await self.write(KEEP_ALIVE[self.dialect == "ollama"])

    async def end(self) -> None:
        """The answer is whole."""
        assert self.response is not None
        await self.response.write_eof()

    async def end_with(self, error: PhalanxError, *, is_stream: bool, number: int = 0) -> None:
        """End an answer that has begun. One that cannot say so is cut off, so that its client sees it."""
        if is_stream:
            await self.write(error_event(self.dialect, error_body(failure_of(error), self.path), number=number))
            await self.end()
        else:
            self.connection.abort()

    def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> web.Response:
        """A whole answer."""
        return web.Response(status=status, body=body, headers=self._headers(headers))

    def json(self, status: int, value: Any, headers: Mapping[str, str] = {}) -> web.Response:
        """A whole answer of JSON."""
        return self.whole(status, msgspec.json.encode(value), {"Content-Type": JSON, **headers})

    def error(self, error: PhalanxError) -> web.Response:
        """The answer to a request that failed before its first byte."""
        failure = failure_of(error)
        return self.json(failure.status, error_body(failure, self.path), headers_of(error))

    def _headers(self, given: Mapping[str, str]) -> CIMultiDict[str]:
        headers = CIMultiDict(given)
        headers.update(HEADERS)
        headers[REQUEST_ID] = self.id
        return headers
