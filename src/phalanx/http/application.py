"""What all requests to a server and all its answers have in common: request ids, host names, pages of other origins,
HEAD, errors, clients that leave, places of the reserve. Knows no paths but those of health.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, StreamReader, web

from phalanx.errors import AdminKeyRefused, EngineUnavailable, ForbiddenHost, PhalanxError
from phalanx.http.allowed_hosts import AllowedHosts, name_of
from phalanx.http.connection import refusal
from phalanx.http.connection_table import HEALTH_PATHS
from phalanx.http.cross_origin import CrossOrigin
from phalanx.http.error_responses import CLIENT_GONE, error_body, headers_of, not_http, public_failure
from phalanx.http.http_exchange import STREAM_HEADERS, Answer, EventStream, Exchange, json_answer
from phalanx.http.refused_keys import RefusedKeys
from phalanx.http.request_ids import REQUEST_ID
from phalanx.http.router import Router

log = logging.getLogger(__name__)

SLOW_WRITE_S = 30.0  # a stream ends if its client reads nothing for so long


class Application:
    """Answers requests by the routes.

    Args:
        answered: called with the endpoint and the status of every answer.
    """

    def __init__(
        self, router: Router, hosts: AllowedHosts, origins: CrossOrigin, answered: Callable[[str, int], None]
    ) -> None:
        self.router = router
        self._hosts = hosts
        self._origins = origins
        self._answered = answered
        self._refused = RefusedKeys("A wrong admin key")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's handler."""
        exchange = Exchange(request)
        connection = exchange.connection
        connection.request_begins(request)
        try:
            if connection.fault:
                return refusal(not_http(connection.fault))
            response = await self._respond(exchange)
            log.debug("%s %s (%s): %d", exchange.method, exchange.path, exchange.id, response.status)
        except ConnectionError:  # the client left
            if exchange.response is None:
                self._answered(exchange.endpoint, CLIENT_GONE)
            connection.abort()
            return exchange.response or web.Response(status=CLIENT_GONE)
        finally:
            connection.request_ends()
        if connection.place.reserved or not drop_rest(request.content):
            response.force_close()
        return response

    async def _respond(self, exchange: Exchange) -> web.StreamResponse:
        """The response; of a stream, once it has ended."""
        try:
            reply = await self._reply(exchange)
            if isinstance(reply, EventStream):
                return await self._stream(exchange, reply)
        except PhalanxError as error:
            reply = self._failure(exchange, error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s %s (%s) failed", exchange.method, exchange.path, exchange.id)
            if exchange.response is not None:  # it is cut off, so that its client sees it
                raise ConnectionAbortedError from None
            said = f"Internal server error; the server's log has the details of {exchange.id}."
            reply = error_answer(PhalanxError(said), exchange.path)
        self._answered(exchange.endpoint, reply.status)
        exchange.connection.note_written(len(reply.body))
        headers = self._headers(exchange, reply.media_type, reply.headers)
        return web.Response(status=reply.status, body=reply.body, headers=headers)

    async def _reply(self, exchange: Exchange) -> Answer | EventStream:
        host = exchange.headers.get("host")
        if host is not None and not self._hosts.accept(host):  # HTTP/1.0 may leave it out; browsers never do
            name = name_of(host)[:80]
            raise ForbiddenHost(
                f"{name!r} is not a name of this server; start it with --allowed-hosts NAME to allow it."
            )
        if exchange.connection.place.reserved and exchange.path not in HEALTH_PATHS:
            raise EngineUnavailable("The server has as many connections as it may have.")
        if (headers := self._origins.preflight(exchange.method, exchange.headers)) is not None:
            is_let_in = "Access-Control-Allow-Origin" in headers
            said = b"OK" if is_let_in else b"Disallowed CORS origin"
            return Answer(said, 200 if is_let_in else 400, "text/plain; charset=utf-8", headers)
        route, exchange.rest = self.router.find(exchange.method, exchange.path)
        exchange.endpoint = route.path
        if route.guard is not None:
            route.guard(exchange)
        return await route.handler(exchange)

    def _failure(self, exchange: Exchange, error: PhalanxError) -> Answer:
        if isinstance(error, AdminKeyRefused):
            self._refused.note(exchange.address, time.monotonic())
        answer = error_answer(error, exchange.path)
        if answer.status >= 500 and not isinstance(error, EngineUnavailable):
            log.error("%s %s (%s): %s", exchange.method, exchange.path, exchange.id, error)
        return answer

    async def _stream(self, exchange: Exchange, stream: EventStream) -> web.StreamResponse:
        """Send a stream.

        Raises:
            ConnectionError: its client has left, or reads nothing.
        """
        headers = self._headers(exchange, f"{stream.media_type}; charset=utf-8", STREAM_HEADERS)
        exchange.response = response = web.StreamResponse(headers=headers)
        if exchange.request.version < HttpVersion11:  # which has no chunks: the connection's end is the stream's
            response.force_close()
        self._answered(exchange.endpoint, response.status)
        try:
            await exchange.unless_lost(_send(exchange, response, stream))
        except TimeoutError:
            log.warning("a stream's reader took nothing for %g s; given up", SLOW_WRITE_S)
            raise ConnectionAbortedError from None
        except PhalanxError as error:  # a status would be a second head
            raise RuntimeError("a stream that has begun tells its errors itself") from error
        finally:
            stream.close()
            await stream.events.aclose()
        return response

    def _headers(self, exchange: Exchange, media_type: str, more: Mapping[str, str]) -> dict[str, str]:
        origins = self._origins.headers(exchange.headers)
        return {"Content-Type": media_type, REQUEST_ID: exchange.id, "Server": "phalanx", **more, **origins}


def error_answer(error: PhalanxError, path: str) -> Answer:
    """The answer to a request that failed before its first byte."""
    failure = public_failure(error)
    return json_answer(error_body(failure, path), failure.status, headers_of(error))


def drop_rest(content: StreamReader) -> bool:
    """Drop what of a body was not read. False if more of it comes, or may come."""
    if not content.is_eof() or content.exception() is not None:
        return False
    content.read_nowait()
    return True


async def _send(exchange: Exchange, response: web.StreamResponse, stream: EventStream) -> None:
    request, connection = exchange.request, exchange.connection
    await response.prepare(request)
    async for piece in stream.events:
        if not piece:
            continue
        connection.note_written(len(piece))
        await response.write(piece)
        if connection.writing_paused:
            async with asyncio.timeout(SLOW_WRITE_S):
                await request.writer.drain()
    await response.write_eof()
