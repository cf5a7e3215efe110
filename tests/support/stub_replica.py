"""A stand-in for a model server, as bad as a test wants it: streams words, breaks off, lies, or is silent.

In this process as `StubReplica`; as a process, to be killed or stopped, with `python -m support.stub_replica N PAUSE_S
[waits]`: then its streams go on after SIGUSR1.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

Answer = Callable[["Call"], Awaitable[None]]


class Call:
    """One request that the stub has read, and the means to answer it."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes, out: asyncio.StreamWriter) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.out = out

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        self.out.write(data)
        await self.out.drain()

    async def whole(self, status: int, value: Any, **headers: str) -> None:
        """A whole answer of JSON."""
        body = json.dumps(value).encode()
        more = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        await self.send(head.encode() + body)

    async def begin(self, media_type: str = "text/event-stream") -> None:
        """The head of a stream."""
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {media_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def piece(self, data: bytes) -> None:
        """A chunk of a stream."""
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end(self) -> None:
        """The end of a stream, as HTTP has it."""
        await self.send(b"0\r\n\r\n")

    def break_off(self) -> None:
        """Reset the connection."""
        self.out.transport.abort()


def event(text: str, **more: Any) -> bytes:
    """A chunk of a chat completion as an event."""
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def streaming(n: int, pause_s: float = 0.0, name: str = "", go_on: asyncio.Event | None = None) -> Answer:
    """Streams n words if asked to stream; else one answer with as many. After the first word it waits for `go_on`."""

    async def answer(call: Call) -> None:
        if not call.json.get("stream"):
            usage = {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": n + 3}
            text = " ".join(f"{name}{i}" for i in range(n))
            await call.whole(200, {"choices": [{"message": {"content": text}}], "usage": usage})
            return
        await call.begin()
        for i in range(n):
            await call.piece(event(f"{name}{i} "))
            if go_on is not None:
                await go_on.wait()
            await asyncio.sleep(pause_s)
        await call.piece(b"data: [DONE]\n\n")
        await call.end()

    return answer


WORDS = "0 1 2 3 4 "
"""The text of `streaming(5)`."""

begins = streaming(2, pause_s=3600.0)
"""Streams one word, and then nothing."""


async def refuses(call: Call) -> None:
    """As a server whose engine restarts."""
    await call.whole(503, {"error": {"message": "restarting"}}, Retry_After="7")


async def hangs(call: Call) -> None:
    """Answers nothing."""
    await asyncio.sleep(3600)


class StubReplica:
    """See the module's docstring. Everything may be changed while it runs.

    Args:
        limit: requests at once that its /health tells; None: it has no figures, as other vendors' servers.
    """

    def __init__(self, answer: Answer, *, models: tuple[str, ...] = ("m",), limit: int | None = 16) -> None:
        self.answer = answer
        self.models = models
        self.limit = limit
        self.health = 200  # 0: silence
        self.tags = 404  # status of its /api/tags
        self.n_listed = 0  # requests for it
        self.may_list = asyncio.Event()  # until it is set, they get no answer
        self.may_list.set()
        self.resets = b""  # a head with these bytes is answered by a reset while its body comes; empty: none is
        self.early = b""  # instead of the reset: an answer, after which nothing is read
        self.keeps_prefixes = False  # as its /health tells
        self.determinism_key = ""  # that its /health tells; empty: none, as other vendors' servers
        self.calls: list[Call] = []  # but those for health and models
        self.running = 0
        self.left = asyncio.Event()  # a caller went away before its answer was whole
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> StubReplica:
        await self.listen(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections, and end those that are open, but the one whose task calls this."""
        if self._server is not None:
            self._server.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _serve(self, source: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (call := await self._read(source, out)) is not None:
                await self._answer(call, source)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left.set()
        finally:
            self._tasks.discard(task)
            out.transport.abort()

    async def _read(self, source: asyncio.StreamReader, out: asyncio.StreamWriter) -> Call | None:
        try:
            head = await source.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        if self.resets and self.resets in head:
            if self.early:
                out.write(self.early)
                await asyncio.sleep(3600)
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, path, _ = first.split(" ")
        headers: dict[str, str] = {}
        for name, _, value in (line.partition(":") for line in lines):
            before = f"{headers[name.lower()]}, " if name.lower() in headers else ""
            headers[name.lower()] = before + value.strip()
        body = await source.readexactly(int(headers.get("content-length", "0")))
        return Call(method, path, headers, body, out)

    async def _answer(self, call: Call, source: asyncio.StreamReader) -> None:
        if call.path == "/health":
            if not self.health:
                await asyncio.sleep(3600)
            figures = {"running": self.running, "waiting": 0, "limit": self.limit}
            body = {"status": "ok"} | ({"requests": figures} if self.limit is not None else {})
            body |= {"determinism_key": self.determinism_key} if self.determinism_key else {}
            body |= {"keeps_prefixes": True} if self.keeps_prefixes else {}
            await call.whole(self.health, body if self.health == 200 else {"reason": "the engine is restarting"})
        elif call.path == "/v1/models":
            await call.whole(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})
        elif call.path == "/api/tags":
            self.n_listed += 1
            await self.may_list.wait()
            await call.whole(self.tags, {"models": [{"name": f"{name}:latest"} for name in self.models]})
        else:
            self.calls.append(call)
            self.running += 1
            watch = asyncio.create_task(self._watch(call, source, asyncio.current_task()))
            try:
                await self.answer(call)
            finally:
                self.running -= 1
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    async def _watch(self, call: Call, source: asyncio.StreamReader, answering: asyncio.Task[Any] | None) -> None:
        """Notice that the caller goes away, as a server that computes does."""
        with suppress(ConnectionError):
            await source.read(1)
        self.left.set()
        if answering is not None:
            answering.cancel()


async def _main(n: int, pause_s: float, *, waits: bool) -> None:
    go_on = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go_on.set)
    async with StubReplica(streaming(n, pause_s, go_on=go_on if waits else None)) as stub:
        print(stub.port, flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]), waits="waits" in sys.argv[3:]))
