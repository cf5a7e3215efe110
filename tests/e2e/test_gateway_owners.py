"""Whose request it is, as a gateway tells its replicas: on every kind of request, to phalanx servers alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from support.gateways import CHAT, Client, gateway, run
from support.stub_replica import Call, StubReplica, refuses, streaming
from support.token_replica import Fault, TokenReplica, undisturbed

from phalanx.http.api_keys import owner_of
from phalanx.http.owners import OWNER, owner_header, owner_on_server
from phalanx.http.stream_records import MIGRATION

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": []},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": []},
    "/v1/responses": {"input": "a"},
    "/api/chat": {"messages": [], "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/v1/messages/count_tokens": {"messages": []},
    "/v1/responses/input_tokens": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": []},
    "/v1/embeddings": {"input": "a"},
    "/api/show": {},
}
ASKED = [
    *(("POST", path) for path in BODIES),
    ("GET", "/tokenizer_info"),
    ("GET", "/api/ps"),
    ("DELETE", "/v1/files/a"),
]
STREAMS = [CHAT, "/v1/responses", "/v1/messages", "/api/chat"]
KEYS = ("mine-1234", "yours-567")
SETTINGS: dict[str, Any] = {"policy": "round_robin", "api_key": KEYS, "worker_key": "inner", "worker_admin_key": "adm"}
FORGED = {OWNER: "theirs", "X-PHALANX-OWNER": "theirs", "Connection": OWNER}


async def whole(call: Call) -> None:
    await call.whole(200, {"choices": [], "usage": {"total_tokens": 7}})


def phalanx_server(answer: Any = whole) -> StubReplica:
    stub = StubReplica(answer)
    stub.determinism_key = "n"
    return stub


@asynccontextmanager
async def behind_gateway(*replicas: StubReplica, **settings: Any) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        urls = [replica.url for replica in replicas]
        yield await stack.enter_async_context(gateway(*urls, key=KEYS[0], **{**SETTINGS, **settings}))


async def ask(client: Client, method: str, path: str, key: str | None = None, **headers: str) -> int:
    own = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "m", **BODIES[path]} if method == "POST" else None
    async with client.request(method, path, body, **own, **headers) as response:
        await response.read()
        return int(response.status)


def owner_in(headers: Mapping[str, str], admin_key: str | None = "adm") -> str:
    """Whose request a server with this admin key takes it for."""
    return owner_on_server("", headers.get(OWNER), admin_key)


def secrets_in(call: Call) -> list[str]:
    """Headers with what only phalanx servers may see."""
    return [name for name, text in call.headers.items() if "adm" in text or name in (OWNER, MIGRATION)]


# Every kind of request, every replica -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("migration_limit", [0, 3])
def test_every_kind_of_request_says_whose_it_is_at_every_replica(n, migration_limit):
    """Whether or not a stream could move; and where none can, the admin key itself is not sent."""

    async def scenario() -> None:
        replicas = [phalanx_server() for _ in range(n)]
        async with behind_gateway(*replicas, migration_limit=migration_limit) as client:
            found: dict[str, set[str]] = {}
            for key in KEYS:
                for method, path in ASKED:
                    for _ in replicas:
                        assert await ask(client, method, path, key) == 200
                calls = [list(replica.calls) for replica in replicas]
                assert all({call.path for call in mine} == {path for _, path in ASKED} for mine in calls)
                found[key] = {owner_in(call.headers) for mine in calls for call in mine}
                sent = {text for mine in calls for call in mine for text in call.headers.values()}
                assert ("adm" in sent) is bool(migration_limit)
                for replica in replicas:
                    replica.calls.clear()
            mine, yours = found.values()
            assert len(mine) == len(yours) == 1 and mine != yours and "" not in mine | yours

    run(scenario())


def test_a_client_is_the_same_after_a_restart_and_at_another_gateway():
    async def scenario() -> None:
        async with phalanx_server() as a:
            for more in ({}, {"api_key": KEYS[:1]}, {"worker_key": "another"}):
                async with gateway(a.url, key=KEYS[0], **{**SETTINGS, **more}) as client:
                    await ask(client, "POST", CHAT)
            assert len({call.headers[OWNER] for call in a.calls}) == 1

    run(scenario())


def test_each_replica_is_told_with_its_own_admin_key(tmp_path):
    async def scenario() -> None:
        async with phalanx_server() as a, phalanx_server() as b:
            file = tmp_path / "replicas.toml"
            tables = [
                f'[[replica]]\nname = "{name}"\nurl = "{one.url}"\nadmin_key = "of-{name}"\n'
                for name, one in (("a", a), ("b", b))
            ]
            file.write_text("".join(tables))
            async with gateway(up=2, key=KEYS[0], **{**SETTINGS, "replicas": str(file)}) as client:
                for _ in range(2):
                    await ask(client, "GET", "/api/ps")
            one, other = owner_in(a.calls[0].headers, "of-a"), owner_in(b.calls[0].headers, "of-b")
            assert one != other and len(a.calls) == len(b.calls) == 1

    run(scenario())


# Who may not say it, and who may not see it -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_a_clients_own_header_is_removed(n):
    async def scenario() -> None:
        replicas = [phalanx_server() for _ in range(n)]
        async with behind_gateway(*replicas) as client:
            for method, path in ASKED:
                for headers in ({}, *({name: text} for name, text in FORGED.items()), FORGED):
                    for replica in replicas:
                        replica.calls.clear()
                    async with client.session.request(
                        method,
                        client.url + path,
                        headers=[("Authorization", f"Bearer {KEYS[0]}"), *headers.items(), *headers.items()],
                        json={"model": "m"},
                    ) as response:
                        assert response.status == 200
                    ((call,),) = [replica.calls for replica in replicas if replica.calls]
                    assert owner_in(call.headers) == owner_in({OWNER: owner_header(owner_of(KEYS[0]), "adm")})

    run(scenario())


@pytest.mark.parametrize("settings", [{"api_key": ()}, {"worker_admin_key": None}, {"api_key": (), "worker_key": None}])
def test_a_clients_own_header_is_removed_where_the_gateway_has_none_to_say(settings):
    """Without keys all clients are one, as on a server without keys."""

    async def scenario() -> None:
        a = phalanx_server()
        async with behind_gateway(a, **settings) as client:
            for name, text in FORGED.items():
                async with client.session.request(
                    "POST",
                    client.url + CHAT,
                    headers={"Authorization": f"Bearer {KEYS[0]}", name: text},
                    json={"model": "m"},
                ) as response:
                    assert response.status == 200
            assert len(a.calls) == 3 and not any(OWNER in call.headers for call in a.calls)

    run(scenario())


@pytest.mark.parametrize("path", STREAMS)
def test_servers_of_other_vendors_see_neither_it_nor_the_admin_key(path):
    """Not before, between or after requests that phalanx servers get, and not where they take over from one."""

    async def scenario() -> None:
        foreign, own = [StubReplica(whole) for _ in range(2)], phalanx_server()
        async with behind_gateway(*foreign, own) as client:
            for method, asked in ASKED:
                for _ in range(3):
                    assert await ask(client, method, asked) == 200
            assert all(len(one.calls) == len(ASKED) for one in (*foreign, own))
            own.answer = refuses
            for _ in range(3):
                async with client.request("POST", path, {"model": "m", "stream": True}) as response:
                    assert response.status == 200
                    await response.read()
            assert len(own.calls) > len(ASKED) and all(OWNER in call.headers for call in own.calls)
            assert sum(len(one.calls) for one in foreign) == 2 * len(ASKED) + 3
            assert not any(secrets_in(call) for one in foreign for call in one.calls)

    run(scenario())


def test_a_phalanx_server_that_becomes_another_vendors_sees_it_no_more():
    async def scenario() -> None:
        a = phalanx_server()
        async with behind_gateway(a) as client:
            await ask(client, "POST", CHAT)
            assert OWNER in a.calls[-1].headers
            a.determinism_key = ""
            replica = client.gateway._dispatcher.core.replicas[a.name]
            while replica.health.determinism_key:
                await asyncio.sleep(0.005)
            await ask(client, "POST", CHAT)
            assert not secrets_in(a.calls[-1])

    run(scenario())


# Streams that move --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "death", "a pause"])
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("n", [2, 3])
def test_a_stream_that_moves_stays_its_owners(n, path, how):
    """From replica to replica, as often as it moves."""

    async def scenario() -> None:
        replicas = [*(TokenReplica(Fault(2, how)) for _ in range(n - 1)), TokenReplica()]
        async with behind_gateway(*replicas) as client:
            body = {"model": "m", "stream": True}
            async with client.request("POST", path, body) as response:
                assert await response.read() == undisturbed(path, json.dumps(body).encode())
            calls = [call for replica in replicas for call in replica.calls]
            assert len(calls) == n and len({call.headers[OWNER] for call in calls}) == 1
            assert owner_in(calls[0].headers) != ""
            assert [len(replica.resumes) for replica in replicas] == [0, *[1] * (n - 1)]

    run(scenario())


# An admin key that is not taken -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
def test_a_replica_that_does_not_take_the_key_answers_without(n, path, caplog):
    """Also where several requests were under way when the first of them was refused: no client sees a refusal."""

    async def scenario() -> None:
        asked = asyncio.Event()

        async def answer(call: Call) -> None:
            if OWNER not in call.headers:
                await whole(call)
                return
            if sum(OWNER in call.headers for one in replicas for call in one.calls) == 4:
                asked.set()
            await asked.wait()
            await call.whole(403, {"error": {"message": f"{OWNER} is not made with this server's --admin-key."}})

        replicas = [phalanx_server(answer) for _ in range(n)]
        async with behind_gateway(*replicas) as client:
            assert await asyncio.gather(*(ask(client, "POST", path) for _ in range(4))) == [200] * 4
            assert caplog.text.count("refuses its admin key") == n
            for replica in replicas:
                replica.calls.clear()
            assert await ask(client, "POST", path) == 200
            assert not any(secrets_in(call) for replica in replicas for call in replica.calls)

    run(scenario())


def test_a_refusal_of_something_else_is_the_clients():
    async def refuses_all(call: Call) -> None:
        await call.whole(403, {"error": {"message": "not this one"}})

    async def scenario() -> None:
        a = phalanx_server(refuses_all)
        async with behind_gateway(a) as client:
            assert [await ask(client, "POST", CHAT) for _ in range(2)] == [403, 403]
            assert all(OWNER in call.headers for call in a.calls) and len(a.calls) == 2

    run(scenario())


# What the gateway says at its start ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says", "is_silent_about"),
    [
        ({}, (), ("admin key",)),
        ({"worker_admin_key": None}, ("all API keys are one client", "--worker-admin-key", "streams end"), ()),
        ({"worker_admin_key": None, "api_key": ()}, ("streams end", "--worker-admin-key"), ("all API keys",)),
    ],
)
def test_what_is_lost_without_an_admin_key_is_said_once(settings, says, is_silent_about, caplog):
    caplog.set_level("INFO")

    async def scenario() -> None:
        a, b = (StubReplica(streaming(1)) for _ in range(2))
        async with behind_gateway(a, b, **settings) as client:
            await ask(client, "POST", CHAT)
        said = [record.message for record in caplog.records if "admin key" in record.message]
        assert len(said) == bool(says) and all("\n" not in line for line in said)
        assert all(word in said[0] for word in (*says, a.name, b.name) if says)
        assert not any(word in line for word in is_silent_about for line in said)

    run(scenario())


def test_replicas_of_a_file_that_have_a_key_are_not_named(tmp_path, caplog):
    async def scenario() -> None:
        async with StubReplica(whole) as a, StubReplica(whole) as b:
            file = tmp_path / "replicas.toml"
            file.write_text(
                f'[[replica]]\nname = "with"\nurl = "{a.url}"\nadmin_key = "adm"\n'
                f'[[replica]]\nname = "bare"\nurl = "{b.url}"\n'
            )
            settings = {**SETTINGS, "worker_admin_key": None, "replicas": str(file)}
            async with gateway(up=2, key=KEYS[0], **settings):
                (said,) = [record.message for record in caplog.records if "admin key" in record.message]
                assert said.startswith("no admin key for bare: ")

    run(scenario())
