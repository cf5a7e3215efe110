"""The gateway before stand-ins for replicas, each as bad as can be: every case ends in a named state.

Gateway, replicas and client share one event loop; `test_gateway_processes.py` has real processes.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.gateways import CHAT, LIMIT_S, Client, gateway, text_of
from support.stub_replica import Answer, Call, StubReplica, event, streaming

from phalanx.edge.table import Deadlines
from phalanx.gateway.fleet import LARGEST
from phalanx.tls.certificates import make_certificate

WORDS = "".join(f"{i} " for i in range(5))


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(280):
            await scenario

    asyncio.run(limited())


def each(**texts: bytes) -> Answer:
    """Answers with these bytes of a stream, then breaks off or ends."""

    async def answer(call: Call) -> None:
        await call.begin()
        if texts["piece"]:
            await call.piece(texts["piece"])
        if "then_ends" in texts:
            await call.end()
        else:
            call.break_off()

    return answer


async def refuses(call: Call) -> None:
    await call.whole(503, {"error": {"message": "restarting"}}, Retry_After="7")


async def hangs(call: Call) -> None:
    await asyncio.sleep(3600)


async def raw(client: Client, sent: bytes) -> bytes:
    """What the gateway answers to these bytes, up to the end of the connection."""
    source, out = await asyncio.open_connection("127.0.0.1", client.gateway.port)
    out.write(sent)
    answer = await source.read()
    out.close()
    return answer


def errors(events: list[Any]) -> list[str]:
    return [event["error"]["message"] for event in events if event != "[DONE]" and "error" in event]


# What goes well --------------------------------------------------------------------------------------------------


def test_streams_pass_at_once_and_requests_are_shared_out():
    async def scenario() -> None:
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await call.begin()
            await call.piece(event("first"))
            await go.wait()
            await call.piece(b"data: [DONE]\n\n")
            await call.end()

        async with StubReplica(waits) as a, StubReplica(waits) as b, gateway(a.url, b.url) as client:
            async with AsyncExitStack() as stack:
                body = {"model": "m", "messages": [], "stream": True}
                for _ in range(8):
                    response = await stack.enter_async_context(client.request("POST", CHAT, body))
                    assert b"first" in await response.content.readany()  # while the replica has not gone on
                assert (a.running, b.running) == (4, 4)
                go.set()
            whole = await client.stream()
            assert text_of(whole) == "first" and whole[-1] == "[DONE]"

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat", "/v1/embeddings", "/tokenize"])
def test_every_dialect_passes_through_as_it_is(path):
    texts = {
        "/v1/messages": b'event: message_start\ndata: {"type":"message_start"}\n\ndata: {"type":"message_stop"}\n\n',
        "/v1/responses": b'event: x\ndata: {"type":"response.completed"}\n\n',
        "/api/chat": b'{"message":{"content":"a"},"done":false}\n{"done":true}\n',
        "/v1/embeddings": b'{"data": [1.5,   2]}',
        "/tokenize": b'{"tokens":[1,2]}',
    }
    kinds = {"/api/chat": "application/x-ndjson", "/v1/embeddings": "application/json", "/tokenize": "application/json"}

    async def answer(call: Call) -> None:
        await call.begin(kinds.get(path, "text/event-stream"))
        await call.piece(texts[path])
        await call.end()

    async def scenario() -> None:
        async with StubReplica(answer) as a, gateway(a.url) as client:
            sent = {"model": "m", "weird": [1, {"x": None}]}
            query = "?beta=true&x=a%26b"
            async with client.request("POST", path + query, sent, X_Custom="1", Connection="close") as response:
                assert (response.status, await response.read()) == (200, texts[path])
            (call,) = a.calls
            assert call.path == path + query and call.json == sent
            assert call.headers["x-custom"] == "1" and call.headers["accept-encoding"] == "identity"

    run(scenario())


def test_a_request_goes_where_its_model_is_and_by_its_alias():
    async def scenario() -> None:
        async with (
            StubReplica(streaming(1, name="a"), models=("m", "one")) as a,
            StubReplica(streaming(1, name="b"), models=("two",)) as b,
            gateway(a.url, b.url, model_aliases=("gpt-4o=two",)) as client,
        ):
            _, listed = await client.get("/v1/models")
            assert "models" not in listed
            _, for_codex = await client.get("/v1/models?client_version=0.64.0")
            assert for_codex == {**listed, "models": []}
            assert [card["id"] for card in listed["data"]] == ["m", "one", "two", "gpt-4o"]
            assert (await client.get("/v1/models/gpt-4o"))[1]["id"] == "gpt-4o"
            a.tags = 200  # b speaks no Ollama
            _, tags = await client.get("/api/tags")
            assert [entry["name"] for entry in tags["models"]] == ["m:latest", "one:latest"]
            b.tags = 200
            _, tags = await client.get("/api/tags")
            assert [entry["name"] for entry in tags["models"]] == ["m:latest", "one:latest", "two:latest", "gpt-4o"]
            for model, name in (("one", "a"), ("two", "b"), ("gpt-4o", "b")):
                assert text_of(await client.stream(model=model)) == f"{name}0 "
            assert b.calls[-1].json["model"] == "two"
            status, body = await client.ask(model="three")
            assert status == 404 and body["error"]["code"] == "model_not_found"
            assert "m, one, two" in body["error"]["message"]

    run(scenario())


def test_ids_and_keys():
    """An id goes through every hop; clients' keys do not reach a replica, which has its own."""

    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a:
            async with gateway(a.url, key="right", api_key=("right",), worker_key="inner") as client:
                async with client.request("POST", CHAT, {"model": "m"}, X_Request_Id="mine-1") as response:
                    assert response.headers["x-request-id"] == "mine-1"
                assert a.calls[-1].headers["x-request-id"] == "mine-1"
                assert a.calls[-1].headers["authorization"] == "Bearer inner"
                async with client.request("POST", CHAT, {"model": "m"}, X_Request_Id="<b>") as response:
                    made = response.headers["x-request-id"]
                assert made.startswith("req_") and a.calls[-1].headers["x-request-id"] == made
                for path in (CHAT, "/v1/models"):
                    async with client.session.post(client.url + path, headers={"x-api-key": "wr\u00f6ng"}) as response:
                        assert response.status == 401
                async with client.session.get(client.url + "/health") as response:
                    assert await response.json() == {"status": "ok"}
            async with gateway(a.url, key="theirs") as client:  # no key of its own: the client's is for the replica
                await client.ask()
                assert a.calls[-1].headers["authorization"] == "Bearer theirs"

    run(scenario())


def test_a_client_that_leaves_is_noticed_upstream():
    async def scenario() -> None:
        async with StubReplica(streaming(10_000, 0.01)) as a, gateway(a.url) as client:
            for stream in (True, False):
                a.left.clear()
                if not stream:
                    a.answer = hangs
                request = client.request("POST", CHAT, {"model": "m", "stream": stream})
                task = asyncio.create_task(request.__aenter__())
                while not a.running:
                    await asyncio.sleep(0.005)
                if stream:
                    response = await task
                    await response.content.readany()
                    response.close()
                else:
                    task.cancel()
                await a.left.wait()
                while a.running or (await client.get("/health"))[1]["requests"]["running"]:
                    await asyncio.sleep(0.005)

    run(scenario())


# What bad replicas get -------------------------------------------------------------------------------------------


async def closes(call: Call) -> None:
    call.break_off()


async def is_no_http(call: Call) -> None:
    await call.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    call.break_off()


async def cuts_a_whole_answer(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    call.break_off()


async def serves_another_model(call: Call) -> None:
    await call.whole(404, {"error": {"message": "no such model", "code": "model_not_found"}})


async def is_busy(call: Call) -> None:
    await call.whole(429, {"error": {"message": "full"}})


@pytest.mark.parametrize(
    "bad",
    [
        closes,
        is_no_http,
        cuts_a_whole_answer,
        refuses,
        is_busy,
        serves_another_model,
        each(piece=b""),
        each(piece=b'data: {"cho'),
        each(piece=b"<html>\n\n", then_ends=b""),
        each(piece=b'data: {"choices": [\n\n', then_ends=b""),
        each(piece=b"", then_ends=b""),
    ],
    ids=lambda bad: bad.__name__,
)
def test_what_fails_before_the_first_byte_is_answered_by_another_replica(bad):
    async def scenario() -> None:
        async with StubReplica(bad) as a, StubReplica(streaming(5)) as b, gateway(a.url, b.url) as client:
            for _ in range(4):
                assert text_of(await client.stream()) == WORDS
            assert a.calls and len(b.calls) == 4

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "begin", "kind"),
    [
        (CHAT, event("a"), "text/event-stream"),
        ("/v1/responses", b'data: {"type":"response.created","sequence_number":4}\n\n', "text/event-stream"),
        ("/v1/messages", b'event: message_start\ndata: {"type":"message_start"}\n\n', "text/event-stream"),
        ("/api/chat", b'{"message":{"content":"a"},"done":false}\n', "application/x-ndjson"),
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error_that_names_the_replica(path, begin, kind, stream):
    """Also where HTTP says that it is whole: without its last event it is not."""

    async def answer(call: Call) -> None:
        await call.begin(kind)
        await call.piece(begin + b"data: {")  # half an event, which no client may see
        if stream:
            call.break_off()
        else:
            await call.end()

    async def scenario() -> None:
        async with StubReplica(answer) as a, StubReplica(hangs) as b, gateway(a.url, b.url) as client:
            b.health = 503
            while (await client.get("/health"))[1]["replicas"][b.name] == "ok":
                await asyncio.sleep(0.01)
            async with client.request("POST", path, {"model": "m", "stream": True}) as response:
                text = await response.read()
            assert text.startswith(begin)
            end = text.removeprefix(begin)
            lines = [line.removeprefix(b"data: ") for line in end.splitlines()]
            body = json.loads(next(line for line in lines if line.startswith(b"{")))
            assert a.name in json.dumps(body) and "error" in json.dumps(body)
            if path == "/v1/responses":
                assert body["type"] == "error" and body["sequence_number"] == 5
            if path == CHAT:
                assert end.endswith(b"data: [DONE]\n\n")

    run(scenario())


def test_a_storm_of_5xx_opens_the_circuit_and_a_4xx_does_not(caplog):
    """Which is the client's own failure, and in no log that of an attempt."""
    caplog.set_level("INFO")
    status = 400

    async def answer(call: Call) -> None:
        await call.whole(status, {"error": {"message": "no"}})

    async def scenario() -> None:
        nonlocal status
        async with StubReplica(answer) as a, gateway(a.url, cb_failure_threshold=4, retry_max_retries=0) as client:
            for _ in range(10):
                assert (await client.ask())[0] == 400
            assert "failed on" not in caplog.text
            status = 500
            for _ in range(4):
                assert (await client.ask())[0] == 500
            assert caplog.text.count(f"attempt 1 failed on {a.name}: it answered 500") == 4
            n = len(a.calls)
            code, body = await client.ask()
            assert code == 503 and "failed 4 requests in a row" in body["error"]["message"] and len(a.calls) == n

    run(scenario())


def test_retries_end_and_the_last_answer_is_the_clients():
    async def scenario() -> None:
        async with StubReplica(refuses) as a, gateway(a.url, retry_max_retries=2) as client:
            async with client.request("POST", CHAT, {"model": "m"}) as response:
                assert response.status == 503 and response.headers["Retry-After"] == "7"
                assert (await response.json())["error"]["message"] == "restarting"
            assert len(a.calls) == 3

    run(scenario())


def test_a_request_that_kills_replicas_is_not_passed_on_for_ever():
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            stubs = [await stack.enter_async_context(StubReplica(closes)) for _ in range(5)]
            client = await stack.enter_async_context(gateway(*(stub.url for stub in stubs)))
            status, body = await client.ask()
            assert status == 502 and "broke off" in body["error"]["message"]
            assert sum(len(stub.calls) for stub in stubs) == 4  # --migration-limit further ones

    run(scenario())


def test_all_down_is_a_503_with_the_reason_of_each():
    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a, StubReplica(streaming(1)) as b, gateway(a.url, b.url) as client:
            a.health = 503
            await b.close()
            async with asyncio.timeout(LIMIT_S):
                while (await client.get("/health"))[0] == 200:
                    await asyncio.sleep(0.01)
            async with client.request("POST", "/v1/messages", {"model": "m"}) as response:
                assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                said = (await response.json())["error"]
            assert said["type"] == "overloaded_error"
            assert f"{a.name}: answers 503 to /health: the engine is restarting" in said["message"]
            assert f"{b.name}: cannot be reached (" in said["message"]
            a.health = 200
            await client.until_up(1)
            assert text_of(await client.stream()) == "0 "
            a.models = ("m", "x" * LARGEST)
            async with asyncio.timeout(LIMIT_S):
                while (await client.get("/health"))[0] == 200:
                    await asyncio.sleep(0.01)
            said = (await client.ask())[1]["error"]["message"]
            assert f"{a.name}: fails health checks (/v1/models has more than {LARGEST >> 10} KiB)" in said

    run(scenario())


def test_a_replica_that_falls_silent_is_found_by_its_health():
    """As a stopped process or a host without a cable: the connection stays, and nothing comes."""

    async def begins(call: Call) -> None:
        await call.begin()
        await call.piece(event("a"))
        await asyncio.sleep(3600)

    async def scenario() -> None:
        async with StubReplica(hangs) as a, StubReplica(streaming(5)) as b:
            settings = {"health_check_timeout_secs": 1.0, "policy": "round_robin"}
            async with gateway(a.url, b.url, **settings) as client:
                waiting = [asyncio.create_task(client.stream()) for _ in range(2)]
                while not (a.running and len(b.calls) == 1):
                    await asyncio.sleep(0.01)
                a.health = 0
                assert [text_of(await task) for task in waiting] == [WORDS] * 2  # the first byte had not come
            a.health, a.answer = 200, begins
            async with gateway(a.url, **settings) as client:
                stream = asyncio.create_task(client.stream())
                while not a.running:
                    await asyncio.sleep(0.01)
                a.health = 0
                (message,) = errors(await stream)
                assert a.name in message and "does not answer health checks" in message

    run(scenario())


def test_a_replica_that_says_it_cannot_serve_may_go_on_with_its_streams():
    """A phalanx server's streams outlive its engine, while its /health is a 503."""

    async def scenario() -> None:
        go = asyncio.Event()

        async def pauses(call: Call) -> None:
            await call.begin()
            await call.piece(event("a"))
            await go.wait()
            await call.piece(event("b") + b"data: [DONE]\n\n")
            await call.end()

        async with StubReplica(pauses) as a, gateway(a.url) as client:
            stream = asyncio.create_task(client.stream())
            while not a.running:
                await asyncio.sleep(0.01)
            a.health = 503
            while (await client.get("/health"))[0] == 200:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # two looks for silent replicas
            go.set()
            assert text_of(await stream) == "ab"

    run(scenario())


@pytest.mark.parametrize("setting", ["request_timeout_secs", "stream_timeout_secs"])
def test_a_replica_that_trickles_or_stalls_meets_a_time_limit(setting):
    async def trickles(call: Call) -> None:
        await call.begin()
        await call.piece(event("a"))
        while setting == "request_timeout_secs":
            await call.piece(b":")
            await asyncio.sleep(0.05)
        await asyncio.sleep(3600)

    async def scenario(limit_s: float) -> None:
        async with StubReplica(trickles) as a, gateway(a.url, **{setting: limit_s}) as client:
            (message,) = errors(await client.stream())
            assert a.name in message and ("time was over" in message or f"sent nothing for {limit_s:g} s" in message)
            a.answer = hangs
            if setting == "request_timeout_secs":
                status, body = await client.ask()
                assert status == 504 and body["error"]["code"] == "replica_too_slow"

    try:
        run(scenario(0.4))
    except AssertionError:  # a busy machine may have missed the limit before the first byte
        run(scenario(20.0))


def test_health_that_flaps_loses_nothing():
    async def scenario() -> None:
        async with StubReplica(streaming(5)) as a, StubReplica(streaming(5)) as b, gateway(a.url, b.url) as client:

            async def until(stub: StubReplica, is_up: bool) -> None:
                while ((await client.get("/health"))[1]["replicas"][stub.name] == "ok") != is_up:
                    await asyncio.sleep(0.005)

            async def flap() -> None:
                for _ in range(3):
                    for stub in (a, b):  # one at a time
                        stub.health = 503
                        await until(stub, False)
                        stub.health = 200
                        await until(stub, True)

            flapping = asyncio.create_task(flap())
            while not flapping.done():
                assert text_of(await client.stream()) == WORDS
                await asyncio.sleep(0.02)
            await flapping

    run(scenario())


# What bad clients get --------------------------------------------------------------------------------------------


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
    ("chunk", "closes"),
    [(b"1\r\n \r\n", True), (b"1;%b\r\n \r\n" % (b"x" * 4000), True), (b"80\r\n%b\r\n" % (b" " * 128), False)],
    ids=["of one byte", "with extensions", "small"],
)
def test_a_body_that_is_mostly_the_framing_of_its_chunks_is_cut_off(chunk, closes):
    """9 MB in chunks of one byte kept the loop for 12 s; extensions went on for ever."""
    body = json.dumps({"model": "m", "messages": []}).encode()
    sent = chunk * (400_000 // len(chunk)) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    async def scenario() -> None:
        async with StubReplica(streaming(5)) as a, gateway(a.url) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
            head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            try:
                answer = await raw(client, head + sent)
            except ConnectionError:
                answer = b""
            assert answer[:15] == (b"" if closes else b"HTTP/1.1 200 OK"), answer
            assert text_of(await client.stream()) == WORDS

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
            for encoding in ("br", "zstd", "compress", "gzip, gzip"):
                sent = {**is_json, "Content-Encoding": encoding}
                async with client.session.post(client.url + CHAT, data=b"{}", headers=sent) as bad:
                    assert bad.status == 415 and "gzip, deflate" in (await bad.json())["error"]["message"], encoding
            for plain in ({}, {"Content-Type": "text/plain"}, {**is_json, "Host": "evil.example"}):  # as a web page
                async with client.session.post(client.url + CHAT, data=b"{}", headers=plain) as bad:
                    assert bad.status == (403 if "Host" in plain else 415)
            bare = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 13\r\n"
            reply = await raw(client, bare + b'Origin: null\r\n\r\n{"model":"m"}')
            assert reply.startswith(b"HTTP/1.1 415 ") and b"'missing'" in reply
            assert not a.calls
            reply = await raw(client, bare + b'\r\n{"model":"m"}')  # no page's: it would say where it is from
            assert reply.startswith(b"HTTP/1.1 200 ") and "content-type" not in a.calls.pop().headers
            for method, path in (("GET", "/"), ("POST", "/v2/x"), ("OPTIONS", CHAT), ("GET", "/admin/replicas")):
                async with client.request(method, path) as response:
                    assert response.status == 404, path
            reply = await raw(client, b"GET /v1/%2e%2e/reset HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 404 ")
            assert (await raw(client, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.0 400 ")
            head = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            reply = await raw(
                client, b"POST /v1/x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n" + head + b"\r\n{}"
            )
            assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ") and a.calls.pop()
            assert (await client.ask())[0] == 200

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
                assert len(client.gateway._desk.dispatcher.queue) <= 8 and a.running <= 2
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


# The user --------------------------------------------------------------------------------------------------------


def test_a_replica_is_added_drained_and_removed_while_requests_run(caplog):
    async def scenario() -> None:
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await call.begin()
            await call.piece(event("a"))
            await go.wait()
            await call.piece(b"data: [DONE]\n\n")
            await call.end()

        async with StubReplica(waits) as a, StubReplica(streaming(5)) as b, gateway(a.url, admin_key="adm") as client:

            async def admin(method: str, path: str = "", body: Any = None, key: str = "adm") -> tuple[int, Any]:
                async with client.request(
                    method, f"/admin/replicas{path}", body, Authorization=f"Bearer {key}"
                ) as response:
                    return response.status, await response.json()

            assert (await admin("GET", key="wrong"))[0] == 401
            assert "A wrong admin key came from 127.0.0.1" in caplog.text
            stream = asyncio.create_task(client.stream())
            while not a.running:
                await asyncio.sleep(0.01)
            assert (await admin("POST", body={"name": "b", "url": b.url, "wieght": 1}))[0] == 400
            assert (await admin("POST", body={"name": "b", "url": b.url}))[0] == 200
            assert (await admin("POST", body={"name": "b", "url": b.url}))[0] == 400
            await client.until_up(2)
            status, said = await admin("POST", f"/{a.name}/drain?timeout=0.05")
            assert (status, said["state"], said["in_flight"]) == (200, "draining", 1)
            for _ in range(3):
                assert text_of(await client.stream()) == WORDS
            draining = asyncio.create_task(admin("POST", f"/{a.name}/drain"))
            removing = asyncio.create_task(admin("DELETE", f"/{a.name}"))
            await asyncio.sleep(0.05)
            assert not draining.done() and not removing.done() and not stream.done()
            go.set()
            assert text_of(await stream) == "a"
            assert (await draining)[1]["in_flight"] == 0
            assert (await removing)[1] == {"name": a.name, "in_flight": 0, "removed": True}
            assert [one["name"] for one in (await admin("GET"))[1]["replicas"]] == ["b"]
            assert (await admin("DELETE", "/nobody"))[0] == 404

    run(scenario())


def test_a_reload_in_mid_stream_loses_nothing(tmp_path):
    file, keys = tmp_path / "replicas.toml", tmp_path / "keys.toml"

    async def scenario() -> None:
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await call.begin()
            await call.piece(event("a"))
            await go.wait()
            await call.piece(event("b") + b"data: [DONE]\n\n")
            await call.end()

        async with StubReplica(waits) as a, StubReplica(streaming(5)) as b:
            file.write_text(f'[[replica]]\nname = "a"\nurl = "{a.url}"\n')
            keys.write_text('[[key]]\nname = "ci"\nkey = "key-of-ci"\nmax_in_flight = 1\n')
            settings = {"replicas": str(file), "keys": str(keys), "admin_key": "adm"}
            async with gateway(up=1, key="key-of-ci", **settings) as client:
                stream = asyncio.create_task(client.stream())
                while not a.running:
                    await asyncio.sleep(0.01)
                assert (await client.ask())[0] == 429  # one at once
                file.write_text(f'[[replica]]\nname = "b"\nurl = "{b.url}"\nwieght = 1\n')
                client.gateway.reload()  # refused whole
                assert (await client.get("/health"))[1]["replicas"] == {"a": "ok"}
                file.write_text(f'[[replica]]\nname = "b"\nurl = "{b.url}"\n')
                keys.write_text('[[key]]\nname = "ci"\nkey = "key-of-ci"\nmax_in_flight = 2\n')
                client.gateway.reload()
                await client.until_up(1)
                assert (await client.get("/health"))[1]["replicas"] == {"b": "ok"}
                assert text_of(await client.stream()) == WORDS
                go.set()
                assert text_of(await stream) == "ab"

    run(scenario())


def test_the_gateway_drains_and_then_cuts_off_with_an_error():
    async def begins(call: Call) -> None:
        await call.begin()
        await call.piece(event("a"))
        await asyncio.sleep(3600)

    async def scenario() -> None:
        async with StubReplica(begins) as a, gateway(a.url, shutdown_grace_period_secs=600.0) as client:
            stream = asyncio.create_task(client.stream())
            while not a.running:
                await asyncio.sleep(0.01)
            client.gateway.stop()
            while (await client.get("/health"))[0] == 200:
                await asyncio.sleep(0.01)
            status, health = await client.get("/health")
            assert (status, health["status"]) == (503, "closing")
            status, body = await client.ask()
            assert status == 503 and "shutting down" in body["error"]["message"]
            assert not stream.done()
            client.gateway.stop()  # at once
            assert errors(await stream) == ["The gateway is shutting down."]
        async with StubReplica(hangs, limit=1) as a, gateway(a.url, shutdown_grace_period_secs=0.1) as client:
            asked = [asyncio.create_task(client.ask()) for _ in range(2)]  # one waits for the replica, one for a place
            while not (a.running and client.gateway._desk.dispatcher.queue):
                await asyncio.sleep(0.01)
            client.gateway.stop()
            assert [(await task)[0] for task in asked] == [503, 503]

    run(scenario())


def test_tls_on_both_sides(tmp_path: Path):
    made = make_certificate("test", addresses=["localhost"])
    certificate, key = str(tmp_path / "c.pem"), str(tmp_path / "k.pem")
    Path(certificate).write_text(made.certificate)
    Path(key).write_text(made.key)

    async def scenario() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        async with StubReplica(streaming(5)) as a:
            inner = await asyncio.start_server(a._serve, "127.0.0.1", 0, ssl=context)
            url = f"https://localhost:{inner.sockets[0].getsockname()[1]}"
            trusting = {"worker_ca": certificate, "ssl_certfile": certificate, "ssl_keyfile": key}
            async with gateway(url, tls=certificate, **trusting) as client:
                assert text_of(await client.stream()) == WORDS
                with pytest.raises(aiohttp.ClientError):
                    async with client.session.get(client.url.replace("https", "http") + "/health"):
                        pass
            async with gateway(url, up=0) as client:  # trusts the system's authorities alone
                async with asyncio.timeout(LIMIT_S):
                    while "certificate" not in str((await client.get("/health"))[1]):
                        await asyncio.sleep(0.01)
            inner.close()

    run(scenario())


def test_metrics_tell_what_happened():
    async def scenario() -> None:
        async with StubReplica(refuses) as a, StubReplica(streaming(5)) as b, gateway(a.url, b.url) as client:
            for _ in range(4):
                await client.stream()
            async with client.request("GET", "/metrics") as response:
                text = await response.text()
            assert 'phalanx:gateway_requests_total{code="200"} 4.0' in text
            assert f'phalanx:gateway_attempts_total{{replica="{b.name}",verdict="answered"}} 4.0' in text
            assert f'phalanx:gateway_retries_total{{replica="{a.name}"}}' in text
            assert f'phalanx:gateway_replica_up{{replica="{b.name}"}} 1.0' in text
            assert "phalanx:gateway_time_to_first_byte_seconds_count 4.0" in text

    run(scenario())


def test_a_conversation_stays_on_its_replica():
    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a, StubReplica(streaming(1)) as b:
            async with gateway(a.url, b.url, policy="cache_aware") as client:
                stubs: dict[str, set[str]] = {"x": set(), "y": set()}
                for turn in range(6):
                    for topic in "xy":
                        messages = [
                            {"role": "user", "content": topic * 900},
                            *({"role": "user", "content": str(i)} for i in range(turn)),
                        ]
                        async with client.request(
                            "POST", CHAT, {"model": "m", "messages": messages, "stream": True}
                        ) as response:
                            await response.read()
                            stubs[topic].add(response.headers["x-phalanx-replica"])
                assert len(stubs["x"]) == len(stubs["y"]) == 1 and stubs["x"] != stubs["y"]

    run(scenario())
