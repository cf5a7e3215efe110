"""aiohttp's connection of a gateway's client with a place and deadlines; `acceptor.py` accepts and watches it."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler

from phalanx.http.acceptor import unsent
from phalanx.http.connection_table import KEEP_ALIVE_S, ConnectionPlace, ConnectionTable, Deadlines, TransferProgress
from phalanx.http.error_responses import Failure, not_http, openai_error
from phalanx.http.lingering import LingeringTransport
from phalanx.http.request_head import MAX_BYTES, MAX_LINES, fault_of, head_of

log = logging.getLogger(__name__)

READ_ENCODINGS = "the gateway reads gzip, deflate, and bodies without an encoding."

PIECE_BYTES = 1 << 14  # parsed in one call: 2,700 chunks of one byte, in some 5 ms
FRAMING_BYTES = 1 << 14  # of a body, beside an eighth of it: more than 1,024 small chunks


class HttpConnection(RequestHandler):
    """See the module's docstring. Its handler calls `body_begins`, `body_ends` and `mark_busy`."""

    def __init__(
        self, place: ConnectionPlace, table: ConnectionTable, deadlines: Deadlines, server: web.Server
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None for no log
            lingering_time=0,  # the transport lingers, after any refusal
            max_line_size=MAX_BYTES,
            max_field_size=MAX_BYTES,
            max_headers=MAX_LINES,
        )
        self.place = place
        self._table = table
        self._deadlines = deadlines
        self._received = 0
        self._written = 0
        self._header_since: float | None = time.monotonic()  # None: no header is awaited or under way
        self._reads_body = False
        self._body = TransferProgress(deadlines.body_s, deadlines.progress_bytes)
        self._answer = TransferProgress(deadlines.read_s, deadlines.progress_bytes)
        self._open: LingeringTransport | None = None
        self._is_malformed = False
        self._head_bytes = 0  # bytes that came since the last head or body was whole
        self._coming: StreamReader | None = None  # the body under way, or the last one
        self._framing = 0  # bytes that came for it and are not of it

    # asyncio's protocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The acceptor has a place for this connection."""
        assert isinstance(transport, asyncio.Transport)
        self._open = LingeringTransport(transport, self._is_sending)
        self.place.close = transport.abort
        super().connection_made(self._open)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client left, or was closed."""
        self._table.remove(self.place)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._open is None:
            return
        if self._open.is_closing():  # TLS hands on what it has decrypted already
            self._open.drop(len(data))
            return
        self._received += len(data)
        if self._header_since is None and self._current_request is None and data:
            self._header_since = time.monotonic()
        for at in range(0, len(data) or 1, PIECE_BYTES):  # without data, aiohttp goes on with what it held back
            self._parse(data[at : at + PIECE_BYTES])
            if self._open.is_closing():
                return

    def _parse(self, piece: bytes) -> None:
        """Hand on a piece. A body in chunks of a few bytes costs the loop far more than its size, and extensions of
        chunks are no body at all: they could go on for ever."""
        before = self._coming.total_bytes if self._coming is not None else 0
        n_requests = self._request_count
        super().data_received(piece)
        if self._request_count != n_requests:
            self._coming, self._framing, self._head_bytes = self._messages[-1][1], 0, 0  # the piece had its header
        elif self._coming is not None and not self._coming.is_eof():
            self._framing += len(piece) - (self._coming.total_bytes - before)
            if self._framing > FRAMING_BYTES + self._coming.total_bytes // 8 and not self._reading_paused:
                log.debug("closing a connection whose body is mostly the framing of its chunks")
                self.abort()
        elif not self._buffer_paused:  # else it waits in the parser
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_BYTES + PIECE_BYTES:
                self._refuse_head()

    def _refuse_head(self) -> None:
        """Answer 400 to a head that goes on and on: the parser's own limits are of single lines."""
        assert self._open is not None
        self._is_malformed = True
        body = msgspec.json.encode(openai_error(not_http(f"its head has more than {MAX_BYTES:,} bytes")))
        if self._current_request is None and not self._messages:
            head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self._open.write(head.encode() + b"Server: phalanx\r\nConnection: close\r\n\r\n" + body)
        self.force_close()

    def _is_sending(self) -> bool:
        """Whether more of a request comes, or has come, than was read."""
        coming = self._coming is not None and not self._coming.is_eof()
        return coming or self._is_malformed or bool(self._messages)

    # The handler ---------------------------------------------------------------------------------------------

    def request_begins(self) -> None:
        """A whole header has come."""
        self._header_since = None

    def mark_busy(self) -> None:
        """The request's key is accepted: this connection makes way for no other."""
        self._table.mark_busy(self.place)

    def request_ends(self) -> None:
        """The answer is written. The connection has been idle from now on."""
        if self._open is not None and not self._open.is_closing():
            self._table.mark_busy(self.place)
            self._table.mark_idle(self.place)
            if self._messages:  # the next request came with this one
                self._header_since = time.monotonic()

    def body_begins(self) -> None:
        """The handler reads the request's body."""
        self._reads_body = True
        self._body.reset()

    def body_ends(self) -> None:
        """It has read it."""
        self._reads_body = False

    def note_written(self, n_bytes: int) -> None:
        """So many bytes of an answer were handed to the transport."""
        self._written += n_bytes

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is not HTTP, or to what a bug of the gateway left unanswered."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer that has begun cannot become an error")
        self._is_malformed = status < 500
        failure = not_http(str(message)[:200].rstrip("."))
        if status < 500 and "content-encoding" in str(message):  # aiohttp's words for what it lacks a package for
            said = f"This Content-Encoding is not supported; {READ_ENCODINGS}"
            failure = Failure(status=415, type="invalid_request_error", message=said)
        elif status < 500:
            fault = str(message).partition("\n\n")[
                0
            ]  # the parser's words; then it quotes the line, which may be a key's
            log.debug("malformed request of %s: %s", request.remote, fault)
        else:
            log.error("%s %s failed", request.method, request.path, exc_info=exc)
            said = "Internal error; the gateway's log has its details."
            failure = Failure(status=status, type="server_error", message=said)
        return refusal(failure)

    # The acceptor --------------------------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """The connection is closed, and nothing waits to be sent."""
        return self._open is None or (self._open.is_closing() and not unsent(self._open))

    @property
    def n_unsent(self) -> int:
        """Bytes of answers that the client has not taken yet."""
        return unsent(self._open) if self._open is not None else 0

    def overdue(self, now: float) -> str:
        """Why this connection is to be closed, in words; empty if it is in time."""
        limit = self._deadlines
        if self._header_since is not None and now - self._header_since > limit.header_s:
            return f"without a whole header in {limit.header_s:g} s"
        if self._reads_body and self._body.is_stalled(self._received, now):
            return f"without progress of a body in {limit.body_s:g} s"
        if not (waiting := self.n_unsent):
            self._answer.reset()
        elif self._answer.is_stalled(self._written - waiting, now):
            return f"that did not read their answer for {limit.read_s:g} s"
        return ""

    def abort(self) -> None:
        """Close at once, unsent bytes and all: a client that does not read would keep a mere `close` waiting."""
        if self._open is not None:
            self._open.abort()


def raw_header(request: web.BaseRequest, name: bytes) -> str:
    """A request's header as the client sent it, one character per byte; "" without one."""
    found = (value for header, value in request.raw_headers if header.lower() == name)
    return next(found, b"").decode("latin-1")


def refusal(failure: Failure) -> web.Response:
    """The answer to a request that was not read as one, after which the connection is closed."""
    response = web.json_response(openai_error(failure), status=failure.status, headers={"Server": "phalanx"})
    response.force_close()
    return response


def head_fault(request: web.BaseRequest) -> str:
    """What is wrong with a request's head, in words, if a gateway is to send it on; empty if nothing is."""
    version = request.version
    if version.major != 1:
        return "its version is not HTTP/1.1"
    return fault_of(head_of(request.method, request.raw_path, version.minor, request.raw_headers), added=True)
