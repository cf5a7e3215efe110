"""What a client gets where an endpoint fails as none may: an answer that says so, or a stream that is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from phalanx.errors import InvalidRequest
from phalanx.http import service as http_service
from phalanx.http.application import Application
from phalanx.http.connection_table import ConnectionLimits
from phalanx.http.cross_origin import CrossOrigin
from phalanx.http.http_exchange import Answer, EventStream, Exchange
from phalanx.http.listening import bind
from phalanx.http.router import Route, Router
from phalanx.http.service import HttpService

ASKED = b"GET /%b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def _ended(endpoint: str, error: Exception) -> tuple[bytes, list[tuple[str, int]], list[str]]:
    """All that a client gets, the statuses that were counted, and which streams were closed."""
    counted: list[tuple[str, int]] = []
    closed: list[str] = []

    async def whole(exchange: Exchange) -> Answer:
        raise error

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        raise error

    async def stream(exchange: Exchange) -> EventStream:
        return EventStream(events(), lambda: closed.append("stream"), "text/event-stream")

    router = Router([Route("GET", "/whole", whole), Route("GET", "/stream", stream)])
    application = Application(router, lambda host: True, CrossOrigin(()), lambda *one: counted.append(one))
    with bind("127.0.0.1", 0) as listener:
        service = HttpService(application.handle, [listener], ConnectionLimits(10, 10))
        service.start()
        source, out = await asyncio.open_connection(*listener.getsockname())
        out.write(ASKED % endpoint.encode())
        found = b""
        with suppress(ConnectionResetError):
            while piece := await source.read(1 << 16):
                found += piece
        out.close()
        await service.stop()
    return found, counted, closed


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_a_bug_is_a_500_that_names_the_request(caplog: pytest.LogCaptureFixture) -> None:
    found, counted, _ = run(_ended("whole", ValueError("secret")))
    assert found.startswith(b"HTTP/1.1 500 ") and b"secret" not in found
    said = next(record for record in caplog.records if record.exc_info)
    assert str(said.args[2]).encode() in found.partition(b"\r\n\r\n")[2]
    assert counted == [("/whole", 500)]


@pytest.mark.parametrize("error", [ValueError("a bug"), InvalidRequest("An error that came too late.")])
def test_a_stream_that_fails_is_cut_off_and_gets_no_second_head(error, caplog) -> None:
    found, counted, closed = run(_ended("stream", error))
    assert found.startswith(b"HTTP/1.1 200 ") and found.count(b"HTTP/1.1") == 1
    assert not found.endswith(b"0\r\n\r\n")
    assert any(record.exc_info for record in caplog.records)
    assert counted == [("/stream", 200)] and closed == ["stream"]


def test_a_body_that_is_not_whole_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not become whole any more: aiohttp drops what comes once it ends."""
    monkeypatch.setattr(http_service, "FLUSH_S", 3600.0)
    is_read = asyncio.Event()

    async def upload(exchange: Exchange) -> Answer:
        async for _ in exchange.pieces():
            is_read.set()
        return Answer()

    async def scenario() -> None:
        application = Application(
            Router([Route("POST", "/upload", upload)]), lambda host: True, CrossOrigin(()), lambda *_: None
        )
        with bind("127.0.0.1", 0) as listener:
            service = HttpService(application.handle, [listener], ConnectionLimits(10, 10))
            service.start()
            source, out = await asyncio.open_connection(*listener.getsockname())
            out.write(b"POST /upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf")
            await is_read.wait()
            await service.stop()
            with suppress(ConnectionResetError):
                assert await source.read() == b""
            out.close()

    run(scenario())
