"""Two keys at a gateway before real servers: what a server keeps of one key's prompts, the other one does not find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from processes import gateway, wait_until
from support.serving import CONFIG, Running, running_server

from phalanx.config import EngineConfig
from phalanx.http.owners import OWNER, owner_header
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

KEYS = ("mine-1234", "yours-567")
MODEL = CONFIG.served_model_name[0]
LENGTH = {"model": MODEL, "max_tokens": 2, "temperature": 0}
OLLAMA = {"model": MODEL, "stream": False, "options": {"num_predict": 2, "temperature": 0}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Ask = tuple[str, dict[str, Any]]


def chat_of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def in_chat(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


CACHED: dict[str, Callable[[dict[str, Any]], int]] = {
    CHAT: in_chat,
    TEXT: in_chat,
    "/v1/messages": lambda usage: int(usage["cache_read_input_tokens"]),
    "/v1/responses": lambda usage: int(usage["input_tokens_details"]["cached_tokens"]),
}
PROMPTS: dict[str, Callable[[str], tuple[Ask, Ask]]] = {
    CHAT: lambda text: ((CHAT, {**LENGTH, **chat_of(text)}),) * 2,
    TEXT: lambda text: ((TEXT, {**LENGTH, "prompt": text}),) * 2,
    "/v1/messages": lambda text: (("/v1/messages", {**LENGTH, **chat_of(text)}),) * 2,
    "/v1/responses": lambda text: (("/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 16}),) * 2,
    "/api/chat": lambda text: (("/api/chat", {**OLLAMA, **chat_of(text)}), (CHAT, {**LENGTH, **chat_of(text)})),
    "/api/generate": lambda text: (
        ("/api/generate", {**OLLAMA, "prompt": text, "raw": True}),
        (TEXT, {**LENGTH, "prompt": text}),
    ),
}
"""Dialect -> what has a prompt of this text computed, and what asks how much of it is cached: Ollama's does not say."""


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        engine = EngineConfig(model=str(tiny_model), kv_cache_gb=0.1, prefix_cache_gb=0.05)
        config = replace(CONFIG, engine=engine, admin_key="adm", api_key=("inner",))
        tokenizer = Tokenizer.load(tiny_model)
        yield [stack.enter_context(running_server(tokenizer, EngineProcess(engine), config)) for _ in range(3)]


@pytest.fixture(scope="module", params=[2, 3])
def gateways(servers: list[Running], request: pytest.FixtureRequest) -> Iterator[tuple[int, list[httpx.Client]]]:
    """Before how many servers, and clients of it, each with a key of its own."""
    n: int = request.param
    urls = ",".join(server.origin for server in servers[:n])
    flags = ("--worker-urls", urls, "--worker-key", "inner", "--worker-admin-key", "adm", "--policy", "round_robin")
    with ExitStack() as stack:
        keys = [word for key in KEYS for word in ("--api-key", key)]
        _, url = stack.enter_context(gateway(*flags, *keys))
        mine, yours = (
            stack.enter_context(httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {key}"}))
            for key in KEYS
        )
        wait_until(lambda: len(mine.get("/health").json()["replicas"]) == n and are_all_up(mine))
        yield n, [mine, yours]


def are_all_up(client: httpx.Client) -> bool:
    return all(reason == "ok" for reason in client.get("/health").json()["replicas"].values())


def ask_each(client: httpx.Client, n: int, ask: Ask, **headers: str) -> list[int]:
    """Ask every replica once; how many tokens each had cached, where the dialect says it."""
    path, body = ask
    answers = [client.post(path, json=body, headers=headers).raise_for_status() for _ in range(n)]
    assert len({answer.headers["x-phalanx-replica"] for answer in answers}) == n
    return [CACHED[path](answer.json()["usage"]) for answer in answers] if path in CACHED else []


def new_prompt(name: str, n: int) -> str:
    """Of some hundred tokens; none begins as another one."""
    return f"{n} {name}: " + "the quick brown fox says hello to the world, and " * 10


@pytest.mark.parametrize("dialect", PROMPTS)
def test_no_key_finds_anothers_prompt(gateways, dialect):
    """At whichever replica; nor by a header that is forged. Its own it finds at each."""
    n, (mine, yours) = gateways
    computes, asks = PROMPTS[dialect](new_prompt(dialect, n))
    ask_each(mine, n, computes)
    assert ask_each(yours, n, asks, **{OWNER: owner_header("me", "guessed")}) == [0] * n
    assert min(ask_each(mine, n, asks) + ask_each(yours, n, asks)) > 16


def test_who_asks_a_server_itself_finds_nothing_and_forges_nothing(gateways, servers):
    n, (mine, _) = gateways
    ask = (CHAT, {**LENGTH, **chat_of(new_prompt("direct", n))})
    ask_each(mine, n, ask)
    for server in servers[:n]:
        with httpx.Client(base_url=server.origin, timeout=120, headers={"Authorization": "Bearer inner"}) as direct:
            for forged in (owner_header("me", "guessed"), owner_header("me", "inner"), "me"):
                assert direct.post(ask[0], json=ask[1], headers={OWNER: forged}).status_code == 403
            assert in_chat(direct.post(ask[0], json=ask[1]).raise_for_status().json()["usage"]) == 0
    assert min(ask_each(mine, n, ask)) > 16


def test_after_a_restart_of_server_and_gateway_a_key_finds_on_disk_its_own_alone(tiny_model: Path, tmp_path: Path):
    engine = EngineConfig(
        model=str(tiny_model), kv_cache_gb=0.1, prefix_cache_gb=0.05, prefix_cache_dir=str(tmp_path / "cache")
    )
    config = replace(CONFIG, engine=engine, admin_key="adm", api_key=("inner",))
    body = {**LENGTH, **chat_of(new_prompt("disk", 1))}

    def life(*asking: str) -> list[int]:
        """Tokens that each key's prompt finds on disk, once what is computed lies there."""
        with ExitStack() as stack:
            server = stack.enter_context(running_server(Tokenizer.load(tiny_model), EngineProcess(engine), config))
            keys = [word for key in KEYS for word in ("--api-key", key)]
            flags = ("--worker-urls", server.origin, "--worker-key", "inner", "--worker-admin-key", "adm")
            _, url = stack.enter_context(gateway(*flags, *keys))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=120))
            found = []
            for key in asking:
                authorised = {"Authorization": f"Bearer {key}"}
                wait_until(lambda: client.get("/health").status_code == 200)
                answer = client.post(CHAT, json=body, headers=authorised).raise_for_status()
                details = answer.json()["usage"]["prompt_tokens_details"]
                found.append(details.get("cached_tokens_details", {}).get("disk", details["cached_tokens"]))
            wait_until(lambda: server.wait_for(server.engine.ping()).disk_blocks == len(asking))
        return found

    mine, yours = KEYS
    assert life(mine) == [0]
    assert life(yours, mine) == [0, 256]
