"""Streams of conversations with calls: each server remembers its own answers, and yet a stream moves exactly."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace
from support.migrating import KEY, PacedEngine, paced, request_of, resume_after, shown, stream
from support.scripted_model import tokenizer_of
from support.serving import CONFIG, serving

from phalanx.http.stream_records import RESUME
from phalanx.types import Submit

URL = "/v1/chat/completions"
KEYED = replace(CONFIG, admin_key=KEY, keepalive_seconds=1e6)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
ASK = {"role": "user", "content": "How is the weather in Oslo?"}
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [ASK],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
}
CALL = (
    '<think> I  ask.\n</think>\n\n<tool_call> {"name": "weather",  "arguments": {"city":"Oslo"}}</tool_call><|im_end|>'
)
FINAL = "It rains in Oslo.<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))


def run(tokenizer, scenario, monkeypatch, first_says=CALL):
    """`scenario` with clients of two servers, which call until a tool has answered, and what each engine was given."""

    def said(request):
        return FINAL if "sunny" in tokenizer.decode(request.prompt) else first_says

    async def main():
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            engines = [PacedEngine(tokenizer, said) for _ in range(2)]
            clients = [await stack.enter_async_context(serving(tokenizer, engine, KEYED)) for engine in engines]
            await scenario(*clients, *[lambda one=engine: prompts(one) for engine in engines])

    with paced(monkeypatch):
        asyncio.run(main())


def prompts(engine):
    return [message.request.prompt for message in engine.received if isinstance(message, Submit)]


async def history_of(client):
    """The conversation after a call by this server, as clients send it: without reasoning."""
    answer = (await client.post(URL, json=BODY)).raise_for_status().json()
    message = {"role": "assistant", "tool_calls": answer["choices"][0]["message"]["tool_calls"]}
    return {**BODY, "messages": [ASK, message, result_of(message)]}


def result_of(message):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}


@pytest.mark.parametrize("where", ["first", "second"])
@pytest.mark.parametrize("first_says", [CALL, CALL.removesuffix("<|im_end|>")], ids=["whole", "without an end"])
def test_what_one_server_remembers_moves_with_the_stream(tokenizer, monkeypatch, where, first_says):
    """The first one remembers the call; or the second one, which must not use that where the first did not."""

    async def scenario(first, second, of_first, of_second):
        body = await history_of(first if where == "first" else second)
        whole = await stream(first, URL, body)
        assert bool(whole[0][1].start.prompt) == (where == "first")
        for k in (1, len(whole) - 2):
            rest = await stream(second, URL, body, resume_after(whole[:k]))
            assert shown(whole[:k] + rest) == shown(whole) and b'"exact"' not in shown(rest)
            assert resume_after(whole[:k] + rest) == resume_after(whole)
            assert of_second()[-1] == of_first()[-1]

    run(tokenizer, scenario, monkeypatch, first_says)


def test_a_conversation_goes_on_where_its_stream_went(tokenizer, monkeypatch):
    """A call that moved in mid-answer is remembered by the server that wrote its end, after the same prompt."""

    async def scenario(first, second, of_first, of_second):
        body = await history_of(first)
        again = {"role": "tool", "tool_call_id": body["messages"][1]["tool_calls"][0]["id"], "content": "unknown"}
        body = {**body, "messages": [*body["messages"][:2], again]}  # upon which the model calls again
        whole = await stream(first, URL, body)
        pieces = whole[:5] + await stream(second, URL, body, resume_after(whole[:5]))
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in shown(pieces).split(b"\n\n")[:-2]]
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
        function = {**call["function"], "arguments": '{"city":"Oslo"}'}
        message = {"role": "assistant", "tool_calls": [{**call, "function": function}]}
        await second.post(URL, json={**body, "messages": [*body["messages"], message, result_of(message)]})
        said = tokenizer.encode(CALL, add_special_tokens=False)
        before = of_first()[-1]
        assert of_second()[-1][: len(before) + len(said)] == before + said

    run(tokenizer, scenario, monkeypatch)


def test_a_prompt_that_cannot_be_is_refused(tokenizer, monkeypatch):
    async def scenario(first, second, *_):
        body = await history_of(first)
        resume = resume_after((await stream(first, URL, body))[:3])
        ids = resume.start.prompt
        for path, asked, prompt, says in (
            (URL, body, [*ids, tokenizer.vocab_size], "start.prompt has the token id"),
            (URL, body, [-1, *ids], "start.prompt has the token id -1"),
            (URL, body, ids[1:], "start.prompt does not have the checksum"),
            ("/v1/completions", {"model": "tiny", "prompt": "x"}, ids, "start.prompt is a chat's"),
        ):
            content, headers = request_of(asked, replace(resume, start=replace(resume.start, prompt=prompt)))
            refused = await second.post(path, content=content, headers=headers)
            message = refused.json()["error"]["message"]
            assert refused.status_code == 400 and RESUME in message and says in message
        without = replace(resume, start=replace(resume.start, prompt=[]))  # it was too long for the gateway
        assert b'"exact":false' in shown(await stream(second, URL, body, without))

    run(tokenizer, scenario, monkeypatch)
