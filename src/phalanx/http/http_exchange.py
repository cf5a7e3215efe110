"""One client's request, and how an endpoint answers: whole, as a stream, or by sending it itself. Knows no paths."""

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
"""What of a client's own id is repeated: nothing that could be taken for markup or for another line of a log."""
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would buffer the events
}


class Answer(Struct, frozen=True):
    """A whole answer."""

    body: bytes = b""
    status: int = 200
    media_type: str = JSON  # "": one of its headers, or none
    headers: Mapping[str, str] = {}


GREETING = Answer(
    b"phalanx is running. It speaks the APIs of OpenAI, Anthropic and Ollama.\n", media_type="text/plain; charset=utf-8"
)
"""`GET /`: clients of several APIs look there whether there is a server."""


class EventStream(Struct, frozen=True):
    """An answer whose pieces are sent as they come. `close` is called once, however it ends."""

    events: AsyncGenerator[bytes]
    close: Callable[[], None]
    media_type: str


Reply = Answer | EventStream | web.StreamResponse
"""The last one is an exchange's own, which `begin` and `end` have sent."""


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
        """`/v1/models/` means `/v1/models`. A redirect would not do: many clients follow none after a POST."""
        self.headers: Mapping[str, str] = headers_of_client(request)
        """Names in lower case, of values the first; one character per byte."""
        given = self.headers.get(REQUEST_ID, "")
        self.id = given if SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        self.endpoint = "unknown"
        """The path of the route that took the request, as it is declared."""
        self.rest = ""
        """What stands for the parameter of that path."""
        self.owner: str | None = None
        """Stands for the API key of the request; "" if none is needed, None before it was looked at."""

        self.own_headers: dict[str, str] = {REQUEST_ID: self.id, "Server": "phalanx"}
        """That every answer has; aiohttp would name itself and its version."""
        self.response: web.StreamResponse | None = None
        """Of an answer that has begun, whose status stands."""
        self.remark = ""
        """What the log says more of its answer."""

    @property
    def method(self) -> str:
        """As the client wrote it."""
        return self.request.method

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters behind the path."""
        return self.request.query

    @property
    def address(self) -> str:
        """The client's; without a port."""
        return self.request.remote or "an unknown address"

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body. From here on a connection whose key was accepted makes way for no other. One without a key does,
        also while it is answered: a stranger could read its answers slowly."""
        if self.owner is not None and not self.connection.place.reserved:
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
        """The headers of an answer that has these."""
        headers = CIMultiDict(given)
        headers.update(self.own_headers)
        return headers

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of an answer whose length is not known."""
        self.response = web.StreamResponse(status=status, headers=self.head(headers))
        if self.request.version < HttpVersion11:  # which has no chunks: the connection's end is the answer's
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
        """The answer is whole."""
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """As of the connection."""
        return await self.connection.unless_lost(work)


def headers_of_client(request: web.BaseRequest) -> Mapping[str, str]:
    """A request's headers; see `Exchange.headers`."""
    found = reversed(request.raw_headers)
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in found}
