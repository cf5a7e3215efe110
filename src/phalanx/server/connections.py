"""uvicorn's HTTP connection with a place and deadlines, which `http/acceptor.py` accepts and watches."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import h11
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.errors import EngineUnavailable
from phalanx.http.acceptor import unsent
from phalanx.http.connection_table import HEALTH_PATHS, ConnectionPlace, ConnectionTable, Deadlines, TransferProgress
from phalanx.http.error_responses import not_http, openai_error
from phalanx.http.lingering import LINGER_BYTES, LingeringTransport
from phalanx.server.access import error_response
from phalanx.server.bounded_h11 import BoundedConnection
from phalanx.server.envelope import Envelope


class Connection(H11Protocol):
    """uvicorn's HTTP connection with a place and deadlines."""

    def __init__(self, place: ConnectionPlace, table: ConnectionTable, deadlines: Deadlines, **given: Any) -> None:
        super().__init__(**given)
        self.conn = self._bounded = BoundedConnection()
        self._place = place
        self._table = table
        self._deadlines = deadlines
        self._received = 0
        self._dropped = 0  # bytes of a body that came after its answer
        self._header_since: float | None = time.monotonic()  # None: no header is awaited or under way
        self._body = TransferProgress(deadlines.body_s, deadlines.progress_bytes)
        self._answer = TransferProgress(deadlines.read_s, deadlines.progress_bytes)
        self.app = self._noticing(only_health(self.app) if place.reserved else self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        self._lingering = LingeringTransport(transport, self._is_sending)
        super().connection_made(self._lingering)
        self._place.close = transport.abort

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self._place)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # TLS hands on what it has decrypted already
            self._lingering.drop(len(data))
            return
        self._received += len(data)
        if self._header_since is None and self.conn.their_state is h11.IDLE:
            self._header_since = time.monotonic()
        super().data_received(data)
        is_dropped = self.cycle is not None and self.cycle.response_complete and not self._awaits_request
        self._dropped = self._dropped + len(data) if is_dropped else 0
        if self._dropped > LINGER_BYTES:
            self.abort()  # it has had its answer for long
        self._note_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._table.mark_busy(self._place)
            self._table.mark_idle(self._place)  # from now on
        self._note_phase()
        if self._awaits_request and self._bounded.has_more:
            self._header_since = time.monotonic()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request; one whose answer has begun can only be cut off."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(openai_error(not_http(self._bounded.fault or "h11 cannot read it")))
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            answer = (h11.Response(status_code=400, headers=list(headers.items()), reason="Bad Request"),)
            for event in (*answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            if self.cycle is not None:
                self.cycle.disconnected = True  # the application may be about to answer
        self.transport.close()

    def _is_sending(self) -> bool:
        """Whether more of a request comes, or has come, than was read."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or self._bounded.has_more

    def _should_upgrade(self) -> bool:
        """No request changes the protocol. uvicorn would log a warning for each one that offers to: Java's HTTP client
        and some proxies do, with `Upgrade: h2c`, and go on in HTTP/1.1 as the standard says."""
        return False

    def _noticing(self, app: ASGIApp) -> ASGIApp:
        """The app; the connection is busy once the app, having accepted a request's key, asks for its body. One without
        a key may be displaced even while it is answered: a stranger could read its answers slowly."""

        async def noticing(scope: Scope, receive: Receive, send: Send) -> None:
            async def noticed() -> Message:
                if "owner" in scope["state"] and scope is self.scope and not self.cycle.response_complete:
                    self._table.mark_busy(self._place)
                return await receive()

            await app(scope, noticed, send)

        return noticing

    @property
    def _awaits_request(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _note_phase(self) -> None:
        if self.transport.is_closing():
            return
        if not self._awaits_request:
            self._header_since = None
        is_answered = self.cycle is not None and self.cycle.response_complete  # perhaps before its body has come
        if self._awaits_request or is_answered:
            self._table.mark_idle(self._place)
        elif self._place.reserved:
            self._table.mark_busy(self._place)  # one small answer without a key, and the connection is closed

    @property
    def is_gone(self) -> bool:
        """The connection is closed, and nothing waits to be sent."""
        return bool(self.transport.is_closing() and not unsent(self.transport))

    def overdue(self, now: float) -> str:
        """Why this connection is to be closed, in words; empty if it is in time."""
        limit = self._deadlines
        if self._awaits_request and self._header_since is not None and now - self._header_since > limit.header_s:
            return f"without a whole header in {limit.header_s:g} s"
        if self.conn.their_state is not h11.SEND_BODY or self.flow.read_paused:
            self._body.reset()
        elif self._body.is_stalled(self._received, now):
            return f"without progress of a body in {limit.body_s:g} s"
        waiting = unsent(self.transport)
        if not waiting:
            self._answer.reset()
        elif self._answer.is_stalled(self._bounded.sent - waiting, now):
            return f"that did not read their answer for {limit.read_s:g} s"
        return ""

    def abort(self) -> None:
        """Close at once, unsent bytes and all: a client that does not read would keep a mere `close` waiting."""
        self.transport.abort()


def only_health(app: ASGIApp) -> ASGIApp:
    """The app, reduced to /health: the rest is answered 503; the connection is closed after one answer."""
    error = EngineUnavailable("The server has as many connections as it may have.")

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error, scope["path"])(scope, receive, send)

    full = Envelope(refuse)

    async def reduced(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await (app if scope["path"] in HEALTH_PATHS else full)(scope, receive, closing)

    return reduced
