"""A client's connection: aiohttp's, with a slot in the table and deadlines; `acceptor.py` accepts and watches it.

The one file that overrides aiohttp's `RequestHandler`, without using its private attributes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from phalanx.http.connection_table import KEEP_ALIVE_S, ConnectionSlot, ConnectionTable, Deadlines, TransferProgress
from phalanx.http.error_responses import Failure, not_http, openai_error
from phalanx.http.lingering import LingeringTransport
from phalanx.http.request_framing import RequestFraming
from phalanx.http.request_head import MAX_BYTES, MAX_LINES

log = logging.getLogger(__name__)

T = TypeVar("T")

HELD_BYTES = 64 << 10  # of pipelined requests that wait for an earlier answer; then reading pauses
STAND_IN = b"GET / HTTP/1.1\r\nHost: -\r\n\r\n"
"""Given to the parser in place of a refused head, so that the refusal follows the answers before it."""


class HttpConnection(RequestHandler):
    """See the module's docstring. Its handler calls `request_begins`, `request_ends`, `body_begins`, `body_ends` and
    `mark_busy`.

    Args:
        is_gateway: heads are forwarded, with further lines.
    """

    def __init__(
        self,
        slot: ConnectionSlot,
        table: ConnectionTable,
        deadlines: Deadlines,
        server: web.Server,
        *,
        is_gateway: bool,
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
            auto_decompress=False,
        )
        self.slot = slot
        self._table = table
        self._deadlines = deadlines
        self._received = 0
        self._written = 0
        self._header_since: float | None = time.monotonic()  # None: no header is expected or under way
        self._reads_body = False
        self._body = TransferProgress(deadlines.body_s, deadlines.progress_bytes)
        self._answer = TransferProgress(deadlines.read_s, deadlines.progress_bytes)
        self._open: LingeringTransport | None = None
        self._framing = RequestFraming(added=is_gateway)
        self._n_begun = self._n_ended = 0  # requests whose handler was called, and has answered
        self._request: web.BaseRequest | None = None  # the last one whose handler was called
        self._is_refused = False  # the last request, by the framing's rules or the parser's
        self._work: asyncio.Task[Any] | None = None  # cancelled when the client leaves

    # asyncio's protocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The acceptor has a slot for this connection."""
        assert isinstance(transport, asyncio.Transport)
        self._open = LingeringTransport(transport, self._is_sending)
        self.slot.close = transport.abort
        super().connection_made(self._open)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client left, or was closed."""
        self._table.remove(self.slot)
        super().connection_lost(exc)
        if self._work is not None:
            self._work.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._open is None:
            return
        if self._open.is_closing():  # TLS still delivers bytes that it has decrypted
            self._open.drop(len(data))
            return
        if not data:  # aiohttp continues with bytes that it held back
            super().data_received(data)
            return
        self._received += len(data)
        if self._header_since is None and self._n_begun == self._n_ended:
            self._header_since = time.monotonic()
        self._hand_on(data)

    def _hand_on(self, data: bytes) -> None:
        """Give aiohttp's parser what it may have of these bytes and of those held back."""
        assert self._open is not None
        if passed := self._framing.feed(data):
            super().data_received(passed)
        # After a fault nothing is read; the connection is closed after the earlier answers.
        self._open.hold_reading(bool(self._framing.fault) or self._framing.n_held > HELD_BYTES)
        if self._framing.fault and not self._is_refused:
            self._is_refused = True
            if not self._framing.in_body:
                super().data_received(STAND_IN)
            if self._request is not None:
                self._refuse_body(self._request)

    def _next_request(self) -> None:
        """The earlier request is answered: hand on the next one, if it has come."""
        if self._open is not None and not self._open.is_closing():
            self._hand_on(b"")

    def _refuse_body(self, request: web.BaseRequest) -> None:
        """Tell the handler that the rest of a request's body will not come, if it was refused."""
        if self.fault and self._framing.in_body:
            request.content.set_exception(web.RequestPayloadError(self._framing.fault))

    def _is_sending(self) -> bool:
        """Whether a part of a request is under way, or has come and was not read."""
        coming = self._framing.in_body or self._framing.in_head or self._framing.n_heads > self._n_begun
        return coming or self._is_refused

    # The handler ---------------------------------------------------------------------------------------------

    @property
    def fault(self) -> str:
        """What is wrong with the request that began last, as far as it has come; empty if nothing is."""
        n_heads = self._framing.n_heads + (not self._framing.in_body)  # a refused one is not counted
        return self._framing.fault if self._n_begun == n_heads else ""

    @property
    def is_lost(self) -> bool:
        """The client has left, or was closed."""
        return not self.connected

    def request_begins(self, request: web.BaseRequest) -> None:
        """A whole header has come."""
        self._header_since = None
        self._n_begun += 1
        self._request = request
        self._refuse_body(request)

    def mark_busy(self) -> None:
        """The request's key is accepted: no new connection displaces this one."""
        self._table.mark_busy(self.slot)

    def request_ends(self) -> None:
        """The answer is written. The connection is idle from now on."""
        self._n_ended += 1
        self._framing.n_answered = self._n_ended
        self._request = None
        if self._open is not None and not self._open.is_closing():
            self._table.mark_busy(self.slot)
            self._table.mark_idle(self.slot)
            if self._framing.in_head:  # the next request came with this one
                self._header_since = time.monotonic()
                asyncio.get_running_loop().call_soon(self._next_request)

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves or closes its side of the connection.

        Raises:
            ConnectionError: the client has left.
        """
        self._work = task = asyncio.create_task(work)
        if self.is_lost:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self.is_lost and (own is None or not own.cancelling()):
                raise ConnectionResetError("the client has left") from None
            raise
        finally:
            self._work = None

    def body_begins(self) -> None:
        """The handler reads the request's body."""
        self._reads_body = True
        self._body.reset()

    def body_ends(self) -> None:
        """The handler has read the body."""
        self._reads_body = False

    def give_up_body(self) -> None:
        """On shutdown aiohttp reads no more: abort the connection if a body is incomplete."""
        if self._reads_body and self._framing.in_body:
            self.abort()

    def note_written(self, n_bytes: int) -> None:
        """Count bytes of an answer that were handed to the transport."""
        self._written += n_bytes

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to malformed HTTP, or to a request that a bug left unanswered."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer that has begun cannot become an error")
        self._is_refused = status < 500
        if not self._is_refused:
            log.error("%s %s failed", request.method, request.path, exc_info=exc)
            text = "Internal error; the log has its details."
            return refusal(Failure(status=status, type="server_error", message=text))
        reason = str(message).partition("\n\n")[0]  # without the quoted line, which may have a key
        log.debug("malformed request of %s: %s", request.remote, reason)
        return refusal(not_http(str(message)[:200].rstrip(".")))

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
        """Why this connection is to be closed; empty if it keeps its deadlines."""
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
        """Close at once and drop unsent bytes: `close` would wait for a client that does not read."""
        if self._open is not None:
            self._open.abort()


def unsent(transport: asyncio.Transport) -> int:
    """Bytes that wait to be sent. 0 for a TLS connection that was closed twice, which asyncio ends within 30 s."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:  # of the None in place of its protocol
        return 0


def refusal(failure: Failure) -> web.Response:
    """The answer to a malformed request, after which the connection is closed."""
    response = web.json_response(openai_error(failure), status=failure.status, headers={"Server": "phalanx"})
    response.force_close()
    return response
