"""Handles what all requests to a server or a gateway have in common: request ids, host names, CORS, HEAD, errors,
clients that leave, and the reserve of connections.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp import StreamReader, web

from phalanx.errors import AdminKeyRefused, EngineUnavailable, ForbiddenHost, PhalanxError, ReplicaError
from phalanx.http.allowed_hosts import name_of
from phalanx.http.connection import refusal
from phalanx.http.connection_table import HEALTH_PATHS
from phalanx.http.cross_origin import CrossOrigin
from phalanx.http.error_responses import CLIENT_GONE, error_body, headers_of, not_http, public_failure
from phalanx.http.http_exchange import STREAM_HEADERS, Answer, EventStream, Exchange, Reply, json_answer
from phalanx.http.refused_keys import RefusedKeys
from phalanx.http.router import Router

log = logging.getLogger(__name__)


class Application:
    """Answers requests by the routes.

    Args:
        is_own: whether a Host header is accepted.
        answered: called with the endpoint and the status of every answer, once it has ended.
        name: "server" or "gateway", for errors.
    """

    def __init__(
        self,
        router: Router,
        is_own: Callable[[str], bool],
        origins: CrossOrigin,
        answered: Callable[[str, int], None],
        *,
        name: str = "server",
    ) -> None:
        self.router = router
        self.is_draining = False
        """Close each connection after its answer."""
        self._is_own = is_own
        self._origins = origins
        self._answered = answered
        self._name = name
        self.refused_admins = RefusedKeys("A wrong admin key")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's handler."""
        exchange = Exchange(request)
        connection = exchange.connection
        connection.request_begins(request)
        try:
            if connection.fault:
                return refusal(not_http(connection.fault))
            response = await self._respond(exchange)
        except ConnectionError:  # the client left
            connection.abort()
            response = exchange.response or web.Response(status=CLIENT_GONE)
        finally:
            connection.request_ends()
        self._answered(exchange.endpoint, response.status)
        log.debug("%s %s (%s): %d%s", exchange.method, exchange.path, exchange.id, response.status, exchange.remark)
        if connection.slot.reserved or self.is_draining or not drop_rest(request.content):
            response.force_close()
        return response

    async def _respond(self, exchange: Exchange) -> web.StreamResponse:
        """The response; of a stream, once it has ended."""
        exchange.own_headers.update(self._origins.headers(exchange.headers))
        try:
            reply = await self._reply(exchange)
            if isinstance(reply, EventStream):
                return await _stream(exchange, reply)
        except PhalanxError as error:
            reply = self._failure(exchange, error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s %s (%s) failed", exchange.method, exchange.path, exchange.id)
            if exchange.response is not None:  # cut the answer off, so that the client notices
                raise ConnectionAbortedError from None
            message = f"Internal server error; the server's log has the details of {exchange.id}."
            reply = error_answer(PhalanxError(message), exchange.path)
        if isinstance(reply, web.StreamResponse):
            return reply
        exchange.connection.note_written(len(reply.body))
        headers = exchange.head(reply.headers)
        if reply.media_type:
            headers["Content-Type"] = reply.media_type
        return web.Response(status=reply.status, body=reply.body, headers=headers)

    async def _reply(self, exchange: Exchange) -> Reply:
        host = exchange.headers.get("host")
        if host is not None and not self._is_own(host):  # HTTP/1.0 may leave it out; browsers never do
            name = name_of(host)[:80]
            raise ForbiddenHost(
                f"{name!r} is not a name of this {self._name}; start it with --allowed-hosts NAME to allow it."
            )
        if exchange.connection.slot.reserved and exchange.path not in HEALTH_PATHS:
            raise EngineUnavailable(f"The {self._name} has as many connections as it may have (--max-connections).")
        if (headers := self._origins.preflight(exchange.method, exchange.headers)) is not None:
            is_allowed = "Access-Control-Allow-Origin" in headers
            text = "OK" if is_allowed else self._origins.refusal(exchange.headers)
            return Answer(text.encode(), 200 if is_allowed else 400, "text/plain; charset=utf-8", headers)
        route, exchange.rest = self.router.find(exchange.method, exchange.path)
        exchange.endpoint = route.path
        if route.guard is not None:
            route.guard(exchange)
        return await route.handler(exchange)

    def _failure(self, exchange: Exchange, error: PhalanxError) -> Answer:
        if isinstance(error, AdminKeyRefused):
            self.refused_admins.note(exchange.address, time.monotonic())
        answer = error_answer(error, exchange.path)
        is_bad = answer.status >= 500 and not isinstance(error, (EngineUnavailable, ReplicaError))
        level = logging.ERROR if is_bad else logging.DEBUG
        log.log(level, "%s %s (%s): %s", exchange.method, exchange.path, exchange.id, error)
        return answer


def error_answer(error: PhalanxError, path: str) -> Answer:
    """The answer to a request that failed before its first byte."""
    failure = public_failure(error)
    return json_answer(error_body(failure, path), failure.status, headers_of(error))


def drop_rest(content: StreamReader) -> bool:
    """Drop the unread rest of a body. False if more of it may come."""
    if not content.is_eof() or content.exception() is not None:
        return False
    content.read_nowait()
    return True


async def _stream(exchange: Exchange, stream: EventStream) -> web.StreamResponse:
    """Send a stream.

    Raises:
        ConnectionError: its client has left, or does not read.
    """

    async def send() -> web.StreamResponse:
        await exchange.begin(200, {"Content-Type": f"{stream.media_type}; charset=utf-8", **STREAM_HEADERS})
        async for piece in stream.events:
            if piece:
                await exchange.write(piece)
        return await exchange.end()

    try:
        return await exchange.unless_lost(send())
    except PhalanxError as error:  # a status would be a second head
        raise RuntimeError("a begun stream must send its errors itself") from error
    finally:
        stream.close()
        await stream.events.aclose()
