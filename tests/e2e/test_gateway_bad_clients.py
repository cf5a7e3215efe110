"""The gateway and clients that are slow, greedy or broken: none costs another client its answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import sys
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp
import pytest
from support.gateways import CHAT, Client, gateway, run, text_of
from support.http_parsing import REFUSED
from support.stub_replica import WORDS, Call, StubReplica, event, hangs, refuses, streaming

from phalanx.gateway.relay import proxy
from phalanx.http.connection_table import Deadlines


async def raw(client: Client, sent: bytes) -> bytes:
    """What the gateway answers to these bytes, up to the end of the connection."""
    source, out = await asyncio.open_connection("127.0.0.1", client.gateway.port)
    out.write(sent)
    answer = await source.read()
    out.close()
    return answer


def test_a_client_that_never_reads_holds_no_replica():
    async def floods(call: Call) -> None:
        await call.begin()
        while True:
            await call.piece(event("x" * 50_000))

    async def scenario() -> None:
        async with StubReplica(floods) as a, gateway(a.url, deadlines=Deadlines(read_s=0.5)) as client:
            body = b'{"model": "m", "stream": true}'
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}"
            with socket.create_connection(("127.0.0.1", client.gateway.port)) as silent:
                silent.sendall(head.encode() + b"\r\n\r\n" + body)
                await a.left.wait()
            while (await client.get("/health"))[1]["requests"]["running"]:
                await asyncio.sleep(0.01)

    run(scenario())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST / HTTP/1.1\r\nHos",
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    ],
    ids=["nothing", "half a header", "half a body"],
)
def test_a_client_that_sends_slowly_is_closed(sent):
    async def scenario() -> None:
        limits = Deadlines(header_s=0.5, body_s=0.5)
        async with StubReplica(streaming(1)) as a, gateway(a.url, deadlines=limits) as client:
            source, out = await asyncio.open_connection("127.0.0.1", client.gateway.port)
            out.write(sent)
            assert await source.read() == b"" and not a.calls
            out.close()

    run(scenario())


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        (b"1\r\n \r\n", b"mostly the framing of its chunks"),
        (b"1;%b\r\n \r\n" % (b"x" * 4000), b"begins with more, or less, than its size"),
        (b"80\r\n%b\r\n" % (b" " * 128), b""),
    ],
    ids=["of one byte", "with extensions", "small"],
)
def test_a_body_that_is_mostly_the_framing_of_its_chunks_is_refused(chunk, fault):
    """9 MB in chunks of one byte kept the loop for 12 s; extensions went on for ever."""
    body = json.dumps({"model": "m", "messages": []}).encode()
    sent = chunk * (400_000 // len(chunk)) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    async def scenario() -> None:
        async with StubReplica(streaming(5)) as a, gateway(a.url) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
            head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            answer = await raw(client, head + sent)
            assert answer.split()[1] == (b"400" if fault else b"200") and fault in answer, answer
            assert len(a.calls) == (not fault)
            assert text_of(await client.stream()) == WORDS

    run(scenario())


def test_what_is_expensive_or_ambiguous_reaches_no_replica():
    async def scenario() -> None:
        async with StubReplica(streaming(5)) as a, gateway(a.url) as client:
            for name, data in REFUSED.items():
                answer = await raw(client, data + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert answer.split()[1] == b"400" and answer.count(b"\r\nServer: ") == 1, (name, answer)
            assert not a.calls and text_of(await client.stream()) == WORDS

    run(scenario())


def test_a_stream_of_http_1_0_ends_with_its_connection():
    """Also where the client asked to keep that: it has neither a length nor chunks."""

    async def scenario() -> None:
        async with StubReplica(streaming(5)) as a, gateway(a.url) as client:
            body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
            asked = b"POST %b HTTP/1.0\r\nContent-Type: application/json\r\nConnection: keep-alive\r\n" % CHAT.encode()
            answer = await raw(client, asked + b"Content-Length: %d\r\n\r\n" % len(body) + body + asked + b"\r\n")
            assert answer.count(b"HTTP/1.") == 1 and answer.endswith(b"data: [DONE]\n\n")

    run(scenario())


def test_what_waits_in_aiohttps_parser_is_gone_on_with():
    """It is handed to the connection once more by a call without data; a request that was held there hung."""

    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a, gateway(a.url) as client:
            one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            answers = await raw(client, one * 100 + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert answers.count(b"HTTP/1.1 200 OK") == 101
            body = gzip.compress(b'{"model": "m", "prompt": "%b"}' % (b"x" * (1 << 20)))
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            async with client.session.post(client.url + CHAT, data=body, headers=headers) as response:
                assert response.status == 200 and len(a.calls[0].body) > 1 << 20

    run(scenario())


def test_bodies_have_a_limit_and_are_json():
    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a, gateway(a.url, max_body_mb=0.01) as client:
            assert (await client.ask(prompt="x" * 20_000))[0] == 413
            is_json = {"Content-Type": "application/json"}
            async with client.session.post(client.url + CHAT, data=b"{", headers=is_json) as bad:
                assert bad.status == 400 and "not JSON" in (await bad.json())["error"]["message"]
            zipped = {**is_json, "Content-Encoding": "gzip"}
            async with client.session.post(client.url + CHAT, data=b"x" * 100, headers=zipped) as bad:
                assert bad.status == 400
            for encoding in ("br", "deflate", "zstd", "compress", "gzip, gzip"):
                sent = {**is_json, "Content-Encoding": encoding}
                async with client.session.post(client.url + CHAT, data=b"{}", headers=sent) as bad:
                    assert bad.status == 415 and "reads gzip, and" in (await bad.json())["error"]["message"], encoding
            octets = {"Content-Type": "application/octet-stream"}
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            pages = ({**octets, "Origin": "null"}, {**form, "Origin": "null"}, {"Content-Type": "text/plain"})
            for plain in (*pages, {**is_json, "Host": "evil.example"}):
                async with client.session.post(client.url + CHAT, data=b"{}", headers=plain) as bad:
                    assert bad.status == (403 if "Host" in plain else 415)
            bare = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 13\r\n"
            reply = await raw(client, bare + b'Origin: null\r\n\r\n{"model":"m"}')
            assert reply.startswith(b"HTTP/1.1 415 ") and b"'missing'" in reply
            assert not a.calls
            reply = await raw(client, bare + b'\r\n{"model":"m"}')  # no page's: it would say where it is from
            assert reply.startswith(b"HTTP/1.1 200 ") and "content-type" not in a.calls.pop().headers
            async with client.session.post(client.url + CHAT, data=b'{"model":"m"}') as good:  # aiohttp: octets
                assert good.status == 200 and a.calls.pop().headers["content-type"] == octets["Content-Type"]
            async with client.session.post(client.url + CHAT, data=b'{"model":"m"}', headers=form) as good:  # curl -d
                assert good.status == 200 and a.calls.pop().headers["content-type"] == form["Content-Type"]
            async with client.session.post(client.url + CHAT, data=b"model=m", headers=form) as bad:
                assert bad.status == 400 and "not JSON" in (await bad.json())["error"]["message"] and not a.calls
            for method, length in (("GET", 72), ("HEAD", 0)):  # Ollama's clients look there for a server
                async with client.request(method, "/") as response:
                    assert response.status == 200 and len(await response.read()) == length
                    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
            for method, path in (("POST", "/v2/x"), ("GET", "/admin/replicas")):
                async with client.request(method, path) as response:
                    assert response.status == 404, path
            for method, path in (("OPTIONS", CHAT), ("POST", "/health"), ("POST", "/")):
                async with client.request(method, path) as response:
                    assert response.status == 405 and "GET" in response.headers["Allow"], path
            reply = await raw(client, b"GET /v1/%2e%2e/reset HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 404 ")
            assert (await raw(client, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
            head = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            reply = await raw(
                client, b"POST /v1/x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n" + head + b"\r\n{}"
            )
            assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ") and a.calls.pop()
            assert (await client.ask())[0] == 200

    run(scenario())


def test_memory_of_bodies_is_given_back_however_their_requests_end(monkeypatch):
    """There is room for four bodies at once, and six of each kind come to a bad end."""
    monkeypatch.setattr(proxy, "BODIES", 4)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    body = json.dumps({"model": "m", "prompt": "x" * 9_000}).encode()
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    chunked = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
    cut = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body) + 1, body)
    ends = {b"no chunk\r\n": b"400", chunk + b"0\r\n\r\n": b"413", b"1\r\n}\r\n0\r\n\r\n": b"400"}
    settings = {"max_body_mb": 0.01, "retry_max_retries": 1, "cb_failure_threshold": 1000}

    async def scenario() -> None:
        async with StubReplica(refuses) as a, gateway(a.url, **settings) as client:
            for _ in range(6):
                for end, status in ends.items():
                    answer = await raw(client, chunked + end)
                    assert answer.split()[1:2] == [status], answer
                _, out = await asyncio.open_connection("127.0.0.1", client.gateway.port)
                out.write(cut)
                await out.drain()
                out.close()
                assert (await client.ask(prompt="x" * 9_000))[0] == 503
            a.answer = hangs
            for _ in range(6):
                leaves = asyncio.create_task(client.ask(prompt="x" * 9_000))
                while not a.running:
                    await asyncio.sleep(0.01)
                leaves.cancel()
                while a.running:
                    await asyncio.sleep(0.01)
            a.answer = streaming(1)
            assert (await client.ask(prompt="x" * 9_000))[0] == 200

    run(scenario())


async def refuses_it(call: Call) -> None:
    await call.whole(400, {"error": {"message": "too long"}})


async def breaks_off(call: Call) -> None:
    await call.begin()
    await call.piece(event("a"))
    call.break_off()


@pytest.mark.parametrize(
    ("answer", "fields", "leaves", "status"),
    [
        (streaming(2, 3600), {"stream": True}, True, 429),
        (hangs, {"stream": True}, True, 429),
        (hangs, {}, True, 429),
        (breaks_off, {"stream": True}, False, 429),
        (streaming(5), {"stream": True}, False, 429),  # without a `usage`: by the prompt's bytes
        (streaming(5), {}, False, 200),  # 8 tokens
        (refuses_it, {}, False, 200),
    ],
    ids=["left", "left before its first byte", "left whole answer", "broken off", "stream", "answered", "refused"],
)
def test_a_key_is_charged_for_what_was_sent_to_a_replica_however_it_ends(answer, fields, leaves, status, tmp_path):
    """100,000 tokens of a prompt, by its bytes, are reserved; those that were taken come back in an hour."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "ci"\nkey = "key-of-ci"\ntokens_per_minute = 1000\n')
    large = {"model": "m", "prompt": "x" * 400_000, **fields}

    async def scenario() -> None:
        async with StubReplica(answer) as a, gateway(a.url, key="key-of-ci", keys=str(keys)) as client:

            async def ask() -> None:
                async with client.request("POST", CHAT, large) as response:
                    await response.read()

            asked = asyncio.create_task(ask())
            if leaves:
                while not a.running:
                    await asyncio.sleep(0.01)
                assert (await client.ask())[0] == 429  # what is reserved, another request sees
                asked.cancel()
                await a.left.wait()
            await asyncio.wait([asked])
            while (await client.get("/health"))[1]["requests"]["running"]:
                await asyncio.sleep(0.01)
            a.answer = streaming(5)
            found, body = await client.ask()
            assert found == status and ("tokens a minute" in str(body)) == (status == 429), body

    run(scenario())


def test_a_key_is_charged_nothing_for_a_request_that_left_the_queue(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "ci"\nkey = "key-of-ci"\ntokens_per_minute = 1000\n')
    settings = {"key": "key-of-ci", "keys": str(keys), "api_key": ("another",)}

    async def scenario() -> None:
        async with StubReplica(hangs, limit=1) as a, gateway(a.url, **settings) as client:
            other = client.request("POST", CHAT, {"model": "m"}, Authorization="Bearer another")
            first = asyncio.create_task(other.__aenter__())
            while not a.running:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(client.ask(prompt="x" * 400_000))
            while not (await client.get("/health"))[1]["requests"]["waiting"]:
                await asyncio.sleep(0.01)
            assert (await client.ask())[0] == 429
            for task, figure in ((second, "waiting"), (first, "running")):
                task.cancel()
                while (await client.get("/health"))[1]["requests"][figure]:
                    await asyncio.sleep(0.01)
            a.answer = streaming(5)
            assert (await client.ask())[0] == 200

    run(scenario())


@pytest.mark.parametrize("keys", [("greedy", "modest"), ()], ids=["keys", "addresses"])
def test_an_owner_that_fills_the_memory_for_bodies_keeps_no_other_out(keys):
    """64 uploads that never end; without keys, an owner is an address."""
    if not keys and sys.platform != "linux":
        pytest.skip("only Linux has the whole of 127.0.0.0/8 as addresses of its own")
    large = {"model": "m", "prompt": "x" * 900}

    async def scenario() -> None:
        settings = {"api_key": keys, "key": keys[0] if keys else None, "max_body_mb": 0.001}
        async with StubReplica(streaming(1)) as a, gateway(a.url, **settings) as client, AsyncExitStack() as stack:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += "Content-Length: 1048\r\n" + (f"x-api-key: {keys[0]}\r\n" if keys else "")
            for _ in range(64):
                _, out = await asyncio.open_connection("127.0.0.1", client.gateway.port)
                stack.callback(out.close)
                out.write(head.encode() + b"\r\n" + b" " * 1036)
            while (await client.ask(**large))[0] != 429:
                await asyncio.sleep(0.01)
            connector = aiohttp.TCPConnector(local_addr=None if keys else ("127.0.0.2", 0))
            other = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            url, headers = f"http://127.0.0.1:{client.gateway.port}{CHAT}", {"x-api-key": keys[-1]} if keys else {}
            for _ in range(3):
                async with other.post(url, json=large, headers=headers) as response:
                    assert response.status == 200, await response.text()
            assert (await client.ask(**large))[0] == 429

    run(scenario())


def test_the_queue_is_bounded_and_fair_and_its_wait_has_an_end():
    async def scenario() -> None:
        settings = {"queue_size": 8, "api_key": ("greedy", "modest")}
        async with StubReplica(streaming(2, 0.01), limit=2) as a, gateway(a.url, key="greedy", **settings) as client:
            served: Counter[str] = Counter()
            over = asyncio.Event()

            async def keep_asking(key: str) -> None:
                while not over.is_set():
                    headers = {"Authorization": f"Bearer {key}"}
                    body = {"model": "m", "stream": True}
                    async with client.session.post(client.url + CHAT, json=body, headers=headers) as response:
                        await response.read()
                        if response.status == 200:
                            served[key] += 1
                        else:
                            assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
                            await asyncio.sleep(0.005)

            tasks = [asyncio.create_task(keep_asking("greedy")) for _ in range(16)]
            tasks += [asyncio.create_task(keep_asking("modest")) for _ in range(3)]
            while served.total() < 200:
                assert len(client.gateway._dispatcher.core.queue) <= 8 and a.running <= 2
                await asyncio.sleep(0.005)
            over.set()
            await asyncio.gather(*tasks)
            assert abs(served["modest"] / served.total() - 0.5) <= 0.05, served  # within a tenth of its share
        async with StubReplica(hangs, limit=1) as a, gateway(a.url, queue_timeout_secs=0.2) as client:
            first = asyncio.create_task(client.ask())
            while not a.running:
                await asyncio.sleep(0.01)
            status, body = await client.ask()
            assert status == 429 and "time that a request may wait" in body["error"]["message"]
            first.cancel()

    run(scenario())
