"""The gateway before stand-ins for replicas that do as they should.

Gateway, replicas and client share one event loop; `test_gateway_processes.py` has real processes.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from support.gateways import CHAT, LIMIT_S, Client, gateway, run, text_of
from support.stub_replica import WORDS, Call, StubReplica, event, hangs, refuses, streaming

from phalanx.http.listening import bind
from phalanx.tls.certificates import make_certificate


def test_streams_pass_at_once_and_requests_are_shared_out():
    async def scenario() -> None:
        go = asyncio.Event()

        answer = streaming(1, go_on=go)
        async with StubReplica(answer) as a, StubReplica(answer) as b, gateway(a.url, b.url) as client:
            async with AsyncExitStack() as stack:
                body = {"model": "m", "messages": [], "stream": True}
                for _ in range(8):
                    response = await stack.enter_async_context(client.request("POST", CHAT, body))
                    assert b'"0 "' in await response.content.readany()  # while the replica has not gone on
                assert (a.running, b.running) == (4, 4)
                go.set()
            whole = await client.stream()
            assert text_of(whole) == "0 " and whole[-1] == "[DONE]"

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


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank", "/api/embed"])
def test_embeddings_of_a_model_that_no_replica_has_are_refused_with_what_to_do(path):
    async def scenario() -> None:
        async with StubReplica(streaming(1), models=("m",)) as a, gateway(a.url) as client:
            async with client.request("POST", path, {"model": "text-embedding-3-small", "input": "a"}) as response:
                error = (await response.json())["error"]
            said = error if path.startswith("/api/") else error["message"]
            assert response.status == 400 and not a.calls
            assert "'text-embedding-3-small' is not served here. Served are: m." in said
            assert "no embeddings" in said and "give the client another server" in said
            async with client.request("POST", path, {"model": "m", "input": "a"}) as response:
                await response.read()
            assert [call.path for call in a.calls] == [path], "its replica may be another vendor's"

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
            for asked in ("TWO", "two:latest", "Gpt-4o", "gpt-4o:latest"):  # as its replica calls it
                assert text_of(await client.stream(model=asked)) == "b0 "
                assert b.calls[-1].json["model"] == "two"
            assert (await client.get("/v1/models/GPT-4o:latest"))[1]["id"] == "gpt-4o"
            assert [card["id"] for card in (await client.get("/api/v0/models"))[1]["data"]] == [
                "m", "one", "two", "gpt-4o"
            ]  # fmt: skip
            assert (await client.get("/api/v0/models/One"))[1]["type"] == "llm"
            assert (await client.get("/api/v0/models/three"))[0] == 404
            async with client.request("GET", "/v1/models", anthropic_version="2023-06-01") as answer:
                assert (await answer.json())["data"][0]["display_name"] == "m"
            status, body = await client.ask(model="three")
            assert status == 404 and body["error"]["code"] == "model_not_found"
            assert "m, one, two" in body["error"]["message"]

    run(scenario())


def test_clients_that_list_models_at_the_same_time_take_one_connection_of_a_replica():
    """No limit of keys counts what lists models: else one client could take all connections that a replica accepts."""

    async def scenario() -> None:
        async with StubReplica(streaming(1)) as replica, gateway(replica.url) as client:
            replica.tags = 200
            replica.may_list.clear()
            asked = [asyncio.create_task(client.get("/api/tags")) for _ in range(20)]
            gone = asyncio.create_task(client.get("/api/tags"))
            while not replica.n_listed:
                await asyncio.sleep(0.01)
            for _ in range(20):  # those that come later
                assert (await client.get("/v1/models"))[0] == 200
            assert replica.n_listed == 1
            gone.cancel()  # a client that leaves takes the list from none
            replica.may_list.set()
            for status, tags in await asyncio.gather(*asked):
                assert status == 200 and [entry["name"] for entry in tags["models"]] == ["m:latest"]
            before = replica.n_listed
            assert (await client.get("/api/tags"))[0] == 200 and replica.n_listed == before + 1

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


@pytest.mark.parametrize("metrics_open", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["same port", "own port"])
def test_metrics_need_a_key_where_the_rest_does_unless_they_are_open(apart, metrics_open, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "prometheus"\nkey = "key-of-prometheus"\n')

    async def scenario() -> None:
        with bind("127.0.0.1", 0) as listener:
            at = listener if apart else None
            async with gateway("http://127.0.0.1:1", up=0, metrics=at, **settings) as client:
                port = listener.getsockname()[1] if apart else client.gateway.port
                for key, allowed in (("", metrics_open), ("wrong", metrics_open), ("key-of-prometheus", True)):
                    headers = {"Authorization": f"Bearer {key}"} if key else {}
                    async with client.session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as response:
                        text = await response.text()
                        assert response.status == (200 if allowed else 401), text
                        assert ("phalanx:gateway_requests" in text) == allowed
                        assert response.headers.get("WWW-Authenticate") == (None if allowed else "Bearer")

    settings = {"keys": str(keys), "metrics_open": metrics_open}
    run(scenario())


@pytest.mark.parametrize("texts", [["", "a"], [""]])
def test_the_first_text_is_timed_in_metrics_and_log_and_what_comes_before_it_is_not(texts, caplog):
    caplog.set_level("DEBUG", "phalanx")
    go_on = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.begin()
        for text in texts:
            await call.piece(event(text))
            await go_on.wait()
        await call.piece(b"data: [DONE]\n\n")
        await call.end()

    async def scenario() -> None:
        async with StubReplica(answer) as a, gateway(a.url) as client:
            body = {"model": "m", "messages": [], "stream": True}
            async with client.request("POST", CHAT, body) as response:
                assert await response.content.readuntil(b"\n\n") == event("")
                assert await n_timed(client) == 0
                go_on.set()
                assert await response.content.read() == b"".join(map(event, texts[1:])) + b"data: [DONE]\n\n"
            assert await n_timed(client) == ("a" in texts)

    run(scenario())
    (line,) = [line for line in caplog.messages if line.startswith(f"POST {CHAT} (")]
    assert re.search(r" s, the first text after \d+\.\d{3} s$" if "a" in texts else " s, no text$", line)


def test_a_whole_answer_is_timed_as_one_text(caplog):
    caplog.set_level("DEBUG", "phalanx")

    async def scenario() -> None:
        async with StubReplica(streaming(5)) as a, gateway(a.url) as client:
            assert (await client.ask())[0] == 200 and await n_timed(client) == 1

    run(scenario())
    assert caplog.text.count(" s, the first text after ") == 1


@pytest.mark.parametrize("size", [10, 9 << 20], ids=["held", "too large to be held"])
def test_a_whole_error_is_not_timed_as_a_text(size, caplog):
    caplog.set_level("DEBUG", "phalanx")

    async def answer(call: Call) -> None:
        await call.whole(400, {"error": {"message": "x" * size}})

    async def scenario() -> None:
        async with StubReplica(answer) as a, gateway(a.url) as client:
            assert (await client.ask())[0] == 400 and await n_timed(client) == 0

    run(scenario())
    assert " s, the first text after " not in caplog.text and " s, no text" in caplog.text


async def n_timed(client: Client) -> int:
    """Answers whose first text is in the metrics."""
    async with client.request("GET", "/metrics") as response:
        (line,) = [line for line in (await response.text()).splitlines() if "first_byte_seconds_count " in line]
    return int(float(line.rpartition(" ")[2]))


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


@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_a_conversation_waits_for_a_replica_that_has_it_on_disk_and_for_no_other(keeps_prefixes):
    """Other conversations come meanwhile, so that the other replica is the one whose turn it is."""

    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a, StubReplica(streaming(1)) as b:
            a.keeps_prefixes = b.keeps_prefixes = keeps_prefixes
            async with gateway(a.url, b.url, policy="cache_aware", health_failure_threshold=1) as client:

                async def ask(topic: str) -> str:
                    body = {"model": "m", "messages": [{"role": "user", "content": topic * 900}], "stream": True}
                    async with client.request("POST", CHAT, body) as response:
                        await response.read()
                        return response.headers["x-phalanx-replica"]

                home = await ask("x")
                stub = a if a.calls else b
                stub.health = 503
                async with asyncio.timeout(LIMIT_S):
                    while list((await client.get("/health"))[1]["replicas"].values()).count("ok") != 1:
                        await asyncio.sleep(0.01)
                stub.health = 200
                await client.until_up(2)
                assert [await ask("y"), await ask("z")] != [home, home]
                assert ((await ask("x")) == home) is keeps_prefixes

    run(scenario())
