"""Passes one replica's answer on to the client: a stream event by event, any other answer once it is whole.

A stream may continue one that another replica has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing

import aiohttp

from phalanx.errors import MalformedAnswer, PhalanxError
from phalanx.gateway.relay.attempt import UNAUTHORIZED, Attempt, response_headers
from phalanx.gateway.relay.body_peek import prompt_tokens, tokens_of
from phalanx.gateway.relay.event_reader import EventReader
from phalanx.gateway.relay.exchange import ClientExchange
from phalanx.gateway.relay.traffic import BufferedResponse
from phalanx.http.error_responses import SHOULD_RETRY
from phalanx.http.stream_records import LINES

MAX_BUFFERED = 8 << 20  # bytes of an answer that is not a stream; up to here it can be retried if it breaks off
FED_BYTES = 4 << 10
"""Of a stream, read at a time: 4,096 bytes may be 2,048 events, which take 10 ms; then other requests get a turn."""
FIRST_ERROR = 400  # the lowest status of an error
KEY_REMEDY = "It needs one of its own: --worker-key, or `key` where the replica is named."
SLOW_CLIENT_S = 1.0  # a client that takes longer to read a piece holds up the replica's connection
LINGER_S = 1.0  # longest wait for the end of the body after the stream's last event
STREAMS = {"text/event-stream": False, LINES: True}
"""Media type of a stream -> whether it is lines of JSON."""


def tokens_so_far(exchange: ClientExchange, reader: EventReader) -> int:
    """Tokens of a stream, prompt included: as its events count them, else by its records, else estimated."""
    known = tokens_of(reader.usage)
    return prompt_tokens(exchange.n_read) + reader.n_tokens if known is None else known


class Relay:
    """Relays one attempt's answer. If its traffic already has a reader, the answer continues a begun stream.

    Args:
        is_clients_key: the replica gets the client's key, so the client gets its 401.
        on_first_byte: called when the attempt's first byte has been handed to the network.
        on_first_text: called when the answer's first text has been handed over, unless an earlier attempt sent text.
    """

    def __init__(
        self,
        exchange: ClientExchange,
        attempt: Attempt,
        *,
        is_clients_key: bool,
        on_first_byte: Callable[[], None],
        on_first_text: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._attempt = attempt
        self._traffic = attempt.traffic
        self._is_clients_key = is_clients_key
        self._on_first_byte = on_first_byte
        self._on_first_text = on_first_text

    async def answer(self, response: aiohttp.ClientResponse) -> BufferedResponse | None:
        """Pass a stream on; return any other answer.

        Raises:
            PhalanxError: the replica broke off; the client may have a part of the answer.
        """
        if response.status == UNAUTHORIZED and not self._is_clients_key:
            refused = f"The replica {self._attempt.name} does not take the gateway's key (401)."
            return BufferedResponse(UNAUTHORIZED, {}, b"", fault=f"{refused} {KEY_REMEDY}")
        if response.content_type in STREAMS and response.status == 200:
            await self._stream(response)
            return None
        return await self._buffer(response)

    async def _stream(self, response: aiohttp.ClientResponse) -> None:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise MalformedAnswer(f"The replica {self._attempt.name} compresses a stream ({encoding}) unasked.")
        lines = STREAMS[response.content_type]
        reader = self._traffic.reader
        if reader is None:
            transcript = self._traffic.transcript
            reader = self._traffic.reader = EventReader(self._exchange.dialect, lines=lines, transcript=transcript)
        elif reader.lines != lines:
            raise MalformedAnswer(f"The replica {self._attempt.name} continues a stream as {response.content_type}.")
        try:
            await self._events(response, reader)
        except PhalanxError:
            if not reader.ended:  # errors after the last event do not count
                raise
        finally:
            self._exchange.n_tokens = tokens_so_far(self._exchange, reader)

    async def _events(self, response: aiohttp.ClientResponse, reader: EventReader) -> None:
        """Pass whole events on until the stream's end.

        Raises:
            PhalanxError: it broke off, is malformed, or lacks the event that ends it.
        """
        async with aclosing(self._attempt.pieces()) as pieces:
            async for piece in pieces:
                await self._feed(response, reader, piece)
                if reader.fault or reader.ended:
                    break
            if reader.ended and not reader.fault:
                await self._linger(response, pieces, reader)
        if not reader.ended and (rest := reader.close()):
            await self._send(response, rest)
        if fault := reader.finish():
            raise MalformedAnswer(f"The replica {self._attempt.name} failed: {fault}.")
        if not self._exchange.has_begun:  # an empty stream, of a dialect without a last event
            await self._send(response, b"")

    async def _feed(self, response: aiohttp.ClientResponse, reader: EventReader, piece: bytes) -> None:
        for start in range(0, len(piece), FED_BYTES):
            part = piece[start : start + FED_BYTES]
            if whole := reader.feed(part):
                await self._send(response, whole)
            if reader.fault:
                return
            if len(part) == FED_BYTES:
                await asyncio.sleep(0)

    async def _linger(
        self, response: aiohttp.ClientResponse, pieces: AsyncIterator[bytes], reader: EventReader
    ) -> None:
        """Pass on the bytes after the last event, and wait for the connection to become idle."""
        try:
            async with asyncio.timeout(LINGER_S):
                async for piece in pieces:
                    await self._feed(response, reader, piece)
        except TimeoutError:
            pass  # the replica keeps it open; the attempt closes it

    async def _buffer(self, response: aiohttp.ClientResponse) -> BufferedResponse | None:
        body = bytearray()
        headers = self._headers(response)
        async with aclosing(self._attempt.pieces()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_BUFFERED:
                    if self._traffic.reader is not None:
                        raise MalformedAnswer(f"The replica {self._attempt.name} does not continue a stream as one.")
                    await self._send(response, bytes(body))
                    async for more in pieces:  # too large to buffer
                        await self._send(response, more)
                    return None
        is_final = response.headers.get(SHOULD_RETRY) == "false"
        return BufferedResponse(response.status, headers, bytes(body), is_final)

    def _headers(self, response: aiohttp.ClientResponse) -> Mapping[str, str]:
        headers = response_headers(response.headers, response.status)
        headers["X-Phalanx-Replica"] = self._attempt.name
        return headers

    async def _send(self, response: aiohttp.ClientResponse, data: bytes) -> None:
        exchange, traffic, clock = self._exchange, self._traffic, asyncio.get_running_loop().time
        is_first, began = traffic.passed_at is None, clock()
        traffic.is_relaying, traffic.passed_at = True, began
        if not exchange.has_begun:
            await exchange.http.begin(response.status, self._headers(response))
        await exchange.http.write(data)
        traffic.client_was_slow |= clock() - began > SLOW_CLIENT_S
        if is_first:
            self._on_first_byte()
        if exchange.first_text_s is None:
            reader = traffic.reader
            if reader.has_text if reader is not None else response.status < FIRST_ERROR:
                self._on_first_text()
        traffic.is_relaying = False
        self._attempt.note_byte()
