"""Benchmarks that send hundreds of streams at once from one address: the defaults let them wait, and what is refused
names the flag that would let it in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from support.gateways import CHAT, gateway, run
from support.scripted_model import tokenizer_of
from support.serving import MODEL, Running, fake_engine, running_server

from phalanx.config import EngineConfig
from phalanx.http.connection_table import limits_for
from phalanx.open_files import raise_limit
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.server.start import limits_of
from phalanx.text.tokenizer import Tokenizer

STREAMS = 512  # of guidellm's sweep
ROWS = 16
DEFAULTS = ServerConfig(
    engine=EngineConfig(model="/models/tiny", max_num_seqs=ROWS), port=0, served_model_name=(MODEL,)
)
BODY = {"model": MODEL, "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": "hello " * 50}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    raise_limit(4096)  # both ends of each connection are in this process
    with running_server(tokenizer, fake_engine(tokenizer, max_num_seqs=ROWS), DEFAULTS) as running:
        yield running


async def sweep(origin: str) -> Counter[tuple[int, bool]]:
    """Statuses of so many streams at once, each with whether it was whole."""

    async def ask(session: aiohttp.ClientSession) -> tuple[int, bool]:
        async with session.post(origin + CHAT, json=BODY) as response:
            return response.status, (await response.read()).endswith(b"data: [DONE]\n\n")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return Counter(await asyncio.gather(*(ask(session) for _ in range(STREAMS))))


def test_a_server_answers_all_streams_of_a_sweep(server: Running) -> None:
    async def scenario() -> None:
        assert await sweep(server.origin) == {(200, True): STREAMS}

    run(scenario())


def test_a_gateway_answers_all_streams_of_a_sweep(server: Running) -> None:
    async def scenario() -> None:
        async with gateway(server.origin) as client:
            assert await sweep(client.url) == {(200, True): STREAMS}

    run(scenario())


def test_there_are_connections_for_all_that_may_wait() -> None:
    assert limits_of(DEFAULTS).per_address == ROWS + DEFAULTS.queue
    assert limits_for(None, None, 32).total == 1024


async def refusal(origin: str, n: int, **headers: str) -> str:
    """The message of the first 429 among so many requests at once."""

    async def ask(session: aiohttp.ClientSession) -> str:
        async with session.post(origin + CHAT, json=BODY) as response:
            if response.status == 429:
                assert int(response.headers["retry-after"]) >= 1
                return str((await response.json())["error"]["message"])
            await asyncio.Event().wait()  # the engine stands still
            raise AssertionError

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        tasks = [asyncio.create_task(ask(session)) for _ in range(n)]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        return done.pop().result()


@pytest.mark.parametrize(
    ("more", "flag"), [({"queue": 2}, "--queue 2"), ({"max_body_mb": 0.001}, "32 times --max-body-mb")]
)
def test_a_full_server_names_the_flag(tokenizer: Tokenizer, more: dict[str, Any], flag: str) -> None:
    engine = fake_engine(tokenizer, max_num_seqs=ROWS, manual=True)
    with running_server(tokenizer, engine, replace(DEFAULTS, **more)) as running:
        assert flag in asyncio.run(refusal(running.origin, 40))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"queue_size": 2}, "(--queue-size)"), ({"queue_timeout_secs": 0.05}, "(--queue-timeout-secs)")],
)
def test_a_full_gateway_names_the_flag(tokenizer: Tokenizer, settings: dict[str, Any], flag: str) -> None:
    async def scenario(origin: str) -> None:
        async with gateway(origin, **settings) as client:
            assert flag in await refusal(client.url, 40)

    engine = fake_engine(tokenizer, max_num_seqs=ROWS, manual=True)
    with running_server(tokenizer, engine, DEFAULTS) as running:
        run(scenario(running.origin))


@pytest.mark.parametrize(
    ("limit", "name"),
    [("max_in_flight = 2", "max_in_flight"), ("requests_per_minute = 2", "requests_per_minute"),
     ("tokens_per_minute = 300", "tokens_per_minute")],
)  # fmt: skip
def test_a_keys_limit_is_named(tokenizer: Tokenizer, limit: str, name: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nkey = "one-12345"\n{limit}\n')
    engine = fake_engine(tokenizer, max_num_seqs=ROWS, manual=True)

    async def scenario(origin: str) -> None:
        async with gateway(origin, keys=str(keys), key="one-12345") as client:
            assert f"{name} in --keys" in await refusal(client.url, 10, Authorization="Bearer one-12345")

    with running_server(tokenizer, engine, DEFAULTS) as running:
        run(scenario(running.origin))
