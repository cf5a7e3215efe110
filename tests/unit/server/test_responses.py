"""/v1/responses over HTTP, on a model that says given texts: answers, streams, errors, and Codex."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from msgspec.structs import replace
from support import codex
from support.connection import Connection
from support.conversations import BODIES, prompts, run, spoiled
from support.responses_events import check_stream, text_of
from support.scripted_model import ScriptedEngine
from support.serving import CONFIG, fake_engine, serving

from phalanx.http.vector_requests import VECTOR_PATHS
from phalanx.types import Cancel

URL = "/v1/responses"
ASK = {"model": "tiny", "input": "How is the weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Ask.", "parameters": SCHEMA}
CUSTOM = {"type": "custom", "name": "note"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOTE = '<tool_call>\n{"name": "note", "arguments": {"input": "rain\\nand wind"}}\n</tool_call>'
END = "<|im_end|>"
ANSWER = f"<think>\nLet me ask.\n</think>\n\nI ask.\n\n{CALL}{NOTE}{END}"


async def streamed(client, body, **options):
    response = await client.post(URL, json={**body, "stream": True}, **options)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return check_stream(response.content).finish()


# Answers ------------------------------------------------------------------------------------------------------------


def without_ids(output):
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def test_an_answer_streamed_and_whole(hermes):
    async def scenario(client, engine):
        body = {**ASK, "tools": [TOOL, CUSTOM]}
        whole = (await client.post(URL, json=body)).raise_for_status().json()
        stream = await streamed(client, body)
        said = [(item["type"], text_of(item).strip()) for item in whole["output"]]
        assert said == [
            ("reasoning", "Let me ask."),
            ("message", "I ask."),
            ("function_call", '{"city": "Oslo"}'),
            ("custom_tool_call", "rain\nand wind"),
        ]
        assert without_ids(stream["output"]) == without_ids(whole["output"])
        assert len({item["id"] for item in whole["output"]}) == 4
        assert whole["id"].startswith("resp_") and whole["status"] == "completed" and whole["model"] == "tiny"
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert stream["usage"]["input_tokens_details"]["cached_tokens"] == whole["usage"]["input_tokens"]

    run(hermes, [ANSWER] * 2, scenario)


def test_the_limit_and_a_format(hermes):
    async def scenario(client, engine):
        cut = (await client.post(URL, json={**ASK, "max_output_tokens": 4})).json()
        assert cut["status"] == "incomplete" and cut["usage"]["output_tokens"] == 4
        form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        await client.post(URL, json={**ASK, "text": {"format": form}})
        assert engine.received[-1].request.grammar
        wrong = await client.post(URL, json={**ASK, "text": {"format": {**form, "schema": {"type": "nonsense"}}}})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "text.format"
        assert "text.format.schema" in wrong.json()["error"]["message"]

    run(hermes, ["It rains and rains.<|im_end|>"] * 2, scenario)


def test_log_probabilities(tokenizer):
    async def main():
        async with asyncio.timeout(60), serving(tokenizer, fake_engine(tokenizer)) as client:
            body = {
                **ASK,
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 2,
                "max_output_tokens": 5,
                "seed": 1,
            }
            (item,) = (await streamed(client, body))["output"]
            (part,) = item["content"]
            assert len(part["logprobs"]) == 5 and {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
            tokens = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
            assert tokens.decode(errors="replace") == part["text"]

    asyncio.run(main())


# Codex --------------------------------------------------------------------------------------------------------------


def said(turn: int) -> str:
    arguments = f'{{"max_output_tokens":{turn},  "cmd":"ls {turn}"}}'
    call = f'<tool_call> {{"name": "exec_command",  "arguments": {arguments}}}</tool_call>'
    return f"<think>Look {turn}.\n</think>\n\n{call}"


def test_codex_computes_nothing_twice(hermes):
    turns = 10

    async def scenario(client, engine):
        assert (await client.get(codex.MODELS_PATH)).json()["models"] == []
        history = []
        for turn in range(turns):
            body = codex.request("List the files.", history)
            response = await client.post(codex.PATH, json=body, headers=codex.HEADERS)
            answer = check_stream(response.raise_for_status().content).finish()
            reasoning, call = answer["output"]
            assert reasoning["summary"][0]["text"].strip() == f"Look {turn}."
            assert json.loads(call["arguments"]) == {"max_output_tokens": turn, "cmd": f"ls {turn}"}
            usage = answer["usage"]
            assert turn == 0 or usage["input_tokens_details"]["cached_tokens"] >= 0.95 * usage["input_tokens"]
            history += codex.answered(answer["output"], f"file{turn}")
        assert "<tool_response>\nfile8\n" in prompts(engine)[-1]

    run(hermes, [said(turn) + END for turn in range(turns)], scenario)


def test_codex_calls_a_tool_of_a_namespace(hermes):
    call = '<tool_call>\n{"name": "multi_agent_v1__close_agent", "arguments": {"target": "a"}}\n</tool_call>'

    async def scenario(client, engine):
        first = await streamed(client, codex.request("Stop it.", []))
        (item,) = first["output"]
        assert (item["namespace"], item["name"]) == ("multi_agent_v1", "close_agent")
        history = codex.answered(first["output"], "closed")
        second = await streamed(client, codex.request("Stop it.", history))
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached == first["usage"]["total_tokens"] - 1  # not written in the template's words

    run(hermes, [call + END, "Done." + END], scenario)


def test_reasoning_comes_back_from_a_client_to_a_server_that_forgot(hermes):
    """After a restart, or from another replica: the client has brought everything."""
    shown = {}

    async def ask(client, engine):
        shown["first"] = await streamed(client, codex.request("Go.", []))

    async def go_on(client, engine):
        await streamed(client, codex.request("Go.", codex.answered(shown["first"]["output"], "ok")))
        assert "<think>\nLook 3.\n</think>" in prompts(engine)[-1]

    run(hermes, [said(3) + END], ask)
    run(hermes, ["Done." + END], go_on)


# Streams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [5, 30, 90], ids=["in reasoning", "in a text", "in a call"])
def test_an_engine_that_dies_inside_changes_nothing(hermes, n_tokens):
    async def answer(crash):
        engine = ScriptedEngine(hermes, [ANSWER], manual=True)
        async with asyncio.timeout(60), serving(hermes, engine) as client:
            asking = asyncio.create_task(streamed(client, {**ASK, "tools": [TOOL, CUSTOM]}))
            while not engine.received:
                await asyncio.sleep(0)
            for step in range(len(ANSWER)):
                if crash and step == n_tokens:
                    engine.crash()
                    engine.recover()
                engine.step()
            return await asking

    undisturbed, disturbed = asyncio.run(answer(crash=False)), asyncio.run(answer(crash=True))
    assert len(undisturbed["output"]) == 4
    assert without_ids(disturbed["output"]) == without_ids(undisturbed["output"])


def test_keep_alives_while_the_prompt_is_computed(tokenizer):
    async def main():
        engine = fake_engine(tokenizer, manual=True)
        config = replace(CONFIG, keepalive_seconds=0.01)
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:
            connection = Connection(client, URL, {**ASK, "stream": True, "max_output_tokens": 4})
            await connection.expect("keepalive")  # the engine computes the prompt
            await connection.expect("keepalive")
            while not connection.task.done():
                engine.step()
                await asyncio.sleep(0)
            assert check_stream(connection.text.encode()).finish()["usage"]["output_tokens"] == 4

    asyncio.run(main())


def test_keep_alives_while_a_custom_call_is_written(hermes):
    """Its input is sent whole at its end."""

    async def main():
        engine = ScriptedEngine(hermes, [NOTE + END], manual=True)
        async with asyncio.timeout(60), serving(hermes, engine, replace(CONFIG, keepalive_seconds=0.001)) as client:
            connection = Connection(client, URL, {**ASK, "stream": True, "tools": [CUSTOM]})
            await connection.expect("response.in_progress")
            for _ in hermes.encode(NOTE[: NOTE.index("and wind")], add_special_tokens=False):
                engine.step()
            await connection.expect("response.output_item.added")
            await connection.expect("keepalive")
            assert "response.custom_tool_call_input" not in connection.text
            while not connection.task.done():
                engine.step()
                await asyncio.sleep(0)
            check_stream(connection.text)
            assert connection.text.count("response.custom_tool_call_input.delta")

    asyncio.run(main())


def test_an_engine_that_is_gone_for_good_fails_the_response(tokenizer):
    async def main():
        engine = fake_engine(tokenizer, manual=True)
        async with asyncio.timeout(60), serving(tokenizer, engine) as client:
            task = asyncio.create_task(streamed(client, ASK))
            while not engine.received:
                await asyncio.sleep(0)
            engine.step()
            await asyncio.sleep(0)
            engine.crash("no more memory", will_restart=False)
            response = await task
            assert response["status"] == "failed" and response["error"]["code"] == "server_error"
            assert "no more memory" in response["error"]["message"]
            assert (await client.post(URL, json=ASK)).status_code == 503

    asyncio.run(main())


# Errors -------------------------------------------------------------------------------------------------------------


def test_errors_before_the_first_byte(tokenizer):
    config = replace(CONFIG, api_key=("secret",), queue=0, engine=replace(CONFIG.engine, max_num_seqs=1))
    config = replace(config, clamp_max_tokens=False)
    key = {"Authorization": "Bearer secret"}

    async def main():
        engine = fake_engine(tokenizer, manual=True, max_num_seqs=1)
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:

            async def refusal(status, said, code=None, **options):
                answer = await client.post(URL, **{"headers": key, "json": ASK, **options})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (status, code) and said in error["message"], answer.text

            await refusal(401, "API key", "invalid_api_key", headers={})
            await refusal(404, "'x'", "model_not_found", json={**ASK, "model": "x"})
            stored = {**ASK, "previous_response_id": "resp_1"}
            await refusal(400, "set store: false in the client", "unsupported_value", json=stored)
            long = {**ASK, "input": "hello " * 100_000, "stream": True}
            await refusal(400, "context", "context_length_exceeded", json=long)
            await refusal(400, "context", "context_length_exceeded", json={**long, "truncation": "auto"})
            assert (await client.post(URL, headers=key, json=long)).json()["error"]["param"] == "input"
            much = await client.post(URL, headers=key, json={**ASK, "max_output_tokens": 1 << 20})
            assert (much.status_code, much.json()["error"]["param"]) == (400, "max_output_tokens")
            running = asyncio.create_task(client.post(URL, json={**ASK, "stream": True}, headers=key))
            while not engine.received:
                await asyncio.sleep(0)
            await refusal(429, "", "rate_limit_exceeded", json={**ASK, "stream": True})
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            while not any(isinstance(message, Cancel) for message in engine.received):
                await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize("path", VECTOR_PATHS)
def test_a_model_that_writes_text_makes_no_vectors(tokenizer, path):
    """Whatever the model is called: clients name one for embeddings."""

    async def main():
        async with asyncio.timeout(60), serving(tokenizer, fake_engine(tokenizer)) as client:
            for model in ("tiny", "text-embedding-3-small"):
                answer = await client.post(path, json={"model": model, "input": ["hello"]})
                error = answer.json()["error"]
                said = error if path.startswith("/api/") else error["message"]
                assert answer.status_code == 400 and "tiny, writes text" in said
                assert "to come in a later version" in said and "give the client another server" in said
                if not path.startswith("/api/"):
                    assert (error["type"], error["param"]) == ("invalid_request_error", "model")

    asyncio.run(main())


def test_only_codex_gets_a_list_named_models(tokenizer):
    async def main():
        async with asyncio.timeout(60), serving(tokenizer, fake_engine(tokenizer)) as client:
            assert (await client.get("/v1/models")).json().keys() == {"object", "data"}
            assert (await client.get(codex.MODELS_PATH)).json().keys() == {"object", "data", "models"}

    asyncio.run(main())


# Chance -------------------------------------------------------------------------------------------------------------

ODD = [None, 0, -1, 1 << 70, 1.5, True, "", "x", "auto", [], {}, [{}], {"type": "function"}, [[]], ["\u2028"]]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"role": "developer", "content": "Be kind."},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "x"}'},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {"type": "custom_tool_call", "call_id": "d", "name": "note", "input": "x"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
]
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}


def by_chance(rnd: Random) -> dict:
    """A body near one that is right."""
    body = {**ASK, "stream": rnd.random() < 0.7}
    if rnd.random() < 0.7:
        body["input"] = rnd.sample(ITEMS, rnd.randint(1, 5))
    for more in (
        {"tools": [TOOL, CUSTOM, {"type": "web_search"}]}, {"instructions": "Be brief."}, {"text": FORMAT},
        {"reasoning": {"summary": "auto"}}, {"max_output_tokens": 3}, {"tool_choice": "required"},
        {"include": ["reasoning.encrypted_content"]}, {"parallel_tool_calls": False}, {"top_logprobs": 1},
    ):  # fmt: skip
        body |= more if rnd.random() < 0.25 else {}
    return spoiled(body, ODD, rnd)


@pytest.mark.grows
def test_bodies_by_chance_are_answered_or_refused(hermes):
    rnd = Random(7)
    answers = ["Fine.", ANSWER, "<think>Hm.", CALL * 2, NOTE, "<tool_call>{oh", f"a{CALL[:60]}", "\n\n", ""]
    seen: dict[object, int] = {}

    async def scenario(client, engine):
        for _ in range(BODIES):
            response = await client.post(URL, json=by_chance(rnd))
            kind: object = response.status_code
            if kind != 200:
                assert kind in (400, 404) and response.json()["error"]["message"], response.text
            elif response.headers["content-type"].startswith("text/event-stream"):
                kind = check_stream(response.content).finish()["status"]
            else:
                assert response.json()["object"] == "response"
            seen[kind] = seen.get(kind, 0) + 1

    run(hermes, lambda prompt: rnd.choice(answers) + END, scenario)
    assert min(seen[kind] for kind in (200, 400, "completed", "incomplete")) > BODIES / 50, seen
    assert "failed" not in seen
