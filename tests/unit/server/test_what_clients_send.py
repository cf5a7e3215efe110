"""What clients send that OpenAI's reference does not have, over HTTP: benchmarks, evaluations, agents."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest
from msgspec.structs import replace
from support.connection import status_of_endless
from support.serving import CHAT, CONFIG, fake_engine, serving, sse

from phalanx.config import MIB
from phalanx.server.requests.sampling_fields import NEUTRAL
from phalanx.supervision.fake_engine import FAKE_INFO, replying

TEXT = "hello world, the quick brown fox says hello to the world again"
URL = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
BODY = {"chat": CHAT, "text": {"prompt": "the fox"}}


def run(tokenizer, scenario, *, config=CONFIG, **engine):
    async def main():
        fake = fake_engine(tokenizer, replying([*tokenizer.encode(TEXT), *tokenizer.eos_ids]), **engine)
        async with asyncio.timeout(60), serving(tokenizer, fake, config) as client:
            await scenario(client, fake)

    asyncio.run(main())


# Benchmarks: the usage in every chunk ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("n", [1, 2])
def test_continuous_usage_grows_to_the_usage_at_the_end(tokenizer, kind, n):
    options = {"continuous_usage_stats": True, "include_usage": True}

    async def scenario(client, engine):
        body = {**BODY[kind], "stream": True, "stream_options": options, "max_tokens": 12, "n": n}
        *chunks, total, done = sse((await client.post(URL[kind], json=body)).raise_for_status().text)
        assert done == "[DONE]" and total["choices"] == []
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and len(set(counts)) > 2
        assert counts[-1] == total["usage"]["completion_tokens"] == 12 * n
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {total["usage"]["prompt_tokens"]}
        for chunk in chunks:
            assert chunk["usage"]["total_tokens"] == sum(
                chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens")
            )

    run(tokenizer, scenario)


def test_continuous_usage_ends_at_a_stop_string(tokenizer):
    async def scenario(client, engine):
        body = {**CHAT, "stream": True, "stop": "brown", "stream_options": {"continuous_usage_stats": True}}
        *chunks, _ = sse((await client.post(URL["chat"], json=body)).text)
        whole = (await client.post(URL["chat"], json={**CHAT, "stop": "brown"})).json()
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all(chunk["choices"] for chunk in chunks)  # no chunk of its own for the usage: it was not asked for

    run(tokenizer, scenario)


# Evaluations: batches of prompts ---------------------------------------------------------------------------------


def test_a_batch_of_prompts_is_not_limited_by_n_nor_by_the_places(tokenizer):
    config = replace(CONFIG, max_n=1, queue=0, engine=replace(CONFIG.engine, max_num_seqs=2))

    async def scenario(client, engine):
        prompts = [f"the fox {i}" for i in range(32)]
        body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True}
        answer = (await client.post(URL["text"], json=body)).raise_for_status().json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(32))
        assert all(choice["text"].startswith(prompt) for choice, prompt in zip(answer["choices"], prompts, strict=True))

    run(tokenizer, scenario, config=config, max_num_seqs=2)


def test_more_prompts_than_max_prompts_are_refused_and_the_flag_is_named(tokenizer):
    async def scenario(client, engine):
        response = await client.post(URL["text"], json={"prompt": ["x"] * 257})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prompt")
        assert "257 prompts" in error["message"] and "256 (--max-prompts)" in error["message"]

    run(tokenizer, scenario)


def test_a_completion_without_max_tokens_has_16(tokenizer):
    async def scenario(client, engine):
        answer = (await client.post(URL["text"], json={"prompt": "the", "ignore_eos": True})).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"
        assert "finish_detail" not in answer["choices"][0]

    run(tokenizer, scenario)


# Agents: more tokens than there is room for ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_beyond_the_room_is_lowered_and_said(tokenizer, stream):
    async def scenario(client, engine):
        body = {**CHAT, "max_tokens": 32_000, "ignore_eos": True, "stream": stream}
        response = (await client.post(URL["chat"], json=body)).raise_for_status()
        choice = (sse(response.text)[-2] if stream else response.json())["choices"][0]
        room = FAKE_INFO.max_model_len - len(engine.received[0].request.prompt)
        assert choice["finish_reason"] == "length"
        assert choice["finish_detail"] == (
            f"max_tokens was 32000; the context had room for {room} tokens after the prompt."
        )

    run(tokenizer, scenario)


def test_a_server_may_refuse_max_tokens_beyond_the_room(tokenizer):
    async def scenario(client, engine):
        response = await client.post(URL["chat"], json={**CHAT, "max_tokens": 32_000})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "max_tokens", "context_length_exceeded")

    run(tokenizer, scenario, config=replace(CONFIG, clamp_max_tokens=False))


# Fields that ask for nothing -------------------------------------------------------------------------------------

# What a router of vLLM's or SGLang's adds to every request.
ROUTER = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "return_hidden_states": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "regex": None,
    "ebnf": None,
    "lora_path": None,
    "session_params": None,
}
NEUTRAL_FIELDS = {
    **NEUTRAL,
    "length_penalty": 1,  # as an integer too
    "best_of": 1,
    "echo": False,
    "prompt_cache_retention": "24h",
    "cache_salt": "mine",
}
OTHER_VALUES = {
    "use_beam_search": True,
    "length_penalty": 0.9,
    "bad_words": ["x"],
    "priority": -1,
    "best_of": 3,
    "no_stop_trim": True,
    "separate_reasoning": False,
    "stream_reasoning": False,
    "include_reasoning": False,
    "return_hidden_states": True,
}


def test_what_a_router_adds_to_every_request(tokenizer):
    async def scenario(client, engine):
        for kind in URL:
            plain = (await client.post(URL[kind], json=BODY[kind])).json()["choices"]
            routed = await client.post(URL[kind], json={**BODY[kind], **ROUTER})
            assert routed.raise_for_status().json()["choices"] == plain

    run(tokenizer, scenario)


def test_neutral_values_change_nothing_and_other_values_are_refused_by_name(tokenizer):
    assert OTHER_VALUES.keys() == NEUTRAL.keys() | {"best_of"}

    async def scenario(client, engine):
        for kind in URL:
            plain = (await client.post(URL[kind], json=BODY[kind])).json()["choices"]
            for name, value in NEUTRAL_FIELDS.items():
                response = await client.post(URL[kind], json={**BODY[kind], name: value})
                assert response.raise_for_status().json()["choices"] == plain, name
            for name, value in OTHER_VALUES.items():
                response = await client.post(URL[kind], json={**BODY[kind], name: value})
                error = response.json()["error"]
                assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_value")
        response = await client.post(URL["chat"], json={**CHAT, "echo": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")

    run(tokenizer, scenario)


def test_a_cache_salt_reaches_the_engine(tokenizer):
    async def scenario(client, engine):
        for kind in URL:
            await client.post(URL[kind], json={**BODY[kind], "cache_salt": "mine"})
            await client.post(URL[kind], json=BODY[kind])
        assert [message.request.sharing for message in engine.received] == ["/mine", ""] * 2
        response = await client.post(URL["chat"], json={**CHAT, "cache_salt": "x" * 257})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")

    run(tokenizer, scenario)


def test_tools_that_the_model_must_not_call(tokenizer):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

    async def scenario(client, engine):
        plain = (await client.post(URL["chat"], json=CHAT)).json()["choices"]
        response = await client.post(URL["chat"], json={**CHAT, "tools": tools, "tool_choice": "none"})
        assert response.raise_for_status().json()["choices"] == plain
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
            response = await client.post(URL["chat"], json={**CHAT, "tools": tools, **choice})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")

    run(tokenizer, scenario)


# Histories: fields that servers gave, and clients send back ------------------------------------------------------

FIRST = {"role": "user", "content": "hello"}
LAST = {"role": "user", "content": "the fox"}
HISTORIES = {
    "openai-python": {"content": "hi", "refusal": None, "annotations": [], "audio": None, "function_call": None},
    "openai-python, parsed": {"content": "hi", "parsed": {"name": "hi"}},
    "openai, with citations": {"content": "hi", "annotations": [{"type": "url_citation", "url_citation": {"a": 1}}]},
    "an id": {"id": "msg_1", "content": "hi", "tool_calls": []},
    "litellm": {
        "content": "hi",
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [{"type": "thinking", "thinking": "x" * 100_000, "signature": "s"}],
        "tool_calls": None,
    },
    "openrouter": {"content": "hi", "reasoning_details": [{"type": "reasoning.text", "text": "x"}]},
    "parts to be cached": {"content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    "a message to be cached": {"content": "hi", "cache_control": {"type": "ephemeral"}},
}


def prompt_of(tokenizer, *messages):
    return tokenizer.encode_chat(list(messages), template_kwargs={})


@pytest.mark.parametrize("name", HISTORIES)
def test_fields_of_other_servers_answers_are_passed_over(tokenizer, name):
    async def scenario(client, engine):
        messages = [FIRST, {"role": "assistant", **HISTORIES[name]}, LAST]
        (await client.post(URL["chat"], json={"messages": messages})).raise_for_status()
        (await client.post("/tokenize", json={"messages": messages})).raise_for_status()
        wanted = prompt_of(tokenizer, FIRST, {"role": "assistant", "content": "hi"}, LAST)
        assert engine.received[0].request.prompt == wanted

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": None, "refusal": "I will not"}, "I will not"),
    ],
)
def test_an_assistants_message_may_be_without_content(tokenizer, message, content):
    async def scenario(client, engine):
        messages = [FIRST, {"role": "assistant", **message}, LAST]
        (await client.post(URL["chat"], json={"messages": messages})).raise_for_status()
        wanted = prompt_of(tokenizer, FIRST, {"role": "assistant", "content": content}, LAST)
        assert engine.received[0].request.prompt == wanted
        for role in ("user", "system"):
            response = await client.post(URL["chat"], json={"messages": [{"role": role, **message}, LAST]})
            if message.get("content") is None:
                assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content")

    run(tokenizer, scenario)


# Bodies: encodings -----------------------------------------------------------------------------------------------


def sent(body, *, encoding="gzip"):
    """Content and headers of a request with this body, encoded."""
    return {"content": body, "headers": {"Content-Type": "application/json", "Content-Encoding": encoding}}


PLAIN = json.dumps(CHAT).encode()


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "x-gzip"])
def test_gzip_bodies_are_read(tokenizer, encoding):
    async def scenario(client, engine):
        (await client.post(URL["chat"], **sent(gzip.compress(PLAIN), encoding=encoding))).raise_for_status()
        long = {**CHAT, "metadata": {str(i): "x" * 500 for i in range(100)}}
        (await client.post(URL["chat"], **sent(gzip.compress(json.dumps(long).encode())))).raise_for_status()
        (await client.post(URL["chat"], **sent(PLAIN, encoding="identity"))).raise_for_status()

    run(tokenizer, scenario)


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip"])
def test_other_encodings_are_named(tokenizer, encoding):
    async def scenario(client, engine):
        response = await client.post(URL["chat"], **sent(PLAIN, encoding=encoding))
        assert response.status_code == 415
        message = response.json()["error"]["message"]
        assert repr(encoding) in message and "reads gzip" in message

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (PLAIN, "damaged"),
        (gzip.compress(PLAIN)[:-3], "ends before its end"),
        (gzip.compress(PLAIN)[:-6] + b"xxxxxx", "damaged"),
        (gzip.compress(PLAIN) + b"x", "goes on after its end"),
        (gzip.compress(PLAIN) * 2, "goes on after its end"),
        (b"", "ends before its end"),
    ],
)
def test_damaged_gzip_bodies(tokenizer, body, said):
    async def scenario(client, engine):
        response = await client.post(URL["chat"], **sent(body))
        assert response.status_code == 400 and said in response.json()["error"]["message"]

    run(tokenizer, scenario)


def test_a_bomb_is_decoded_no_further_than_the_largest_body(tokenizer, monkeypatch):
    """Bodies of 100 KB that decode to 100 MB."""
    squeezed = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    bomb = b"".join(squeezed.compress(b" " * MIB) for _ in range(100)) + squeezed.flush()
    decoded = 0
    make = zlib.decompressobj

    class Watched:
        def __init__(self, *arguments):
            self._inflate = make(*arguments)

        def decompress(self, *arguments):
            nonlocal decoded
            piece = self._inflate.decompress(*arguments)
            decoded += len(piece)
            return piece

        def __getattr__(self, name):
            return getattr(self._inflate, name)

    async def scenario(client, engine):
        response = await client.post(URL["chat"], **sent(bomb))
        assert response.status_code == 413
        assert MIB // 2 < decoded < MIB

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    run(tokenizer, scenario, config=replace(CONFIG, max_body_mb=0.5))


def test_a_gzip_body_is_also_limited_as_it_was_sent(tokenizer):
    """A stream of bytes that decode to nothing must not go on for ever."""
    nothing = b"\x1f\x8b\x08\x08\0\0\0\0\0\xff" + b"name" * 1000  # the file's name in the header never ends

    async def scenario(client, engine):
        pieces = [nothing, *[b"name" * 1000] * 20]
        assert await status_of_endless(client, URL["chat"], pieces, Content_Encoding="gzip") == 413

    run(tokenizer, scenario, config=replace(CONFIG, max_body_mb=0.05))


def test_a_byte_order_mark_is_passed_over(tokenizer):
    async def scenario(client, engine):
        for body in (b"\xef\xbb\xbf" + PLAIN, gzip.compress(b"\xef\xbb\xbf" + PLAIN)):
            encoding = "gzip" if body[:2] == b"\x1f\x8b" else "identity"
            (await client.post(URL["chat"], **sent(body, encoding=encoding))).raise_for_status()

    run(tokenizer, scenario)
