"""A gateway in the event loop of a test, and a client for it; or one in a thread."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import aiohttp

from phalanx.gateway.gateway_process import Gateway
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.connection_table import Deadlines
from phalanx.http.listening import bind

CHAT = "/v1/chat/completions"
LIMIT_S = 120.0  # for what takes milliseconds on a machine that is not busy
QUICK: dict[str, Any] = {
    "health_check_interval_secs": 0.05,
    "health_check_timeout_secs": 60.0,
    "retry_initial_backoff_ms": 5.0,
    "shutdown_grace_period_secs": 5.0,
}
"""Settings with which a test need not wait. No replica is down because it is slow, unless a test says so."""


class Client:
    """A client of a gateway."""

    def __init__(self, gateway: Gateway, url: str, session: aiohttp.ClientSession, key: str | None) -> None:
        self.gateway = gateway
        self.session = session
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """A request as aiohttp's context manager."""
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else {"json": body}
        return self.session.request(method, self.url + path, headers={**self._headers, **more}, **(data or {}))

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.request("GET", path) as response:
            return response.status, await response.json()

    async def ask(self, path: str = CHAT, model: str = "m", **fields: Any) -> tuple[int, Any]:
        """Status and JSON of an answer that is not streamed."""
        async with self.request("POST", path, {"model": model, "messages": [], **fields}) as response:
            return response.status, await response.json()

    async def stream(self, path: str = CHAT, model: str = "m", **fields: Any) -> list[Any]:
        """The events of a stream: JSON, or "[DONE]"."""
        async with self.request("POST", path, {"model": model, "messages": [], "stream": True, **fields}) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def until_up(self, n: int) -> None:
        """Wait for so many replicas to be up."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                with suppress(aiohttp.ClientError):  # the connection may have missed a short deadline of clients
                    _, health = await self.get("/health")
                    if sum(reason == "ok" for reason in health.get("replicas", {}).values()) >= n:
                        return
                await asyncio.sleep(0.01)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, which hangs only if something is wrong."""

    async def limited() -> None:
        async with asyncio.timeout(280):
            await scenario

    asyncio.run(limited())


def errors(events: list[Any]) -> list[str]:
    """The messages of a stream's errors."""
    return [event["error"]["message"] for event in events if event != "[DONE]" and "error" in event]


def text_of(events: list[Any]) -> str:
    """The text of a stream's events."""
    chunks = [event for event in events if event != "[DONE]" and "choices" in event]
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


@asynccontextmanager
async def gateway(
    *urls: str,
    key: str | None = None,
    up: int | None = None,
    deadlines: Deadlines = Deadlines(),
    tls: str | None = None,
    metrics: socket.socket | None = None,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A gateway before these replicas, once `up` of them are up (all, unless given); drained at the end.

    Args:
        key: that the client sends.
        tls: certificate of the gateway, which the client trusts.
        metrics: listens for those who ask for /metrics; None: they ask at the gateway's own port.
    """
    config = GatewayConfig(port=0, worker_urls=urls, **{**QUICK, **settings})
    with bind("127.0.0.1", 0) as listener:
        running = Gateway(config, listener, metrics, deadlines)
        task = asyncio.create_task(running.run())
        starting = asyncio.create_task(running.ready.wait())
        await asyncio.wait((task, starting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            starting.cancel()
            task.result()
        try:
            trusted = ssl.create_default_context(cafile=tls) if tls is not None else True
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=trusted)) as session:
                url = f"{'https' if tls is not None else 'http'}://localhost:{running.port}"
                client = Client(running, url, session, key)
                await client.until_up(len(urls) if up is None else up)
                yield client
        finally:
            running.stop()
            async with asyncio.timeout(LIMIT_S):
                assert await task == 0


@contextmanager
def running_gateway(*urls: str, **settings: Any) -> Iterator[str]:
    """A gateway before these replicas in a thread of its own, for clients that block; its origin."""
    origins: queue.SimpleQueue[str] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def main() -> None:
        async with gateway(*urls, **settings) as client:
            origins.put(client.url)
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    try:
        yield origins.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        assert not thread.is_alive(), "the gateway did not stop"
        loop.close()
