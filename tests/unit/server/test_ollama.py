"""Ollama's API over HTTP, on a model that says given texts: answers, streams, the model, errors."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.connection import Connection
from support.conversations import BODIES, prompts, run, spoiled
from support.ollama_lines import read_lines
from support.scripted_model import TEMPLATES, tokenizer_of
from support.serving import CONFIG, fake_engine, served, serving
from support.stub_hub import COMMIT, files_of_a_model

from phalanx.http.http_exchange import Exchange
from phalanx.server.access import OF_PROXIES
from phalanx.server.dialects.ollama.ollama_models import REFUSED
from phalanx.server.endpoints import ollama_info
from phalanx.server.endpoints.ollama_info import PULLS
from phalanx.server.server_app import create_app
from phalanx.supervision.fake_engine import replying
from phalanx.types import Cancel

CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
USER = {"role": "user", "content": "How is the weather in Oslo?"}
ASK = {"model": "tiny", "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Ask.", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\nLet me ask.\n</think>\n\nI ask.\n\n{CALL}<|im_end|>"
CALLS = {
    "hermes": CALL,
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "lfm2": "<|tool_call_start|>[weather(city='Oslo')]<|tool_call_end|>",
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def put(disk: Path, repository: str) -> None:
    snapshot = disk / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, data in files_of_a_model().items():
        (snapshot / name).write_bytes(data)


async def streamed(client, url, body):
    response = (await client.post(url, json=body)).raise_for_status()
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return read_lines(response.text, chat=url == CHAT)


async def whole(client, url, body):
    response = (await client.post(url, json={**body, "stream": False})).raise_for_status()
    assert response.headers["content-type"] == "application/json"
    return response.json()


# Answers ---------------------------------------------------------------------------------------------------------


def test_a_chat_streamed_and_whole(hermes):
    async def scenario(client, engine):
        body = {**ASK, "tools": TOOLS}
        stream, answer = await streamed(client, CHAT, body), await whole(client, CHAT, body)
        message = answer["message"]
        assert (stream.thinking.strip(), stream.text.strip()) == ("Let me ask.", "I ask.")
        assert (message["thinking"].strip(), message["content"].strip()) == ("Let me ask.", "I ask.")
        for (call,) in (stream.calls, message["tool_calls"]):
            assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}
        for last in (stream.last, answer):
            assert (last["model"], last["done"], last["done_reason"]) == ("tiny", True, "stop")
            assert last["prompt_eval_count"] == len(engine.received[0].request.prompt)
            assert last["eval_count"] == len(hermes.encode(ANSWER, add_special_tokens=False))

    run(hermes, [ANSWER] * 2, scenario)


@pytest.mark.parametrize("keeps_ids", [True, False])
@pytest.mark.parametrize("shape", TEMPLATES)
def test_a_loop_of_calls(shape, keeps_ids, tmp_path):
    """A client sends its answer back, with the ids of calls or without; with them nothing is computed twice."""
    end = "<|call|>" if shape == "openai" else "<|im_end|>"
    final = "<|channel|>final<|message|>It rains.<|return|>" if shape == "openai" else "It rains.<|im_end|>"
    tokenizer = tokenizer_of(shape, tmp_path)

    async def scenario(client, engine):
        body = {**ASK, "tools": TOOLS}
        (call,) = (await streamed(client, CHAT, body)).calls
        assert call["function"]["arguments"] == {"city": "Oslo"}
        kept = call if keeps_ids else {"function": call["function"]}
        history = [USER, {"role": "assistant", "content": "", "tool_calls": [kept]}]
        result = {"role": "tool", "content": "rain", "tool_name": "weather"}
        answer = await whole(client, CHAT, {**body, "messages": [*history, result]})
        assert answer["message"] == {"role": "assistant", "content": "It rains."}
        first, second = (sent.request.prompt for sent in engine.received)
        said = tokenizer.encode(CALLS[shape] + end, add_special_tokens=False)
        assert (second[: len(first) + len(said)] == first + said) or not keeps_ids
        assert "rain" in prompts(engine)[1]

    run(tokenizer, [CALLS[shape] + end, final], scenario)


def test_a_prompt_in_the_template_and_raw(hermes):
    async def scenario(client, engine):
        body = {"model": "tiny", "prompt": "hi", "system": "Be kind."}
        stream, answer = await streamed(client, GENERATE, body), await whole(client, GENERATE, body)
        assert (stream.text.strip(), stream.thinking) == (answer["response"].strip(), answer["thinking"])
        assert (answer["response"].strip(), answer["thinking"]) == ("Fine.", "Hm.")
        assert "<|im_start|>system\nBe kind." in prompts(engine)[0]
        raw = await whole(
            client, GENERATE, {"model": "tiny", "prompt": "hi", "raw": True, "options": {"num_predict": 1}}
        )
        assert (raw["response"], raw["done_reason"], raw["eval_count"]) == ("F", "length", 1)
        assert prompts(engine)[2] == "hi"

    run(hermes, ["<think>Hm.</think>\n\nFine.<|im_end|>"] * 2 + ["Fine.<|im_end|>"], scenario)


def test_formats_are_kept_to(tokenizer):
    """The engine is handed a grammar; whether a model keeps to it is not seen here."""

    async def main():
        engine = fake_engine(tokenizer, manual=True)
        async with asyncio.timeout(60), serving(tokenizer, engine) as client:
            for form in ("json", SCHEMA, ""):
                task = asyncio.create_task(
                    client.post(CHAT, json={**ASK, "format": form, "options": {"num_predict": 1}})
                )
                while not task.done():
                    engine.step()
                    await asyncio.sleep(0.001)
                assert task.result().status_code == 200, task.result().text
            grammars = [sent.request.grammar for sent in engine.received if hasattr(sent, "request")]
            assert "object" in grammars[0] and "city" in grammars[1] and grammars[2] == ""

    asyncio.run(main())


def test_a_model_that_is_asked_for_nothing_is_loaded(tokenizer):
    async def main():
        engine = fake_engine(tokenizer, autostart=False)
        async with serving(tokenizer, engine) as client:
            body = {"model": "tiny", "keep_alive": -1}
            early = await client.post(GENERATE, json=body)
            assert (early.status_code, list(early.json())) == (503, ["error"]) and early.headers["retry-after"]
            engine.become_ready()
            for url in (GENERATE, CHAT):
                answer = (await client.post(url, json=body)).raise_for_status().json()
                assert (answer["model"], answer["done"], answer["done_reason"]) == ("tiny", True, "load")
            assert engine.received == []

    asyncio.run(main())


# The model -------------------------------------------------------------------------------------------------------


def test_the_model_as_clients_see_it(hermes):
    config = replace(CONFIG, served_model_name=("tiny", "second"))

    async def scenario(client, engine):
        get = {path: (await client.get(f"/api/{path}")).raise_for_status().json() for path in ("version", "tags", "ps")}
        assert all(part.isdigit() for part in get["version"]["version"].split("."))
        assert [model["model"] for model in get["tags"]["models"]] == ["tiny", "second"]
        (loaded,) = get["ps"]["models"]
        assert loaded["name"] == "tiny" and loaded["context_length"] == engine.info.max_model_len
        assert loaded["size"] == engine.info.weights_bytes and len(loaded["digest"]) == 64
        for asked in ({"model": "second"}, {"name": "second:latest", "verbose": True}):
            shown = (await client.post(SHOW, json=asked)).raise_for_status().json()
            assert shown["capabilities"] == ["completion", "tools", "thinking"]
            kind = shown["model_info"]["general.architecture"]
            assert shown["model_info"][f"{kind}.context_length"] == engine.info.max_model_len
            assert shown["model_info"]["general.basename"] == "second" and "tool_calls" in shown["template"]
        root = await client.head("/")
        assert (root.status_code, root.text) == (200, "")

    run(hermes, [], scenario, config)


def test_a_model_that_only_writes_text(tokenizer):
    async def main():
        async with serving(tokenizer, fake_engine(tokenizer)) as client:
            shown = (await client.post(SHOW, json={"model": "tiny"})).raise_for_status().json()
            assert shown["capabilities"] == ["completion"]

    asyncio.run(main())


# Other models ----------------------------------------------------------------------------------------------------


def test_models_on_the_disk_are_listed_shown_and_deleted(tokenizer, disk):
    put(disk, "owner/name")
    put(disk, "mlx-community/Qwen3-4B-4bit")
    (disk / "models--owner--half" / "blobs").mkdir(parents=True)
    (disk / "models--owner--half" / "blobs" / "abc.part").write_text("half")

    async def main():
        async with serving(tokenizer, fake_engine(tokenizer)) as client:
            tags = (await client.get("/api/tags")).json()["models"]
            assert [tag["name"] for tag in tags] == ["tiny", "qwen3:4b", "owner/name"]
            assert tags[2]["size"] == len(b"weights") and tags[2]["details"]["quantization_level"] == "4-bit"
            for name in ("owner/name", "owner/name:latest"):
                shown = (await client.post(SHOW, json={"model": name})).raise_for_status().json()
                assert shown["model_info"]["llama.context_length"] == 4096
            assert (await client.post(SHOW, json={"model": "owner/none"})).status_code == 404
            for name, status, said in (
                ("tiny:latest", 400, "is served"),
                ("owner/none", 404, "owner/none is not on this machine"),
                (str(disk), 400, "neither a short name nor a hub id"),
                ("../hub", 400, "neither a short name nor a hub id"),
                ("-x", 400, "neither a short name nor a hub id"),
                (None, 400, "Missing required parameter"),
            ):
                answer = await client.request("DELETE", "/api/delete", json={"model": name})
                assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text
            answer = await client.request("DELETE", "/api/delete", json={"model": "qwen3:4b"})
            assert answer.status_code == 200 and answer.content == b""
            assert not (disk / "models--mlx-community--Qwen3-4B-4bit").exists()
            assert [tag["name"] for tag in (await client.get("/api/tags")).json()["models"]] == ["tiny", "owner/name"]

    asyncio.run(main())


def test_pulling_the_served_model_succeeds_at_once_and_others_as_the_command_says(tokenizer, monkeypatch):
    asked = []
    ending = [b'{"status":"success"}']

    async def command(verb, name):
        asked.append((verb, name))
        for line in (b'{"status":"pulling manifest"}', *ending):
            yield line + b"\n"

    monkeypatch.setattr(ollama_info, "model_command", command)

    async def main():
        async with serving(tokenizer, fake_engine(tokenizer)) as client:
            for name in ("tiny", "tiny:latest", "owner/name", "owner/name:latest", "qwen3:4b"):
                answer = (await client.post("/api/pull", json={"model": name})).raise_for_status()
                assert answer.headers["content-type"].startswith("application/x-ndjson")
                lines = [json.loads(line) for line in answer.text.splitlines()]
                assert lines == [{"status": "pulling manifest"}, {"status": "success"}]
                whole = await client.post("/api/pull", json={"name": name, "stream": False, "insecure": True})
                assert whole.json() == {"status": "success"}
            names = ("owner/name", "owner/name", "qwen3:4b")
            assert asked == [("pull", name) for name in names for _ in range(2)]
            ending[:] = [b'{"error":"the hub has no such repository"}']
            answer = await client.post("/api/pull", json={"model": "owner/none"})
            assert answer.status_code == 200 and json.loads(answer.text.splitlines()[-1])["error"]
            answer = await client.post("/api/pull", json={"model": "owner/none", "stream": False})
            assert (answer.status_code, answer.json()) == (400, {"error": "the hub has no such repository"})

    asyncio.run(main())


def test_pulls_wait_for_each_other_and_end_with_their_clients(tokenizer, monkeypatch):
    """Each is a process: who may pull must not have so many that the server has no memory left."""
    running, ended, most, go_on = set(), set(), [0], asyncio.Event()

    async def command(verb, name):
        running.add(name)
        most[0] = max(most[0], len(running))
        try:
            yield b'{"status":"pulling manifest"}\n'
            await go_on.wait()
            yield b'{"status":"success"}\n'
        finally:
            running.discard(name)
            ended.add(name)

    monkeypatch.setattr(ollama_info, "model_command", command)

    async def main():
        async with asyncio.timeout(60), serving(tokenizer, fake_engine(tokenizer)) as client:

            def pull(name, stream):
                return asyncio.create_task(client.post("/api/pull", json={"model": name, "stream": stream}))

            leaving = [pull(f"left{stream}", stream) for stream in (True, False)]
            while len(running) < 2:
                await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            while running:
                await asyncio.sleep(0)
            assert ended == {"leftTrue", "leftFalse"}

            tasks = [pull(f"model{i}", i % 2 == 0) for i in range(3 * PULLS)]
            while len(running) < PULLS:
                await asyncio.sleep(0)
            for _ in range(100):  # in which more would begin
                await asyncio.sleep(0)
            assert len(running) == PULLS
            go_on.set()
            for answer in await asyncio.gather(*tasks):
                assert json.loads(answer.text.splitlines()[-1]) == {"status": "success"}
            assert most == [PULLS]

    asyncio.run(main())


@pytest.mark.parametrize("api_key", [(), ("client",)])
def test_only_this_machine_and_the_admin_key_manage_models(api_key, tokenizer, disk, monkeypatch):
    put(disk, "owner/name")
    config = replace(CONFIG, api_key=api_key, admin_key="admin", allowed_hosts=("*",))
    app = create_app(config, fake_engine(tokenizer), tokenizer)
    key = {"authorization": "Bearer client"} if api_key else {}
    admin = {"x-api-key": "admin"}

    async def main():
        async with served(app) as client:

            async def allowed(address: str, headers: dict[str, str]) -> bool:
                monkeypatch.setattr(Exchange, "address", address)
                pulled = await client.post("/api/pull", json={"model": "tiny", "stream": False}, headers=headers)
                tags = (await client.get("/api/tags", headers=headers)).raise_for_status().json()["models"]
                body = {"model": "owner/none"}
                shown = await client.post(SHOW, json={"model": "owner/name"}, headers=headers)
                deleted = await client.request("DELETE", "/api/delete", json=body, headers=headers)
                assert pulled.status_code == 200 or "admin-key" in pulled.json()["error"]
                found = {
                    len(tags) == 2,
                    pulled.status_code == 200,
                    shown.status_code == 200,
                    deleted.status_code == 404,
                }
                assert len(found) == 1 and {pulled.status_code, deleted.status_code} in ({403}, {200, 404})
                return found.pop()

            assert await allowed("127.0.0.1", key) and await allowed("::1", key)
            assert await allowed("10.0.0.1", admin) and await allowed("127.0.0.1", admin)
            assert not await allowed("10.0.0.1", key)
            for header in OF_PROXIES:
                assert not await allowed("127.0.0.1", {**key, header: "10.0.0.1"})
            if api_key:
                monkeypatch.undo()
                for headers in ({}, {"x-api-key": "wrong"}):
                    answer = await client.post("/api/pull", json={"model": "tiny"}, headers=headers)
                    assert answer.status_code == 401

    asyncio.run(main())


# Errors ----------------------------------------------------------------------------------------------------------


def test_errors_have_ollamas_shape(tokenizer):
    config = replace(CONFIG, api_key=("secret",), queue=0, engine=replace(CONFIG.engine, max_num_seqs=1))
    key = {"authorization": "Bearer secret"}

    async def main():
        engine = fake_engine(tokenizer, manual=True, max_num_seqs=1)
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:

            async def refusal(method, url, status, said, **options):
                answer = await client.request(method, url, **{"headers": key, **options})
                assert answer.status_code == status and list(answer.json()) == ["error"], answer.text
                assert said in answer.json()["error"]

            for url in (CHAT, GENERATE, SHOW):
                await refusal("POST", url, 401, "API key", headers={}, json=ASK)
                await refusal("POST", url, 404, "'x' is not served", json={**ASK, "model": "x"})
                await refusal("POST", url, 400, "model", json={})
                plain = {**key, "content-type": "text/plain"}
                await refusal("POST", url, 415, "application/json", content=b"{}", headers=plain)
                await refusal("GET", url, 405, f"Method Not Allowed: GET {url}. It takes POST.")
            for url in REFUSED:
                await refusal("POST", url, 400, "This server", json={"model": "tiny", "input": "x"})
            await refusal("GET", "/api/tags", 401, "API key", headers={})
            await refusal("GET", "/api/blobs/x", 404, "Not Found")
            assert (await client.get("/api/version")).status_code == 200, "clients ask it without a key"
            task = asyncio.create_task(client.post(CHAT, json=ASK, headers=key))
            while not engine.received:
                await asyncio.sleep(0)
            await refusal("POST", CHAT, 429, "", json=ASK)
            engine.crash("no more memory", will_restart=False)
            assert "no more memory" in read_lines((await task).text).error
            await refusal("POST", CHAT, 503, "no more memory", json=ASK)

    asyncio.run(main())


def test_blanks_while_the_prompt_is_computed_and_while_the_engine_is_gone(tokenizer):
    async def main():
        engine = fake_engine(tokenizer, replying(tokenizer.encode("hello")), manual=True)
        config = replace(CONFIG, keepalive_seconds=0.01)
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:
            connection = Connection(client, CHAT, {**ASK, "options": {"num_predict": 4}})
            await connection.expect("  ")  # the engine computes the prompt
            engine.step()
            await connection.expect("}\n")
            engine.crash()
            await connection.expect("  ")
            engine.recover()
            while not connection.task.done():
                engine.step()
                await asyncio.sleep(0)
            assert read_lines(connection.text).last["eval_count"] == 4

    asyncio.run(main())


def test_a_client_that_leaves_cancels_its_request(tokenizer):
    async def main():
        engine = fake_engine(tokenizer, manual=True)
        async with asyncio.timeout(60), serving(tokenizer, engine) as client:
            for stream in (True, False):
                task = asyncio.create_task(client.post(CHAT, json={**ASK, "stream": stream}))
                while not hasattr((engine.received or [None])[-1], "request"):
                    await asyncio.sleep(0)
                task.cancel()
                while not isinstance(engine.received[-1], Cancel):
                    await asyncio.sleep(0)

    asyncio.run(main())


# By chance -------------------------------------------------------------------------------------------------------

ODD = [None, True, 0, -1, 1.5, "", "x", [], {}, [1], {"a": 1}, "json", "low", 1 << 70]


def by_chance(rng: random.Random) -> dict:
    """A body near one that is right."""
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    history = [USER, called, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "I", "thinking": "h"}]
    options = {"temperature": 0.5, "num_predict": 20, "stop": ["e"], "seed": 3}
    body = {**ASK, "messages": history[: rng.randrange(1, 5)], "stream": rng.random() < 0.6, "options": options}
    body |= rng.choice([{}, {"tools": TOOLS}, {"think": True}, {"logprobs": True, "top_logprobs": 2}, {"system": "x"}])
    body |= rng.choice([{}, {"prompt": "hi"}, {"prompt": "hi", "raw": True}, {"format": "json"}])
    return spoiled(body, ODD, rng)


@pytest.mark.grows
def test_bodies_by_chance_are_answered_or_refused(hermes):
    rng = random.Random(5)
    answers = ["Fine.", ANSWER, "<think>Hm.", CALL * 2, "<tool_call>{oh", "\n\n", ""]
    seen = {200: 0, 400: 0}

    async def scenario(client, engine):
        for _ in range(BODIES):
            url = rng.choice([CHAT, GENERATE])
            response = await client.post(url, json=by_chance(rng))
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            if response.status_code != 200:
                assert response.status_code in (400, 404) and list(response.json()) == ["error"], response.text
            elif "ndjson" in response.headers["content-type"]:
                assert read_lines(response.text, chat=url == CHAT).error is None
            else:
                assert response.json()["done"] is True

    run(hermes, lambda prompt: rng.choice(answers) + "<|im_end|>", scenario)
    assert min(seen[200], seen[400]) > BODIES / 12
