"""What a client provokes is no replica's failure: its own requests fail, and nobody else's."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.gateways import CHAT, Client, gateway, run
from support.serving import CHAT as CHAT_BODY
from support.serving import CONFIG, fake_engine, make_tokenizer, running_server
from support.stub_replica import Call, StubReplica, event, streaming

from phalanx.http.connection_table import Deadlines
from phalanx.http.lingering import LINGER_BYTES
from phalanx.tls.certificates import make_certificate

KEYS = ("greedy", "modest")
BODY = b'{"model": "m", "x": "' + b"x" * 8_000_000 + b'"}'
HEADS = {
    "blanks": b"X-Blanks: a" + b" " * 200 + b"b\r\n",
    "lines": b"".join(b"X-%d: %b\r\n" % (i, b"x" * 8000) for i in range(100)),
}
"""What a server refuses; 200 blanks, and 800 KiB."""

PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"]
"""One of each dialect, and of completions."""


def replicas(client: Client) -> list[object]:
    """What counts against each replica."""
    found = client.gateway._dispatcher.core.replicas.values()
    return [(one.is_suspect, one.breaker.is_closed, one.breaker._failed_at) for one in found]


async def posts(client: Client, head: bytes, body: bytes = BODY, path: str = CHAT) -> bytes:
    """The answer to a request whose sender writes all of it before it reads."""
    source, out = await asyncio.open_connection("127.0.0.1", client.gateway.port)
    out.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode())
    out.write(b"Authorization: Bearer greedy\r\nConnection: close\r\n")
    out.write(b"Content-Length: %d\r\n" % len(body) + head + b"\r\n" + body)
    await out.drain()
    try:
        return await source.read()
    finally:
        out.close()


async def asks(client: Client, **fields: object) -> int:
    """The status of another key's request."""
    headers = {"Authorization": "Bearer modest"}
    async with client.session.post(client.url + CHAT, json={"model": "m", **fields}, headers=headers) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("n", [2, 3])
def test_heads_that_servers_refuse_reach_none_and_are_answered(n: int, tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path)

    async def scenario(*origins: str) -> None:
        async with gateway(*origins, api_key=KEYS, key="modest") as client:

            async def attacks(head: bytes, path: str) -> None:
                answer = await posts(client, head, path=path)
                assert answer.startswith(b"HTTP/1.1 400 ") and b"The request is not HTTP: its head" in answer

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(attacks(head, path)) for path in PATHS * 3 for head in HEADS.values()]
                while not all(task.done() for task in tasks):
                    assert await asks(client, **CHAT_BODY) == 200
            assert await asks(client, **CHAT_BODY) == 200
            assert replicas(client) == [(False, True, [])] * n

    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(tokenizer, fake_engine(tokenizer))) for _ in range(n)]
        run(scenario(*(server.origin for server in servers)))


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_servers_own_refusal_arrives(tmp_path: Path, head: bytes):
    tokenizer = make_tokenizer(tmp_path)
    with running_server(tokenizer, fake_engine(tokenizer)) as server:

        async def scenario() -> None:
            for _ in range(4):
                source, out = await asyncio.open_connection("127.0.0.1", server.server.port)
                out.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(BODY) + head + b"\r\n" + BODY)
                answer = (await asyncio.gather(source.read(), out.drain()))[0]
                assert answer.startswith(b"HTTP/1.1 400 ") and b'"The request is not HTTP: its head has' in answer
                out.close()
            source, out = await asyncio.open_connection("127.0.0.1", server.server.port)
            out.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
            out.write(b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            await out.drain()
            assert (await source.read()).startswith(b"HTTP/1.1 404 ")
            out.close()

        run(scenario())


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_refusal_arrives_over_tls(tmp_path: Path, head: bytes):
    """Of a server and of a gateway; TLS cannot end one direction alone."""
    made = make_certificate("test", addresses=["localhost"])
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_text(made.certificate)
    key.write_text(made.key)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    trusting = ssl.create_default_context(cafile=str(certificate))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")

    async def is_refused(port: int) -> None:
        for _ in range(2):
            source, out = await asyncio.open_connection("localhost", port, ssl=trusting)
            out.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(BODY) + head + b"\r\n")
            out.write(BODY)
            await out.drain()
            answer = await source.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer.lower())
            assert answer.startswith(b"HTTP/1.1 400 ") and length is not None
            assert b'"The request is not HTTP: its head has' in await source.readexactly(int(length[1]))
            out.transport.abort()

    async def scenario(port: int) -> None:
        await is_refused(port)
        async with gateway("http://127.0.0.1:1", up=0, tls=str(certificate), **files) as client:
            await is_refused(client.gateway.port)

    with running_server(tokenizer, fake_engine(tokenizer), replace(CONFIG, **files)) as server:
        run(scenario(server.server.port))


async def fails_some(call: Call) -> None:
    """As a server that a certain request brings down, or answers wrongly."""
    kind = call.json.get("bad")
    if kind == "500":
        await call.whole(500, {"error": {"message": "no"}})
    elif kind == "close":
        call.break_off()
    elif kind == "stream":  # after the head of an answer
        await call.begin()
        call.break_off()
    elif kind == "junk":
        await call.send(b"junk\r\n\r\n")
        call.break_off()
    else:
        await streaming(1)(call)


@pytest.mark.parametrize("kind", ["500", "close", "stream", "junk", "reset"])
def test_what_every_replica_fails_counts_against_none(kind):
    async def scenario() -> None:
        async with StubReplica(fails_some) as a, StubReplica(fails_some) as b:
            a.resets = b.resets = b"X-Reset"
            settings = {"cb_failure_threshold": 2, "api_key": KEYS, "retry_budget": 0.0}
            async with gateway(a.url, b.url, key="greedy", **settings) as client:

                async def attacks() -> None:
                    if kind == "reset":
                        answer = await posts(client, b"X-Reset: 1\r\n", BODY[:4_000_000] + b'"}')
                        assert answer.startswith(b"HTTP/1.1 502 ")
                    else:
                        assert (await client.ask(bad=kind))[0] in (500, 502)

                for _ in range(3 if kind == "reset" else 12):
                    await asyncio.gather(*(attacks() for _ in range(4)))
                    assert await asks(client) == 200
                    assert replicas(client) == [(False, True, [])] * 2

    run(scenario())


def test_an_answer_that_comes_while_the_body_is_sent_is_the_clients():
    async def scenario() -> None:
        async with StubReplica(fails_some) as a, StubReplica(fails_some) as b:
            for one in (a, b):
                one.resets, one.early = b"X-Early", b"HTTP/1.1 400 X\r\nContent-Length: 2\r\n\r\n{}"
            async with gateway(a.url, b.url, key="greedy", api_key=KEYS, cb_failure_threshold=1) as client:
                for _ in range(3):
                    assert (await posts(client, b"X-Early: 1\r\n")).startswith(b"HTTP/1.1 400 ")
                assert await asks(client) == 200 and replicas(client) == [(False, True, [])] * 2

    run(scenario())


def test_the_retries_of_one_key_are_not_anothers():
    n_first = 0

    async def answer(call: Call) -> None:
        nonlocal n_first
        if call.json.get("bad") == "first":
            n_first += 1
        if call.json.get("bad") == "always" or n_first == 1:
            call.break_off()
        else:
            await streaming(1)(call)

    async def scenario() -> None:
        async with StubReplica(answer) as a, StubReplica(answer) as b:
            async with gateway(a.url, b.url, key="greedy", api_key=KEYS, retry_budget=0.0) as client:
                n_calls = 0
                while len(a.calls + b.calls) != n_calls + 1:  # else it was tried again
                    n_calls = len(a.calls + b.calls)
                    assert (await client.ask(bad="always"))[0] == 502
                assert await asks(client, bad="first") == 200

    run(scenario())


def test_a_request_that_its_replica_will_not_repeat_is_asked_once_and_a_path_that_is_missing_twice():
    async def answer(call: Call) -> None:
        if call.path == CHAT:
            await call.whole(500, {"error": {"message": "no"}}, X_Should_Retry="false")
        else:
            await call.whole(404, {"error": {"message": "no"}})

    async def scenario() -> None:
        async with StubReplica(answer) as a, StubReplica(answer) as b, StubReplica(answer) as c:
            async with gateway(a.url, b.url, c.url) as client:
                for path, status, n in ((CHAT, 500, 1), ("/v1/nothing", 404, 2)):
                    assert (await client.ask(path))[0] == status
                    assert len(a.calls + b.calls + c.calls) == n
                    for stub in (a, b, c):
                        stub.calls.clear()

    run(scenario())


def test_a_connection_that_was_closed_while_idle_is_no_failure():
    seen: set[object] = set()

    async def answer(call: Call) -> None:
        if call.out in seen:
            call.break_off()
            return
        seen.add(call.out)
        await streaming(1)(call)

    async def scenario() -> None:
        async with StubReplica(answer) as a, StubReplica(answer) as b:
            async with gateway(a.url, b.url, cb_failure_threshold=1) as client:
                for _ in range(20):
                    assert (await client.ask())[0] == 200
                assert len(a.calls + b.calls) > 20 and replicas(client) == [(False, True, [])] * 2

    run(scenario())


def test_a_client_that_reads_slowly_fails_no_replica():
    """Its time is over while the gateway waits for it, or the replica hangs up on the gateway for that."""

    async def floods(call: Call) -> None:
        await call.begin()
        while True:
            await call.piece(event("x" * 50_000))

    async def scenario() -> None:
        limits = {"request_timeout_secs": 1.0, "cb_failure_threshold": 1}
        async with StubReplica(floods) as a, gateway(a.url, deadlines=Deadlines(read_s=60), **limits) as client:
            body = {"model": "m", "stream": True}
            async with client.session.post(client.url + CHAT, json=body) as response:
                await a.left.wait()
                response.close()
            assert replicas(client) == [(False, True, [])]

    run(scenario())


def test_a_replica_that_gives_no_connection_is_blamed_at_once():
    async def scenario() -> None:
        settings = {"cb_failure_threshold": 2, "health_check_interval_secs": 3600.0, "retry_max_retries": 3}
        async with StubReplica(streaming(1)) as a, gateway(a.url, **settings) as client:
            await a.close()
            await client.ask()
            status, body = await client.ask()
            assert status == 503 and "failed 2 requests in a row" in body["error"]["message"]

    run(scenario())


def test_a_body_that_goes_on_after_its_answer_has_an_end(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path)
    with running_server(tokenizer, fake_engine(tokenizer)) as server:

        async def scenario() -> None:
            n_sent = 0
            source, out = await asyncio.open_connection("127.0.0.1", server.server.port)
            out.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
            assert (await source.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
            with suppress(ConnectionError):
                while not source.at_eof():
                    out.write(BODY)
                    await out.drain()
                    n_sent += len(BODY)
                    assert n_sent < 8 * LINGER_BYTES

        run(scenario())
