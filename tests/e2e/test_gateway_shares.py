"""Two keys at a gateway before servers on an engine that waits for the test: neither keeps the other one out of places,
memory or turns, or sees its calls, and a stream stays its own where it goes on.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.gateways import CHAT, Client, gateway, run
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import CONFIG, MODEL, Running, running_server

from phalanx.server.endpoints.generating import CompletionEndpoints
from phalanx.text.grammar_process import GrammarReply, GrammarTrial
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import SequenceRequest, Submit

KEYS = ("mine-1234", "yours-567")
MINE, YOURS = KEYS
ROWS, QUEUE = 2, 6
PLACES = ROWS + QUEUE
BODY_MB = 0.1
BODIES = 4  # of the largest size that a server reads together
SAID = '<tool_call> {"name": "weather",  "arguments": {"city":  "Oslo"}}</tool_call><|im_end|>'
"""Not as a template would write it."""
MARK = "#"  # one token, and nowhere else in an answer

Ask = tuple[str, dict[str, Any]]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ASKS: dict[str, Callable[[str], dict[str, Any]]] = {
    CHAT: lambda text: {"messages": messages(text)},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 100_000},
    "/v1/messages": lambda text: {"messages": messages(text), "max_tokens": 100_000},
    "/v1/responses": lambda text: {"input": text},
    "/api/chat": lambda text: {"messages": messages(text), "stream": False},
    "/api/generate": lambda text: {"prompt": text, "stream": False},
}


class HeldEngine(ScriptedEngine):
    """Calls the weather's tool, or says marks without end if it is asked for them; may stand still."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, self._answer, step_s=0.005)
        self.is_held = False
        (self._mark,) = tokenizer.encode(MARK, add_special_tokens=False)

    def step(self) -> None:
        if not self.is_held:
            super().step()

    def _next(self, request: SequenceRequest, position: int) -> int:
        return self._mark if MARK in self._tokenizer.decode(request.prompt[-100:]) else super()._next(request, position)

    def _answer(self, prompt: str) -> str:
        return SAID if "<tools>" in prompt and "rain" not in prompt else "Fine.<|im_end|>"

    @property
    def requests(self) -> list[SequenceRequest]:
        return [message.request for message in list(self.received) if isinstance(message, Submit)]


Served = list[tuple[Running, HeldEngine]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))


@pytest.fixture(scope="module")
def all_servers(tokenizer: Tokenizer) -> Iterator[Served]:
    engine = replace(CONFIG.engine, max_num_seqs=ROWS)
    config = replace(CONFIG, engine=engine, queue=QUEUE, api_key=("inner",), admin_key="adm", max_body_mb=BODY_MB)
    with ExitStack() as stack:
        engines = [HeldEngine(tokenizer) for _ in range(3)]
        yield [(stack.enter_context(running_server(tokenizer, one, config)), one) for one in engines]


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.full)])
def servers(all_servers: Served, request: pytest.FixtureRequest) -> Iterator[Served]:
    served = all_servers[: request.param]
    for _, engine in served:
        engine.received.clear()
    yield served
    for _, engine in served:
        engine.is_held = False


@asynccontextmanager
async def before(servers: Served, folder: Path) -> AsyncIterator[Client]:
    """A gateway that keeps no request waiting itself."""
    file = folder / "replicas.toml"
    file.write_text(
        "".join(
            f'[[replica]]\nname = "r{i}"\nurl = "{running.origin}"\nmax_in_flight = 64\n'
            for i, (running, _) in enumerate(servers)
        )
    )
    settings: dict[str, Any] = {
        "policy": "round_robin", "api_key": KEYS, "worker_key": "inner", "worker_admin_key": "adm",
        "replicas": str(file),
    }  # fmt: skip
    async with gateway(up=len(servers), key=MINE, **settings) as client:
        yield client


async def ask(client: Client, key: str, path: str, **fields: Any) -> tuple[int, str, Any]:
    """Status, replica and JSON of an answer."""
    body = {"model": MODEL, **fields}
    async with client.request("POST", path, body, Authorization=f"Bearer {key}") as response:
        return response.status, response.headers.get("x-phalanx-replica", ""), await response.json()


async def until(true: Callable[[], bool], *tasks: asyncio.Task[Any]) -> None:
    """Wait for it. None of the tasks may end before."""
    while not true():
        for task in tasks:
            assert not task.done(), task.result()
        await asyncio.sleep(0.005)


def owners(servers: Served) -> set[str]:
    return {request.owner for _, engine in servers for request in engine.requests}


def n_submitted(servers: Served) -> int:
    return sum(len(engine.requests) for _, engine in servers)


# Places -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASKS)
def test_a_key_that_holds_all_places_keeps_no_other_key_out(servers, path, tmp_path):
    async def scenario() -> None:
        fields = ASKS[path]("hello")
        for _, engine in servers:
            engine.is_held = True
        async with before(servers, tmp_path) as client:
            n = PLACES * len(servers)
            greedy = [asyncio.create_task(ask(client, MINE, path, **fields)) for _ in range(n)]
            await until(lambda: n_submitted(servers) == n)
            assert (await ask(client, MINE, path, **fields))[0] == 429
            other = [asyncio.create_task(ask(client, YOURS, path, **fields)) for _ in servers]
            await until(lambda: n_submitted(servers) == n + len(servers), *other)
            assert len(owners(servers)) == 2
            for _, engine in servers:
                engine.is_held = False
            assert {status for status, *_ in await asyncio.gather(*greedy, *other)} == {200}

    run(scenario())


# Memory for bodies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASKS)
def test_a_key_whose_bodies_take_all_memory_keeps_no_other_key_out(servers, path, tmp_path, monkeypatch):
    held: list[str] = []
    go_on = threading.Event()

    async def hold(endpoints: CompletionEndpoints, job: Any, slots: Any) -> Any:
        """Its body is read and not tokenised yet."""
        held.append(job.owner)
        try:
            while not go_on.is_set():
                await asyncio.sleep(0.005)
            raise AssertionError("its client has left")
        finally:
            held.remove(job.owner)

    monkeypatch.setattr(CompletionEndpoints, "_prepare", hold)

    async def scenario() -> None:
        fields = ASKS[path]("the quick brown fox " * 4750)
        async with before(servers, tmp_path) as client:
            n = BODIES * len(servers)
            greedy = [asyncio.create_task(ask(client, MINE, path, **fields)) for _ in range(n)]
            await until(lambda: len(held) == n, *greedy)
            assert (await ask(client, MINE, path, **fields))[0] == 429
            other = [asyncio.create_task(ask(client, YOURS, path, **fields)) for _ in servers]
            await until(lambda: len(held) == n + len(servers), *other)
            assert sorted(held.count(owner) for owner in set(held)) == [len(servers), n]
            for task in (*greedy, *other):
                task.cancel()
            await until(lambda: not held)

    try:
        run(scenario())
    finally:
        go_on.set()


# Grammars -----------------------------------------------------------------------------------------------------------


def form(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}


SCHEMAS: dict[str, Callable[[str], dict[str, Any]]] = {
    CHAT: lambda name: {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": form(name)}}},
    "/v1/completions": lambda name: {"guided_json": form(name)},
    "/v1/messages": lambda name: {"output_config": {"format": {"type": "json_schema", "schema": form(name)}}},
    "/v1/responses": lambda name: {"text": {"format": {"type": "json_schema", "name": "n", "schema": form(name)}}},
    "/api/chat": lambda name: {"format": form(name)},
    "/api/generate": lambda name: {"format": form(name)},
}


@pytest.mark.parametrize("path", ASKS)
def test_costly_schemas_of_one_key_keep_no_other_key_waiting(servers, path, tmp_path, monkeypatch):
    """They are compiled while the other key's requests are answered, and after."""
    begun: list[str] = []
    go_on = threading.Event()

    def trial(self: GrammarTrial, job: Any) -> GrammarReply:
        text = json.dumps(job.schema) if job.schema is not None else job.grammar
        if "costly" in text:
            begun.append(text)
            assert go_on.wait(240)
        return GrammarReply()

    monkeypatch.setattr(GrammarTrial, "_ask", trial)

    async def scenario() -> None:
        async with before(servers, tmp_path) as client:

            async def schema(key: str, name: str) -> int:
                return (await ask(client, key, path, **ASKS[path]("hello"), **SCHEMAS[path](name)))[0]

            for i in range(3):
                costly = [asyncio.create_task(schema(MINE, f"costly {path} {i} {j}")) for j in range(3 * len(servers))]
                await until(lambda: len(begun) == len(servers), *costly)
                async with asyncio.timeout(60):
                    assert [await schema(YOURS, f"{path} {i} {j}") for j in range(len(servers))] == [200] * len(servers)
                assert len(begun) == len(servers) and not any(task.done() for task in costly)
                go_on.set()
                assert set(await asyncio.gather(*costly)) == {200}
                begun.clear()
                go_on.clear()

    try:
        run(scenario())
    finally:
        go_on.set()


# Calls --------------------------------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Ask.", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}
WEATHER = messages("How is the weather?")


def after_chat(answer: Any) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    return {"messages": [*WEATHER, message, result]}


def after_message(answer: Any) -> dict[str, Any]:
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    replies = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    return {"messages": [*WEATHER, *replies]}


def after_response(answer: Any) -> dict[str, Any]:
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    return {"input": [*WEATHER, *answer["output"], result]}


def after_ollama(answer: Any) -> dict[str, Any]:
    result = {"role": "tool", "content": "rain", "tool_name": "weather"}
    return {"messages": [*WEATHER, answer["message"], result]}


LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    CHAT: ({"tools": [TOOL]}, {"messages": WEATHER}, after_chat),
    "/v1/messages": (
        {"max_tokens": 100, "tools": [{"name": "weather", "description": "Ask.", "input_schema": CITY}]},
        {"messages": WEATHER},
        after_message,
    ),
    "/v1/responses": ({"tools": [{"type": "function", **FUNCTION}]}, {"input": WEATHER}, after_response),
    "/api/chat": ({"tools": [TOOL], "stream": False}, {"messages": WEATHER}, after_ollama),
}
"""Dialect -> fields of each request, the first one's, and the next one's after an answer."""


@pytest.mark.parametrize("path", LOOPS)
def test_calls_that_were_answered_to_one_key_are_not_remembered_for_another(servers, path, tokenizer, tmp_path):
    """On any replica. For its own key each replica goes on from the tokens of its answer."""
    fields, first, following = LOOPS[path]

    async def scenario() -> None:
        async with before(servers, tmp_path) as client:
            answers = {}
            for _ in servers:
                _, name, answer = await ask(client, MINE, path, **fields, **first)
                answers[name] = answer
            assert len(answers) == len(servers)
            for key in (YOURS, MINE):
                for name, answer in answers.items():
                    status, asked, _ = await ask(client, key, path, **fields, **following(answer))
                    assert (status, asked) == (200, name)  # by turns, in the same order
            said = tokenizer.encode(SAID, add_special_tokens=False)
            for _, engine in servers:
                begun, of_another, own = (request.prompt for request in engine.requests)
                known = [*begun, *said]
                assert own[: len(known)] == known and of_another[: len(known)] != known

    run(scenario())


# Streams that move --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASKS)
def test_a_stream_that_goes_on_at_another_server_stays_its_owners(servers, path, tokenizer, tmp_path):
    """The engine of one dies under streams of both keys."""
    begun: set[asyncio.Task[Any] | None] = set()

    async def scenario() -> None:
        async with before(servers, tmp_path) as client:
            streams = [asyncio.create_task(endless(client, key)) for key in KEYS for _ in servers]
            await until(lambda: n_submitted(servers) == len(streams), *streams)
            lost, engine = servers[0]
            before_loss = {request.owner: key_in(request) for request in engine.requests}
            assert len(before_loss) == 2 and before_loss.keys() == owners(servers)
            await until(lambda: len(begun) == len(streams), *streams)
            lost.call(engine.crash)
            rest = servers[1:]
            await until(lambda: n_submitted(rest) == len(streams), *streams)
            moved = [
                (request.owner, key_in(request))
                for _, one in rest for request in one.requests if request.committed
            ]  # fmt: skip
            assert sorted(moved) == sorted(before_loss.items())
            for stream in streams:
                stream.cancel()
            lost.call(engine.recover)

    async def endless(client: Client, key: str) -> None:
        body = {"model": MODEL, **ASKS[path](f"{MARK} for {key}"), "stream": True}
        async with client.request("POST", path, body, Authorization=f"Bearer {key}") as response:
            async for piece in response.content.iter_any():
                if MARK.encode() in piece:
                    begun.add(asyncio.current_task())

    def key_in(request: SequenceRequest) -> str:
        (key,) = [key for key in KEYS if key in tokenizer.decode(request.prompt)]
        return key

    run(scenario())
