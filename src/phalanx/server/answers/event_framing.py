"""Server-sent events: framing, keep-alive comments, slow clients and clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from phalanx.server.fields.json_pieces import to_json

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
SLOW_WRITE_S = 30.0  # a stream ends if its client reads nothing for so long
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]

_LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Characters that JSON may contain, but that many clients take for the end of a line (httpx does: `str.splitlines`)."""


def one_line(payload: object) -> bytes:
    """JSON that no client takes for more than one line."""
    data = to_json(payload)
    for char, escaped in _LINE_ENDS.items():
        data = data.replace(char, escaped)
    return data


def event(payload: object) -> bytes:
    """One `data:` event."""
    return b"data: " + one_line(payload) + b"\n\n"


def named_event(name: str, payload: object) -> bytes:
    """One `data:` event with its name in an `event:` line before it."""
    return b"event: " + name.encode() + b"\n" + event(payload)


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. To be called only after the request's body was read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


class EventStream(Response):
    """A response that sends each item of `events` at once, and calls `close` once, however it ends."""

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None], media_type: str) -> None:
        super().__init__()
        self._head = [(b"content-type", f"{media_type}; charset=utf-8".encode()), *HEADERS]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        watcher = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            client_left = not writer.done()
            for task in (writer, watcher):
                task.cancel()
            await asyncio.gather(writer, watcher, return_exceptions=True)
            await self._events.aclose()
        if not client_left:
            writer.result()

    async def _write(self, send: Send) -> None:
        try:
            await _send(send, {"type": "http.response.start", "status": 200, "headers": self._head})
            async for chunk in self._events:
                await _send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
            await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log.warning("a stream's reader took nothing for %g s; given up", SLOW_WRITE_S)


async def _send(send: Send, message: Message) -> None:
    async with asyncio.timeout(SLOW_WRITE_S):
        await send(message)
