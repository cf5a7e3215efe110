"""/v1/messages over HTTP, on a model that says given texts: answers, streams, counts, errors, and Claude Code."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from msgspec.structs import replace
from support import claude_code
from support.connection import Connection
from support.conversations import BODIES, prompts, run, spoiled
from support.messages_events import read_message
from support.scripted_model import tokenizer_of
from support.serving import CONFIG, fake_engine, serving

from phalanx.config import MIB
from phalanx.server import server_app
from phalanx.supervision.fake_engine import replying
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Cancel

URL, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "How is the weather in Oslo?"}
ASK = {"model": "tiny", "max_tokens": 200, "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Ask.", "input_schema": SCHEMA}]
THINKING = {"thinking": {"type": "adaptive"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\nLet me ask.\n</think>\n\nI ask.\n\n{CALL}<|im_end|>"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}{{ raise_exception('system comes first') }}"
    "{% endif %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('no turns') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


async def streamed(client, body, **options):
    response = await client.post(URL, json={**body, "stream": True}, **options)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return read_message(response.text)


# Answers ---------------------------------------------------------------------------------------------------------


def test_an_answer_streamed_and_whole(hermes):
    async def scenario(client, engine):
        body = {**ASK, "tools": TOOLS, **THINKING}
        whole = (await client.post(URL, json=body)).raise_for_status().json()
        message = (await streamed(client, body)).message
        thinking, text, call = whole["content"]
        assert (thinking["thinking"].strip(), text["text"].strip()) == ("Let me ask.", "I ask.")
        assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})
        assert whole["stop_reason"] == message["stop_reason"] == "tool_use"
        assert whole["id"].startswith("msg_") and whole["model"] == "tiny"
        message["content"][2] |= {"input": json.loads(message["content"][2]["input"]), "id": call["id"]}
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
        assert message["content"][2] == call
        assert message["usage"]["output_tokens"] == whole["usage"]["output_tokens"]

    run(hermes, [ANSWER] * 2, scenario)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, [("text", "Fine.")]),
        ({"thinking": {"type": "disabled"}}, [("text", "Fine.")]),
        (THINKING, [("thinking", "Hm."), ("text", "Fine.")]),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, [("thinking", "Hm."), ("text", "Fine.")]),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, [("thinking", ""), ("text", "Fine.")]),
    ],
)
def test_only_a_client_that_asks_for_thinking_gets_it(hermes, sent, expected):
    async def scenario(client, engine):
        whole = (await client.post(URL, json={**ASK, **sent})).raise_for_status().json()
        message = (await streamed(client, {**ASK, **sent})).message
        for content in (whole["content"], message["content"]):
            assert [(block["type"], block[block["type"]].strip()) for block in content] == expected
            assert all(block["signature"] for block in content if block["type"] == "thinking")

    run(hermes, ["<think>Hm.</think>\n\nFine.<|im_end|>"] * 2, scenario)


def test_why_answers_end(hermes):
    async def scenario(client, engine):
        async def reason(**sent):
            whole = (await client.post(URL, json={**ASK, **sent})).raise_for_status().json()
            message = (await streamed(client, {**ASK, **sent})).message
            assert [message[name] for name in ("stop_reason", "stop_sequence")] == [
                whole[name] for name in ("stop_reason", "stop_sequence")
            ]
            return whole["stop_reason"], whole["stop_sequence"]

        assert await reason() == ("end_turn", None)
        assert await reason(max_tokens=3) == ("max_tokens", None)
        assert await reason(stop_sequences=["three", "two"]) == ("stop_sequence", "two")

    run(hermes, lambda prompt: "one two three<|im_end|>", scenario)


def test_max_tokens_beyond_the_context_are_lowered(tokenizer):
    async def main():
        engine = fake_engine(tokenizer, info={"max_model_len": 64})
        config = replace(CONFIG, clamp_max_tokens=False)
        async with serving(tokenizer, engine, config) as client:
            whole = (await client.post(URL, json={**ASK, "max_tokens": 32000})).raise_for_status().json()
            assert whole["stop_reason"] == "model_context_window_exceeded"
            long = {"role": "user", "content": "the quick brown fox " * 500}
            refused = await client.post(URL, json={**ASK, "messages": [long]})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["type"] == "invalid_request_error" and error["message"].startswith("prompt is too long: ")

    asyncio.run(main())


# Counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"system": "be kind"},
        {"tools": TOOLS},
        {"tools": TOOLS, **THINKING},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"messages": [USER, {"role": "assistant", "content": "It"}]},
        {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}},
    ],
)
def test_a_count_is_exactly_that_of_the_answer(hermes, sent):
    async def scenario(client, engine):
        asked = {name: value for name, value in {**ASK, **sent}.items() if name != "max_tokens"}
        counted = (await client.post(COUNT, json=asked)).raise_for_status().json()
        assert engine.received == []
        answer = (await client.post(URL, json={**ASK, **sent})).raise_for_status().json()
        usage = answer["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        with_tools = (await client.post(COUNT, json={**asked, "tools": TOOLS * 1})).json()["input_tokens"]
        assert (with_tools > counted["input_tokens"]) == ("tools" not in sent)

    run(hermes, ["Fine.<|im_end|>"], scenario)


# Loops of calls --------------------------------------------------------------------------------------------------


def said(turn: int) -> str:
    arguments = f'{{"timeout":{turn},  "command":"ls {turn}"}}'
    return f'<think>Look {turn}.\n</think>\n\n<tool_call> {{"name": "Bash",  "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("keeps_thinking", [True, False])
def test_claude_code_computes_nothing_twice(hermes, keeps_thinking):
    """Its own form of an answer comes back, with the thinking or without, and a billing block that is always new."""
    turns = 10

    async def scenario(client, engine):
        history = []
        for turn in range(turns):
            body = claude_code.request(turn, "List the files.", history)
            counted = (await client.post(COUNT, json=body, headers=claude_code.HEADERS)).raise_for_status().json()
            response = await client.post(claude_code.PATH, json=body, headers=claude_code.HEADERS)
            message = read_message(response.raise_for_status().text).message
            assert message["stop_reason"] == "tool_use"
            for block in message["content"]:
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block["input"])
            assert message["content"][-1]["input"] == {"timeout": turn, "command": f"ls {turn}"}
            usage = message["usage"]
            n_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert counted == {"input_tokens": n_prompt}
            assert turn == 0 or usage["cache_read_input_tokens"] >= 0.95 * n_prompt
            content = [block for block in message["content"] if keeps_thinking or block["type"] != "thinking"]
            history += claude_code.answered(content, f"file{turn}", failed=turn == 3)
        assert "billing" not in prompts(engine)[-1]
        assert "<tool_response>\nError: file3\n" in prompts(engine)[-1]

    run(hermes, [f"{said(turn)}<|im_end|>" for turn in range(turns)], scenario)


def test_a_system_message_stays_in_place(hermes):
    async def scenario(client, engine):
        messages = [USER, {"role": "system", "content": "Now in French."}]
        (await client.post(URL, json={**ASK, "messages": messages, "system": "Be kind."})).raise_for_status()
        (prompt,) = prompts(engine)
        assert prompt.index("Be kind.") < prompt.index("Oslo") < prompt.index("<|im_start|>system\nNow in French.")

    run(hermes, ["Oui.<|im_end|>"], scenario)


def test_a_template_that_refuses_it_gets_it_as_a_part_of_the_users_turn(tmp_path):
    tokenizer = tokenizer_of("hermes", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": STRICT}))
    tokenizer = Tokenizer.load(tmp_path)

    async def scenario(client, engine):
        messages = [USER, {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}, USER]
        (await client.post(URL, json={**ASK, "messages": messages, "system": "Be kind."})).raise_for_status()
        question = USER["content"]
        assert prompts(engine) == [f"<system>Be kind.<user>{question}\nS<assistant>A<user>{question}<assistant>"]

    run(tokenizer, ["Oui.<|im_end|>"], scenario)


# Streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_by", ["the flag", "the dialect"])
def test_pings_while_the_prompt_is_computed_and_while_the_engine_is_gone(tokenizer, monkeypatch, set_by):
    assert server_app.GENERATE_ROUTES[URL].longest_silence_s <= 5
    if set_by == "the dialect":
        impatient = replace(server_app.GENERATE_ROUTES[URL], longest_silence_s=0.01)
        monkeypatch.setattr(server_app, "GENERATE_ROUTES", {URL: impatient})

    async def main():
        engine = fake_engine(tokenizer, replying(tokenizer.encode("hello")), manual=True)
        config = replace(CONFIG, keepalive_seconds=0.01 if set_by == "the flag" else 60)
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:
            connection = Connection(client, URL, {**ASK, "stream": True, "max_tokens": 4})
            await connection.expect("event: ping")  # the engine computes the prompt
            engine.step()
            await connection.expect("text_delta")
            engine.crash()
            await connection.expect("event: ping")
            engine.recover()
            while not connection.task.done():
                engine.step()
                await asyncio.sleep(0)
            assert read_message(connection.text).message["usage"]["output_tokens"] == 4

    asyncio.run(main())


def test_what_is_not_shown_sends_nothing_until_a_ping_is_due(hermes):
    async def scenario(client, engine):
        reader = await streamed(client, ASK)
        assert reader.pings == 0 and reader.message["content"] == [{"type": "text", "text": "Fine."}]

    run(
        hermes,
        ["<think>" + "Hm. " * 40 + "</think>\n\nFine.<|im_end|>"],
        scenario,
        replace(CONFIG, keepalive_seconds=60),
    )


def test_an_engine_that_is_gone_for_good_ends_the_stream_with_an_error(tokenizer):
    async def main():
        engine = fake_engine(tokenizer, manual=True)
        async with asyncio.timeout(60), serving(tokenizer, engine) as client:
            task = asyncio.create_task(client.post(URL, json={**ASK, "stream": True}))
            while not engine.received:
                await asyncio.sleep(0)
            engine.step()
            await asyncio.sleep(0)
            engine.crash("no more memory", will_restart=False)
            error = read_message((await task).text).error
            assert error["type"] == "api_error" and "no more memory" in error["message"]
            refused = await client.post(URL, json=ASK)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")

    asyncio.run(main())


# Errors ----------------------------------------------------------------------------------------------------------


def test_errors_have_anthropics_shape(tokenizer):
    config = replace(CONFIG, api_key=("secret",), queue=0, max_body_mb=1)
    key = {"x-api-key": "secret"}
    image = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}

    async def main():
        engine = fake_engine(tokenizer, manual=True, max_num_seqs=1)
        one = replace(config, engine=replace(config.engine, max_num_seqs=1))
        async with asyncio.timeout(60), serving(tokenizer, engine, one) as client:

            async def refusal(url, status, kind, said, **options):
                answer = await client.post(url, **{"headers": key, "json": ASK, **options})
                body = answer.json()
                assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
                assert body.keys() == {"type", "error"} and body["error"].keys() == {"type", "message"}
                assert said in body["error"]["message"] and answer.headers["x-request-id"]

            for url in (URL, COUNT):
                model, big = {**ASK, "model": "x"}, {**ASK, "system": "x" * MIB}
                invalid = "invalid_request_error"
                await refusal(url, 400, invalid, "image", json={**ASK, "messages": [image]})
                await refusal(url, 400, invalid, "could not parse", json=None, content=b"{", headers=typed(key))
                await refusal(url, 401, "authentication_error", "API key", headers={})
                await refusal(url, 403, "permission_error", "evil", headers={**key, "Host": "evil.example"})
                await refusal(url, 404, "not_found_error", "'x'", json=model)
                await refusal(url, 413, "request_too_large", f"{MIB} bytes", json=big)
                plain = {**key, "Content-Type": "text/plain"}
                await refusal(url, 415, invalid, "application/json", json=None, content=b"{}", headers=plain)
                assert (await client.get(url, headers=key)).json()["error"]["type"] == invalid
            await refusal(f"{URL}/batches", 404, "not_found_error", "/batches")
            running = asyncio.create_task(client.post(URL, json=ASK, headers=key))
            while not engine.received:
                await asyncio.sleep(0)
            await refusal(URL, 429, "rate_limit_error", "")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            while not isinstance(engine.received[-1], Cancel):
                await asyncio.sleep(0)

    asyncio.run(main())


def test_a_schema_that_has_no_grammar_is_named_as_the_client_does(hermes):
    tags = {"type": "object", "properties": {"a" * 60_000: {"type": "array", "uniqueItems": True}}}
    tools = [*TOOLS, {"name": "tag", "input_schema": tags}]

    async def scenario(client, engine):
        answer = await client.post(URL, json={**ASK, "tools": tools, "tool_choice": {"type": "any"}})
        assert answer.status_code == 400 and len(answer.content) < 1200, "a long name is not repeated"
        assert answer.json()["error"]["message"].startswith("tools[1].input_schema.properties.aaaa")
        assert "uniqueItems" in answer.text

    run(hermes, [], scenario)


def typed(headers):
    return {**headers, "Content-Type": "application/json"}


# Chance ----------------------------------------------------------------------------------------------------------

ODD = [None, 0, -1, 1 << 70, 1.5, True, "", "x", "auto", [], {}, [{}], {"type": "text"}, [[]], ["\u2028"]]
PARTS = [
    {"type": "text", "text": "hi"},
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "x"}},
    {"type": "tool_result", "tool_use_id": "t", "content": "x"},
    {"type": "image", "source": {}},
]


def by_chance(rng: random.Random) -> dict:
    """A body near one that is right."""
    message = {"role": rng.choice(["user", "assistant", "system"]), "content": rng.sample(PARTS, rng.randrange(3))}
    body = {**ASK, "messages": [USER, message, USER][: rng.randrange(1, 4)], "stream": rng.random() < 0.6}
    body |= rng.choice([{}, {"tools": TOOLS}, THINKING, {"tools": TOOLS, **THINKING}, {"system": [PARTS[0]]}])
    body |= rng.choice([{}, {"stop_sequences": ["a"]}, {"max_tokens": 3}, {"tool_choice": {"type": "any"}}])
    return spoiled(body, ODD, rng)


@pytest.mark.grows
def test_bodies_by_chance_are_answered_or_refused(hermes):
    rng = random.Random(7)
    answers = ["Fine.", ANSWER, "<think>Hm.", CALL * 2, "<tool_call>{oh", "\n\n", ""]
    seen = {200: 0, 400: 0}

    async def scenario(client, engine):
        for _ in range(BODIES):
            response = await client.post(URL, json=by_chance(rng))
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            if response.status_code != 200:
                assert response.status_code in (400, 404) and response.json()["type"] == "error", response.text
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert read_message(response.text).error is None
            else:
                assert response.json()["type"] == "message"

    run(hermes, lambda prompt: rng.choice(answers) + "<|im_end|>", scenario)
    assert min(seen[200], seen[400]) > BODIES / 12
