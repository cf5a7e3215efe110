"""The gateway before stand-ins for replicas, each as bad as can be: every case ends in a named state."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from support.gateways import CHAT, LIMIT_S, errors, gateway, run, text_of
from support.stub_replica import WORDS, Answer, Call, StubReplica, begins, event, hangs, refuses, streaming

from phalanx.gateway.dispatch.fleet import MAX_BYTES


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


async def closes(call: Call) -> None:
    call.break_off()


async def is_no_http(call: Call) -> None:
    await call.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    call.break_off()


async def cuts_a_whole_answer(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    call.break_off()


async def sends_a_header_with_a_control(call: Call) -> None:
    await call.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nopenai-x: a\x0b\r\nContent-Length: 2\r\n\r\n{}"
    )


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
        sends_a_header_with_a_control,
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


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_answer_whose_framing_goes_wrong_has_failed_at_once(is_whole):
    """aiohttp closes the connection, and tells no reader of the body: its client waited until it counted as silent."""
    has_begun = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.begin("application/json" if is_whole else "text/event-stream")
        await call.piece(event("a"))
        await has_begun.wait()
        await call.send(b"zzz\r\n")
        await asyncio.sleep(3600)

    async def scenario() -> None:
        settings = {"stream_timeout_secs": 3600.0, "retry_max_retries": 0}
        async with StubReplica(answer) as a, gateway(a.url, **settings) as client:
            body = {"model": "m", "messages": [], "stream": not is_whole}
            asked = asyncio.create_task(client.session.post(client.url + CHAT, json=body))
            if is_whole:
                await asyncio.sleep(0.1)  # the head has come before, as a rule; else it fails with that
            else:
                await (await asked).content.readuntil(b"\n\n")
            has_begun.set()
            message = await (await asked).text()
            assert a.name in message and "broke HTTP's framing" in message

    run(scenario())


def test_a_storm_of_5xx_opens_the_circuit_if_another_replica_answers_and_a_4xx_does_not(caplog):
    """Which is the client's own failure, and in no log that of an attempt. What every replica fails may be, too."""
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
            for _ in range(10):
                assert (await client.ask())[0] == 500
            assert caplog.text.count(f"an attempt on {a.name} failed: it answered 500") == 10 and len(a.calls) == 20
        async with StubReplica(answer) as a, StubReplica(streaming(1)) as b:
            async with gateway(a.url, b.url, cb_failure_threshold=4) as client:
                while "failed 4 requests in a row" not in (await client.get("/health"))[1]["replicas"][a.name]:
                    assert (await client.ask())[0] == 200
                n = len(a.calls)
                for _ in range(10):
                    assert (await client.ask())[0] == 200
                assert len(a.calls) == n

    run(scenario())


def test_a_request_that_waits_for_a_replica_that_goes_down_returns_to_the_one_that_failed_it():
    async def scenario() -> None:
        async with StubReplica(hangs, limit=1) as a, StubReplica(hangs, limit=1) as b, gateway(a.url, b.url) as client:
            held = asyncio.create_task(client.ask())
            while not (a.running or b.running):
                await asyncio.sleep(0.01)
            busy, other = (a, b) if a.running else (b, a)

            async def breaks_once(call: Call) -> None:
                other.answer = streaming(1)
                call.break_off()

            other.answer = breaks_once
            waits = asyncio.create_task(client.ask())
            while client.gateway._dispatcher.core.n_waiting != 1:
                assert not waits.done(), waits.result()
                await asyncio.sleep(0.01)
            busy.health = 503
            assert (await waits)[0] == 200 and not held.done()
            held.cancel()

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
            a.models = ("m", "x" * MAX_BYTES)
            async with asyncio.timeout(LIMIT_S):
                while (await client.get("/health"))[0] == 200:
                    await asyncio.sleep(0.01)
            said = (await client.ask())[1]["error"]["message"]
            assert f"{a.name}: fails health checks (/v1/models has more than {MAX_BYTES >> 10} KiB)" in said

    run(scenario())


def test_a_replica_that_falls_silent_is_found_by_its_health():
    """As a stopped process or a host without a cable: the connection stays, and nothing comes."""

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
        async with StubReplica(streaming(2, go_on=go)) as a, gateway(a.url) as client:
            stream = asyncio.create_task(client.stream())
            while not a.running:
                await asyncio.sleep(0.01)
            a.health = 503
            while (await client.get("/health"))[0] == 200:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # two looks for silent replicas
            go.set()
            assert text_of(await stream) == "0 1 "

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
