"""Whose a request is on a server that a gateway asks: its word counts only with the admin key, on every path."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, MODEL, fake_engine, serving

from phalanx.http.owners import OWNER, owner_header
from phalanx.http.stream_records import MIGRATION
from phalanx.supervision.fake_engine import replying
from phalanx.types import Submit

ADMIN = "the gateway's"
KEYED = replace(CONFIG, api_key=("inner", "other"), admin_key=ADMIN)
ASK = {"model": MODEL, "messages": CHAT["messages"], "max_tokens": 2}
GENERATE_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": 2},
    "/v1/messages": ASK,
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 16},
    "/api/chat": {"model": MODEL, "messages": CHAT["messages"], "options": {"num_predict": 2}},
    "/api/generate": {"model": MODEL, "prompt": "hello", "options": {"num_predict": 2}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT["messages"]},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "hello"},
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
    "/api/show": {"model": MODEL},
}
READ = ["/v1/models", f"/v1/models/{MODEL}", "/tokenizer_info", "/api/tags", "/api/ps", "/metrics"]
MADE = owner_header("me", ADMIN)
FORGED = [
    "", "x", "me", ADMIN, "inner", MADE.partition(".")[0], MADE + "0", MADE.upper(), owner_header("me", "inner"),
    owner_header("me", ""), ".", "." + MADE.partition(".")[2], "\xe9.\xe9",
]  # fmt: skip


def run(tokenizer, scenario, config=KEYED):
    async def main():
        engine = fake_engine(tokenizer, replying(tokenizer.encode("hello")))
        async with asyncio.timeout(120), serving(tokenizer, engine, config) as client:
            await scenario(client, engine)

    asyncio.run(main())


async def ask(client: httpx.AsyncClient, path: str, headers: Mapping[str, str], key: str = "inner") -> httpx.Response:
    own = {"authorization": f"Bearer {key}"} if key else {}
    given = [(name.encode(), text.encode("latin-1")) for name, text in {**own, **headers}.items()]
    if path in READ:
        return await client.get(path, headers=given)
    return await client.post(path, json={**GENERATE_ROUTES, **OTHERS}[path], headers=given)


def owners(engine) -> list[str]:
    return [message.request.owner for message in engine.received if isinstance(message, Submit)]


@pytest.mark.parametrize("path", GENERATE_ROUTES)
@pytest.mark.parametrize("keys", [("inner", "other"), ("", "")])
def test_each_client_of_a_gateway_is_an_owner_of_its_own(tokenizer, path, keys):
    """And none is one that asks the server itself, or through a gateway with another key."""

    async def scenario(client, engine):
        for key in keys:
            for headers in ({}, {OWNER: MADE}, {OWNER: MADE}, {OWNER: owner_header("you", ADMIN)}):
                assert (await ask(client, path, headers, key)).status_code == 200
        found = owners(engine)
        direct, me, me_again, you = found[:4]
        assert me == me_again and len({direct, me, you}) == 3
        assert len(set(found)) == (6 if keys[0] else 3)
        assert not any("me" in owner or "/" in owner or ADMIN in owner for owner in found)

    run(tokenizer, scenario, replace(KEYED, api_key=keys if keys[0] else ()))


@pytest.mark.parametrize("path", [*GENERATE_ROUTES, *OTHERS, *READ])
def test_on_every_path_what_was_made_without_the_admin_key_is_refused(tokenizer, path, caplog):
    async def scenario(client, engine):
        for text in FORGED:
            refused = await ask(client, path, {OWNER: text})
            assert refused.status_code == 403 and f"{OWNER} is not made with this server's --admin-key" in refused.text
        assert (await ask(client, path, {OWNER: MADE}, key="")).status_code == 401  # it is no API key
        assert not engine.received and (await ask(client, path, {OWNER: MADE})).status_code == 200

    run(tokenizer, scenario)
    assert {record.message for record in caplog.records} == {"A wrong admin key came from 127.0.0.1"}


@pytest.mark.parametrize("path", [*GENERATE_ROUTES, *OTHERS, *READ])
def test_a_server_without_an_admin_key_takes_nobodys_word(tokenizer, path):
    async def scenario(client, engine):
        for text in [*FORGED, MADE]:
            refused = await ask(client, path, {OWNER: text})
            assert refused.status_code == 403 and f"{OWNER}: this server has no --admin-key" in refused.text
        assert not engine.received

    run(tokenizer, scenario, replace(KEYED, admin_key=None))


def test_it_opens_nothing_else(tokenizer):
    """No records of streams, and with another value beside it no stream that goes on from some."""

    async def scenario(client, engine):
        streamed = {**ASK, "stream": True}
        headers = {"authorization": "Bearer inner", OWNER: MADE}
        plain = await client.post("/v1/chat/completions", json=streamed, headers=headers)
        assert plain.status_code == 200 and "phalanx" not in plain.text
        for text in (MADE, MADE.partition(".")[2]):
            headers = {"authorization": "Bearer inner", OWNER: MADE, MIGRATION: text}
            assert (await client.post("/v1/chat/completions", json=streamed, headers=headers)).status_code == 403
        strangers = await client.get("/health", headers={OWNER: MADE})
        assert strangers.json() == {"status": "ok"}

    run(tokenizer, scenario)
