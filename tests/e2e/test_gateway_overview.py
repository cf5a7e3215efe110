"""What a gateway's page sees, and the life of a request that the gateway asks its replicas for."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.gateways import CHAT, Client, gateway, run
from support.serving import CONFIG, fake_engine, make_tokenizer, running_server
from support.stub_replica import StubReplica, streaming
from support.token_replica import Fault, TokenReplica

from phalanx.gateway.settings.key_limits import KeyLimits
from phalanx.gateway.settings.keys_file import NamedKey
from phalanx.supervision.fake_engine import replying

KEYS = ("mine-1234", "yours-567")


async def parts(client: Client, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """What the stream has told, as soon as it is what is wanted."""
    found: dict[str, Any] = {}
    async with client.request("GET", "/v1/overview/events") as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line.startswith(b"data: "):
                said = json.loads(line[6:])
                found |= said.get("set", said)
                if wanted(found):
                    return found
    raise AssertionError("the stream has ended")


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for name, part in found.items() if name.startswith("requests/")]


def test_replicas_and_requests_are_shown() -> None:
    async def scenario() -> None:
        async with StubReplica(streaming(2)) as stub, gateway(stub.url) as client:
            await client.stream()
            found = await parts(client, rows)
            (replica,) = [part for name, part in found.items() if name.startswith("replicas/")]
            assert replica["state"] == "up" and "url" not in replica
            (row,) = rows(found)
            assert (row["state"], row["replica"], row["moves"]) == ("finished", replica["name"], 0)
            assert found["server"]["kind"] == "gateway" and found["events/1"]["is_good"]

    run(scenario())


def test_a_key_sees_its_own_and_the_gateways_admin_key_all() -> None:
    async def scenario() -> None:
        async with (
            StubReplica(streaming(2)) as stub,
            gateway(stub.url, api_key=KEYS, admin_key="gateway-admin", key=KEYS[0]) as client,
        ):
            await client.stream()
            async with client.request("GET", "/v1/overview/events", Authorization="Bearer none") as refused:
                assert refused.status == 401
            for key, n in ((KEYS[0], 1), (KEYS[1], 0), ("gateway-admin", 1)):
                client._headers = {"Authorization": f"Bearer {key}"}
                assert len(rows(await parts(client, lambda found: "server" in found))) == n

    run(scenario())


def test_the_stream_of_a_key_that_is_taken_out_of_the_file_ends() -> None:
    named = [NamedKey(name=name, key=f"{name}-1234", limits=KeyLimits()) for name in ("mine", "yours")]

    async def scenario() -> None:
        async with (
            StubReplica(streaming(2)) as stub,
            gateway(stub.url, key="other-123", api_key=("other-123",)) as client,
        ):
            client.gateway._clients.set_named(named)
            client._headers = {"Authorization": "Bearer mine-1234"}
            async with client.request("GET", "/v1/overview/events") as answer:
                assert (await answer.content.readline()).startswith(b"event: snapshot")
                client.gateway._clients.set_named(named[1:])
                await answer.content.read()  # to the end
            async with client.request("GET", "/v1/overview/events") as answer:
                assert answer.status == 401

    run(scenario())


def test_why_a_replica_cannot_be_reached_is_told_without_its_address() -> None:
    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # and does not listen
            async with gateway(f"http://127.0.0.1:{closed.getsockname()[1]}", up=0) as client:
                found = await parts(client, lambda found: "events/1" in found)
                (replica,) = [part for name, part in found.items() if name.startswith("replicas/")]
                assert replica["reason"] == "cannot be reached (Connection refused)"
                assert found["events/1"]["what"].endswith("cannot be reached (Connection refused).")

    run(scenario())


def test_a_move_is_among_the_events_of_its_own_key_with_its_gap() -> None:
    async def scenario() -> None:
        async with (
            TokenReplica(Fault(3, "reset")) as first,
            TokenReplica() as second,
            gateway(
                first.url, second.url, key=KEYS[0], api_key=KEYS, worker_admin_key="adm", policy="round_robin"
            ) as client,
        ):
            assert "error" not in str(await client.stream())
            names = [url.removeprefix("http://") for url in (first.url, second.url)]
            for key, n in ((KEYS[0], 1), (KEYS[1], 0)):
                client._headers = {"Authorization": f"Bearer {key}"}
                found = await parts(client, lambda found: "server" in found)
                moves = [part for name, part in found.items() if name.startswith("moves/")]
                assert len(moves) == n
                for move in moves:
                    assert f"moved from {names[0]} to {names[1]}" in move["what"] and move["at"] > 1.7e9
                    assert move["gap_seconds"] >= 0 and f"after {move['gap_seconds']:.2f} s" in move["did"]

    run(scenario())


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two servers with an admin key."""
    tokenizer = make_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))
    config = replace(CONFIG, api_key=("inner-key",), admin_key="inner-admin")
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_server(tokenizer, fake_engine(tokenizer, replying([5, 0])), config))
            for _ in range(2)
        ]


SETTINGS: dict[str, Any] = {
    "worker_key": "inner-key", "worker_admin_key": "inner-admin", "api_key": KEYS, "admin_key": "gateway-admin"
}  # fmt: skip


def test_a_life_is_told_by_the_replica_that_had_the_request(servers: Any) -> None:
    async def scenario() -> None:
        async with gateway(*(server.origin for server in servers), key=KEYS[0], **SETTINGS) as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            async with client.request("POST", CHAT, body) as answer:
                request_id, id = answer.headers["x-request-id"], (await answer.json())["id"]
            for asked in (request_id, id):
                status, life = await client.get(f"/v1/requests/{asked}")
                assert status == 200 and life["replicas"][0]["choices"][0]["output_tokens"] == 2
                assert any("got 2 tokens in" in line or "prompt tokens" in line for line in life["story"])
            client._headers = {"Authorization": f"Bearer {KEYS[1]}"}
            assert [(await client.get(f"/v1/requests/{asked}"))[0] for asked in (request_id, id)] == [404, 404]
            client._headers = {"Authorization": "Bearer gateway-admin"}
            assert [(await client.get(f"/v1/requests/{asked}"))[0] for asked in (request_id, id)] == [200, 200]

    run(scenario())


def test_without_the_replicas_admin_key_no_client_sees_anothers_request(servers: Any) -> None:
    async def scenario() -> None:
        settings = {**SETTINGS, "worker_admin_key": None}
        async with gateway(servers[0].origin, key=KEYS[0], **settings) as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            async with client.request("POST", CHAT, body) as answer:
                request_id, id = answer.headers["x-request-id"], (await answer.json())["id"]
            assert (await client.get(f"/v1/requests/{request_id}"))[0] == 200
            client._headers = {"Authorization": f"Bearer {KEYS[1]}"}
            assert [(await client.get(f"/v1/requests/{asked}"))[0] for asked in (request_id, id)] == [404, 404]

    run(scenario())
