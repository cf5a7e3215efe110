"""One client's request, and how an endpoint answers it: whole, as a stream, or by sending the answer itself."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from msgspec import Struct
from multidict import CIMultiDict

from phalanx.errors import InvalidRequest
from phalanx.http.connection import HttpConnection

T = TypeVar("T")

JSON = "application/json"
REQUEST_ID = "x-request-id"
SANE = re.compile(r"[A-Za-z0-9._:/@=+-]{1,128}")
"""A client's own id that is repeated: without characters of markup or line ends."""
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would buffer the events
}


class Answer(Struct, frozen=True):
    """A whole answer."""

    body: bytes = b""
    status: int = 200
    media_type: str = JSON  # "": given in its headers, or none
    headers: Mapping[str, str] = {}


GREETING = Answer(
    b"phalanx is running. It speaks the APIs of OpenAI, Anthropic and Ollama.\n", media_type="text/plain; charset=utf-8"
)
"""Of `GET /`, where clients of several APIs look for a server."""


class EventStream(Struct, frozen=True):
    """An answer whose pieces are sent as they come. `close` is called once, however it ends."""

    events: AsyncGenerator[bytes]
    close: Callable[[], None]
    media_type: str


Reply = Answer | EventStream | web.StreamResponse
"""The last is an answer that the exchange has sent itself, by `begin` and `end`."""


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] = {}) -> Answer:
    """A whole answer of JSON."""
    return Answer(msgspec.json.encode(value), status, JSON, headers)


class Exchange:
    """See the module's docstring.

    Args:
        request: of an `HttpConnection`.
    """

    def __init__(self, request: web.BaseRequest) -> None:
        connection = request.protocol
        assert isinstance(connection, HttpConnection)
        self.request = request
        self.connection = connection
        self.path = request.path.rstrip("/") or "/"
        """`/v1/models/` means `/v1/models`, without a redirect, which many clients do not follow after a POST."""
        self.headers: Mapping[str, str] = headers_of_client(request)
        """Names in lower case, the first of several values; one character per byte."""
        given = self.headers.get(REQUEST_ID, "")
        self.id = given if SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        self.endpoint = "unknown"
        """The path of the matching route, as declared."""
        self.rest = ""
        """The value of that path's parameter."""
        self.owner: str | None = None
        """Of the request's API key; "" if none is needed, None before the check."""

        self.own_headers: dict[str, str] = {REQUEST_ID: self.id, "Server": "phalanx"}
        """Headers of every answer; aiohttp would name itself and its version."""
        self.response: web.StreamResponse | None = None
        """The answer once it has begun, with its final status."""
        self.remark = ""
        """Added to the answer's line in the log."""

    @property
    def method(self) -> str:
        """As the client wrote it."""
        return self.request.method

    @property
    def query(self) -> Mapping[str, str]:
        """The query's parameters."""
        return self.request.query

    @property
    def address(self) -> str:
        """The client's, without its port."""
        return self.request.remote or "an unknown address"

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body. From here on, new connections cannot displace this one if its key was accepted. Without a key they
        can, also during the answer: a stranger could read it slowly."""
        if self.owner is not None and not self.connection.slot.reserved:
            self.connection.mark_busy()
        if self.headers.get("expect", "").lower() == "100-continue":
            await self.request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.request.writer.output_size = 0  # as aiohttp's own handler: the answer has not begun
        self.connection.body_begins()
        try:
            while piece := await self.request.content.readany():
                yield piece
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"The body cannot be read: {error}.") from error
        finally:
            self.connection.body_ends()

    def head(self, given: Mapping[str, str]) -> CIMultiDict[str]:
        """These headers of an answer, and those of every answer."""
        headers = CIMultiDict(given)
        headers.update(self.own_headers)
        return headers

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of an answer of unknown length."""
        self.response = web.StreamResponse(status=status, headers=self.head(headers))
        if self.request.version < HttpVersion11:  # without chunks, the end of the connection ends the answer
            self.response.force_close()
        await self.response.prepare(self.request)

    async def write(self, data: bytes) -> None:
        """Send a piece. Waits for a client that reads slowly, until the connection's deadline closes it."""
        assert self.response is not None
        self.connection.note_written(len(data))
        await self.response.write(data)
        if self.connection.writing_paused:
            await self.request.writer.drain()

    async def end(self) -> web.StreamResponse:
        """End the answer."""
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """See `HttpConnection.unless_lost`."""
        return await self.connection.unless_lost(work)


def headers_of_client(request: web.BaseRequest) -> Mapping[str, str]:
    """A request's headers; see `Exchange.headers`."""
    found = reversed(request.raw_headers)
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in found}
