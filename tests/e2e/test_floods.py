"""What a client, or a stranger with a socket only, does to other clients of a real server: nothing (limits, turns)."""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from phalanx.cli.private import READY

ROWS, WAITING = 16, 16
CONNECTIONS = 256
IDLE = 250
FLOOD = 600
STREAMS = 16
TOKENS = 200
LOG_BYTES = 100_000
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
PIECES = (b"", b"GET / HT", HEAD, HEAD + b"Authorization: Bearer one\r\nContent-Length: 9000\r\n\r\n{")


class Attacked(Struct, frozen=True):
    """A `phalanx serve` of the demo model with two keys, "one" and "two"."""

    url: str
    log: Path
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].partition("/")[0])

    def client(self, key: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=300, limits=httpx.Limits())


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    log = tmp_path_factory.mktemp("flood") / "log"
    flags = ["--port", "0", "--api-key", "one", "--api-key", "two", "--max-num-seqs", str(ROWS)]
    flags += ["--max-connections", str(CONNECTIONS)]
    flags += ["--queue", str(WAITING), "--memory-guard-gb", "0.2", "--kv-cache-gb", "0.3", "--no-prefix-caching"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "serve", "demo", *flags], stdout=output, stderr=output
        )
    try:
        while not (ready := READY.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Attacked(ready[1], log, process.pid)
    finally:
        process.terminate()
        assert process.wait(120) == 0


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Holds the attack's sockets, with room for them in this process."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FLOOD + 500, old[1]), old[1]))
    try:
        with ExitStack() as stack:
            yield stack
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


async def stream(client: httpx.AsyncClient, tokens: int, begun: asyncio.Event | None = None, **more: Any) -> int:
    """Stream an answer of so many tokens. Returns the number of chunks; fails if the stream breaks off.

    Args:
        begun: set once the server has answered.
    """
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1, **more}
    lines = 0
    async with client.stream("POST", "/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        if begun is not None:
            begun.set()
        last = ""
        async for line in response.aiter_lines():
            lines += line.startswith("data: ")
            last = line or last
    assert last == "data: [DONE]"
    return lines


def open_sockets(stack: ExitStack, port: int, n: int) -> list[socket.socket]:
    """Connections that send nothing, or the begin of something."""
    found = []
    for i in range(n):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
        piece = PIECES[i % len(PIECES)]
        try:
            client.sendall(piece)
        except ConnectionError:
            pass  # displaced already
        found.append(client)
    return found


def wait_closed(clients: list[socket.socket], limit_s: float) -> None:
    """Wait until the server has closed every connection."""
    poller = select.poll()
    left = {client.fileno(): client for client in clients}
    for number in left:
        poller.register(number, select.POLLIN)
    deadline = time.monotonic() + limit_s
    while left:
        assert time.monotonic() < deadline, f"{len(left)} connections are still open"
        for number, _ in poller.poll(1000):
            try:
                if left[number].recv(1 << 16):
                    continue
            except ConnectionError:
                pass
            poller.unregister(number)
            del left[number]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_flood_of_connections_disturbs_neither_streams_nor_health(attacked: Attacked, sockets: ExitStack) -> None:
    before = attacked.log.stat().st_size
    health: list[int] = []
    over = threading.Event()

    def ask() -> None:
        url = attacked.url.removesuffix("/v1") + "/health"
        while not over.is_set():  # from an address of its own, like a load balancer: each address has its own limit
            with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=120) as client:
                health.append(client.get(url).status_code)
            time.sleep(0.1)

    def flood() -> None:
        idle = open_sockets(sockets, attacked.port, IDLE)
        more = open_sockets(sockets, attacked.port, FLOOD - IDLE)
        wait_closed([*idle, *more], 240)

    async def main() -> list[int]:
        async with attacked.client("one") as client:
            begun = [asyncio.Event() for _ in range(STREAMS)]
            streams = [asyncio.create_task(stream(client, TOKENS, event)) for event in begun]
            async with asyncio.timeout(240):  # a connection whose key is not known yet may make way
                await asyncio.gather(*(event.wait() for event in begun))
            await asyncio.to_thread(flood)
            return await asyncio.gather(*streams)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        chunks = asyncio.run(main())
    finally:
        over.set()
        asker.join()
    assert all(count > TOKENS // 16 for count in chunks), chunks
    assert set(health) == {200}
    assert attacked.log.stat().st_size - before < LOG_BYTES


def test_a_greedy_neighbour_keeps_no_other_key_out(attacked: Attacked) -> None:
    async def main() -> None:
        async with attacked.client("one") as greedy, attacked.client("two") as modest:
            begun = [asyncio.Event(), asyncio.Event()]
            running = [asyncio.create_task(stream(greedy, 1000, event, n=16)) for event in begun]
            try:
                async with asyncio.timeout(240):
                    await asyncio.gather(*(event.wait() for event in begun))
                refused = await greedy.post("/completions", json={"prompt": "x", "max_tokens": 1})
                assert refused.status_code == 429
                answers = [await stream(modest, 8) for _ in range(3)]
                assert all(answers) and not any(task.done() for task in running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(main())
