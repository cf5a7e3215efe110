"""Passes one replica's answer on to the client, at once and event by event, or holds it whole until it has come.

Where the client has the beginning of a stream already, from another replica, this one's events follow those.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing

import aiohttp
from aiohttp import web
from msgspec import Struct

from phalanx.errors import MalformedAnswer, PhalanxError
from phalanx.gateway.relay.attempt import UNAUTHORIZED, Attempt, response_headers
from phalanx.gateway.relay.body_peek import prompt_tokens, tokens_of, usage_in
from phalanx.gateway.relay.event_reader import EventReader
from phalanx.gateway.relay.exchange import ClientExchange
from phalanx.gateway.relay.transcript import Transcript
from phalanx.http.error_responses import SHOULD_RETRY

WHOLE_BYTES = 8 << 20  # of an answer that is no stream: up to here it is held, and asked for again where it breaks off
FED_BYTES = 4 << 10
"""Of a stream, read at a time: 4,096 bytes can be 2,048 events, which take 10 ms; others are served in between."""
FIRST_ERROR = 400  # of statuses
KEY_REMEDY = "It needs one of its own: --worker-key, or `key` where the replica is named."
HELD_S = 1.0  # that a piece waits for its client; a replica's connection stands still meanwhile
LINGER_S = 1.0  # for the end of a stream whose last event has come
STREAMS = {"text/event-stream": False, "application/x-ndjson": True}
"""Media types of streams; whether they are lines of JSON."""


class BufferedResponse(Struct, frozen=True):
    """An answer that has come whole; nothing of it is sent yet."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_final: bool = False  # the replica says that no other one would answer better
    fault: str = ""  # it is no client's matter: what a client is told instead

    def tokens(self, n_asked: int) -> int:
        """What it took, prompt included: as it says itself, else roughly; an error takes nothing.

        Args:
            n_asked: bytes of the request.
        """
        if self.status >= FIRST_ERROR:
            return 0
        known = tokens_of(usage_in(self.body))
        return prompt_tokens(n_asked) if known is None else known


class RelayedResponse(Struct, frozen=True):
    """An answer that is sent, to its end or with an error as its end."""

    response: web.StreamResponse
    error: PhalanxError | None = None  # the replica's fault, if the answer broke off


def relayed(exchange: ClientExchange, error: PhalanxError | None) -> RelayedResponse:
    """An answer whose last byte is written."""
    assert exchange.response is not None
    return RelayedResponse(exchange.response, error)


def tokens_so_far(exchange: ClientExchange, reader: EventReader) -> int:
    """What a stream has taken, prompt included: as it says itself, else by its records, else roughly."""
    known = tokens_of(reader.usage)
    return prompt_tokens(exchange.n_read) + reader.n_tokens if known is None else known


class Relay:
    """One attempt's answer.

    Args:
        begun: of the stream that the client has the beginning of; None: it has nothing yet.
        transcript: the replica was asked for records, which go there.
        on_first_byte: called when the attempt's first byte has been handed to the network.
        on_first_text: called when the answer's first text has; not if an earlier attempt's had.
    """

    def __init__(
        self,
        exchange: ClientExchange,
        attempt: Attempt,
        begun: EventReader | None,
        transcript: Transcript | None,
        *,
        on_first_byte: Callable[[], None],
        on_first_text: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._attempt = attempt
        self._transcript = transcript
        self._on_first_byte = on_first_byte
        self._on_first_text = on_first_text
        self._continues = begun is not None
        if begun is not None:
            begun.begin_again()
        self._has_sent = False
        self.reader = begun
        """Of a stream, once it is known to be one."""

    async def answer(self, response: aiohttp.ClientResponse) -> BufferedResponse | RelayedResponse:
        """Pass on what is a stream; hold what is not.

        Raises:
            PhalanxError: the replica broke off, whether the client has a part of the answer or not.
        """
        if response.status == UNAUTHORIZED and not self._attempt.is_clients_key:
            said = f"The replica {self._attempt.name} does not take the gateway's key (401)."
            return BufferedResponse(UNAUTHORIZED, {}, b"", fault=f"{said} {KEY_REMEDY}")
        if response.content_type in STREAMS and response.status == 200:
            return await self._stream(response)
        return await self._hold(response)

    async def _stream(self, response: aiohttp.ClientResponse) -> RelayedResponse:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise MalformedAnswer(f"The replica {self._attempt.name} compresses a stream ({encoding}) unasked.")
        lines = STREAMS[response.content_type]
        if self.reader is None:
            self.reader = EventReader(self._exchange.dialect, lines=lines, transcript=self._transcript)
        elif self.reader.lines != lines:
            raise MalformedAnswer(f"The replica {self._attempt.name} continues a stream as {response.content_type}.")
        try:
            await self._events(response, self.reader)
        except PhalanxError:
            if not self.reader.ended:  # what follows the last event decides nothing
                raise
        finally:
            self._exchange.n_tokens = tokens_so_far(self._exchange, self.reader)
        await self._exchange.end()
        return relayed(self._exchange, None)

    async def _events(self, response: aiohttp.ClientResponse, reader: EventReader) -> None:
        """Pass on whole events until the stream's end.

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
        if not self._exchange.has_begun:  # an empty stream of a dialect that has no last event
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
        """Pass on what follows the last event, and wait for the connection to be free."""
        try:
            async with asyncio.timeout(LINGER_S):
                async for piece in pieces:
                    await self._feed(response, reader, piece)
        except TimeoutError:
            pass  # the replica keeps it open; the attempt closes it

    async def _hold(self, response: aiohttp.ClientResponse) -> BufferedResponse | RelayedResponse:
        held = bytearray()
        headers = self._headers(response)
        async with aclosing(self._attempt.pieces()) as pieces:
            async for piece in pieces:
                held += piece
                if len(held) > WHOLE_BYTES:
                    if self._continues:
                        raise MalformedAnswer(f"The replica {self._attempt.name} continues a stream with no stream.")
                    return await self._pass_rest(response, bytes(held), pieces)
        is_final = response.headers.get(SHOULD_RETRY) == "false"
        return BufferedResponse(response.status, headers, bytes(held), is_final)

    async def _pass_rest(
        self, response: aiohttp.ClientResponse, held: bytes, pieces: AsyncIterator[bytes]
    ) -> RelayedResponse:
        """Pass on an answer that is too large to be held."""
        await self._send(response, held)
        async for piece in pieces:
            await self._send(response, piece)
        await self._exchange.end()
        return relayed(self._exchange, None)

    def _headers(self, response: aiohttp.ClientResponse) -> Mapping[str, str]:
        headers = response_headers(response.headers, response.status)
        headers["X-Phalanx-Replica"] = self._attempt.name
        return headers

    async def _send(self, response: aiohttp.ClientResponse, data: bytes) -> None:
        self._attempt.is_relaying = True
        if not self._exchange.has_begun:
            await self._exchange.begin(response.status, self._headers(response))
        began = asyncio.get_running_loop().time()
        await self._exchange.write(data)
        self._attempt.was_held |= asyncio.get_running_loop().time() - began > HELD_S
        if not self._has_sent:
            self._has_sent = True
            self._on_first_byte()
        has_text = self.reader.has_text if self.reader is not None else response.status < FIRST_ERROR
        if self._exchange.first_text_s is None and has_text:
            self._on_first_text()
        self._attempt.is_relaying = False
        self._attempt.note_byte()
