"""Streams that go on on another server: whatever piece was the last one, the client gets the same bytes."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import AsyncExitStack
from random import Random

import pytest
from msgspec.structs import replace
from support.examples import SOAK
from support.migrating import KEY, PacedEngine, paced, resume_after, shown, stream
from support.scripted_model import TEMPLATES, tokenizer_of
from support.serving import CONFIG, serving

from phalanx.server import server_app
from phalanx.server.answers.deltas import CallDelta, Delta, ScoredToken, TokenText
from phalanx.server.answers.generation import join, merge

KEYED = replace(CONFIG, admin_key=KEY, keepalive_seconds=1e6)
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {shape: tokenizer_of(shape, tmp_path_factory.mktemp(shape)) for shape in TEMPLATES}


@pytest.fixture(scope="module")
def hermes(tokenizers):
    return tokenizers["hermes"]


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """Steps wait for readers, and no stream is kept awake: time decides nothing."""
    patient = {
        path: replace(dialect, longest_silence_s=math.inf) for path, dialect in server_app.GENERATE_ROUTES.items()
    }
    monkeypatch.setattr(server_app, "GENERATE_ROUTES", patient)
    with paced(monkeypatch):
        yield


def run(tokenizer, said, scenario, ends=None):
    """`scenario` with the clients of two servers that say the same."""

    async def main():
        async with asyncio.timeout(300), AsyncExitStack() as stack:
            servers = [serving(tokenizer, PacedEngine(tokenizer, said, ends), KEYED) for _ in range(2)]
            return await scenario(*[await stack.enter_async_context(server) for server in servers])

    return asyncio.run(main())


def check_every_cut(tokenizer, said, path, body, ends=None):
    """Cut a stream after each of its pieces, and twice; returns the whole stream."""

    async def scenario(first, second):
        whole = await stream(first, path, body)
        assert len(whole) > 2
        for k in range(1, len(whole)):
            rest = await stream(second, path, body, resume_after(whole[:k]))
            assert shown(whole[:k] + rest) == shown(whole), f"moved after {k} pieces"
            assert resume_after(whole[:k] + rest) == resume_after(whole)
        return shown(whole)

    return run(tokenizer, said, scenario, ends)


# Every dialect and feature --------------------------------------------------------------------------------------------

USER = {"model": "tiny", "messages": [{"role": "user", "content": "How is the weather in Oslo?"}]}
PROMPT = {"model": "tiny", "prompt": "How is the weather"}
INPUT = {"model": "tiny", "input": "How is the weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Ask.", "parameters": SCHEMA}
CHAT_TOOLS = {"tools": [{"type": "function", "function": WEATHER}]}
TOOLS = {"tools": [{"type": "function", **WEATHER}, {"type": "custom", "name": "note"}]}
MESSAGES_TOOLS = {"tools": [{"name": "weather", "input_schema": SCHEMA}]}


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TEXT = f"The weather in Oslo is fine, naïve 🦊 – and so on.{END}"
THOUGHT = f"<think>\nLet me see.\n</think>\n\nIt rains.{END}"
JSON = f'{{"city": "Oslo"}}{END}'
OSLO, ROME = call("weather", '{"city": "Oslo"}'), call("weather", '{"city": "Rome"}')
CALLS = f"<think>\nI ask.\n</think>\n\nI ask twice.\n{OSLO}\nand{ROME}\n{END}"
BROKEN = f"I ask.\n{OSLO[:-16]}\n</tool_call>\nand then{ROME}{END}"
NOTE = f"Noted.\n{call('note', json.dumps({'input': 'rain'}))}{OSLO}{END}"
SAID = {"text": TEXT, "thought": THOUGHT, "json": JSON, "calls": CALLS, "broken": BROKEN, "note": NOTE}

FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CASES = {
    "/v1/chat/completions": [
        ("text", USER),
        ("text", {**USER, "n": 2, "stream_options": {"include_usage": True}}),
        ("text", {**USER, "max_tokens": 7, "stream_options": {"continuous_usage_stats": True}}),
        ("text", {**USER, "stop": ["naïve 🦊 - x", "and so"]}),
        ("text", {**USER, "stop": "so on", "logprobs": True, "top_logprobs": 2}),
        ("text", {**USER, "logprobs": True, "speculation": True, "stream_options": {"include_usage": True}}),
        ("thought", {**USER, "n": 2, "stream_options": {"include_usage": True}}),
        ("calls", {**USER, **CHAT_TOOLS}),
        ("calls", {**USER, **CHAT_TOOLS, "parallel_tool_calls": False}),
        ("calls", {**USER, **CHAT_TOOLS, "n": 2, "logprobs": True}),
        ("broken", {**USER, **CHAT_TOOLS}),
        ("json", {**USER, "response_format": FORM}),
    ],
    "/v1/completions": [
        ("text", {**PROMPT, "max_tokens": 50}),
        ("text", {**PROMPT, "max_tokens": 50, "n": 2, "echo": True}),
        ("text", {**PROMPT, "max_tokens": 50, "prompt": ["one", "the other"], "n": 2, "echo": True, "logprobs": 1}),
        ("text", {**PROMPT, "max_tokens": 50, "stop": "so", "logprobs": 2}),
        ("text", {**PROMPT, "max_tokens": 0, "n": 3, "echo": True, "stream_options": {"include_usage": True}}),
        ("text", {**PROMPT, "max_tokens": 50, "stop_token_ids": [65], "include_stop_str_in_output": True}),
        ("json", {**PROMPT, "max_tokens": 50, "response_format": FORM}),
    ],
    "/v1/messages": [
        ("text", {**USER, "max_tokens": 50}),
        ("text", {**USER, "max_tokens": 8}),
        ("text", {**USER, "max_tokens": 50, "stop_sequences": ["and so"]}),
        ("thought", {**USER, "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 20}}),
        ("calls", {**USER, **MESSAGES_TOOLS, "max_tokens": 500, "thinking": {"type": "adaptive"}}),
        ("calls", {**USER, **MESSAGES_TOOLS, "max_tokens": 500}),
        ("broken", {**USER, **MESSAGES_TOOLS, "max_tokens": 500}),
        ("json", {**USER, "max_tokens": 50, "output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ],
    "/v1/responses": [
        ("text", INPUT),
        ("text", {**INPUT, "max_output_tokens": 9}),
        ("text", {**INPUT, "stop": "so on", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("thought", {**INPUT, "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}),
        ("calls", {**INPUT, **TOOLS}),
        ("calls", {**INPUT, **TOOLS, "include": ["message.output_text.logprobs"]}),
        ("broken", {**INPUT, **TOOLS}),
        ("note", {**INPUT, **TOOLS}),
        ("json", {**INPUT, "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ],
    "/api/chat": [
        ("text", {**USER, "options": {"num_predict": 12}}),
        ("text", {**USER, "options": {"stop": ["so on"]}, "logprobs": True, "top_logprobs": 1}),
        ("calls", {**USER, **CHAT_TOOLS}),
        ("broken", {**USER, **CHAT_TOOLS}),
        ("json", {**USER, "format": SCHEMA}),
    ],
    "/api/generate": [
        ("text", {**PROMPT, "options": {"stop": ["so on"]}}),
        ("text", {**PROMPT, "raw": True, "logprobs": True}),
        ("json", {**PROMPT, "format": "json"}),
    ],
}


@pytest.mark.parametrize(("path", "case"), [(path, i) for path, cases in CASES.items() for i in range(len(cases))])
def test_whatever_the_last_piece_was(hermes, path, case):
    name, body = CASES[path][case]
    check_every_cut(hermes, texts(SAID[name]), path, body)


def texts(said):
    """Each choice says it a little longer than the one before."""
    return lambda request: "so, " * int(request.id.rpartition("/")[2]) + said


def delta(text="", *, thought="", calls=(), scored=()):
    return Delta(index=0, text=text, reasoning=thought, calls=calls, scored=scored)


BEGUN, WENT_ON = CallDelta(index=0, id="a", name="f"), CallDelta(index=0, arguments="{}")
SCORE = ScoredToken(TokenText("a", b"a", -1.0), -1.0, (), 0)


@pytest.mark.parametrize(
    ("deltas", "n"),
    [
        ([delta("a"), delta("b")], 1),
        ([delta(thought="a"), delta("b"), delta(calls=(BEGUN,)), delta(calls=(WENT_ON,))], 1),
        ([delta("a"), delta(thought="b")], 2),
        ([delta(calls=(BEGUN,)), delta("b")], 2),
        ([delta(calls=(BEGUN,)), delta(calls=(CallDelta(index=0, broken=True),))], 2),
        ([delta("a", scored=(SCORE,)), delta("b", scored=(SCORE,))], 1),
        ([delta("a", scored=(SCORE,)), delta(scored=(SCORE,))], 2),
        ([delta(thought="a", scored=(SCORE,)), delta("b", scored=(SCORE,))], 2),
    ],
)
def test_deltas_are_joined_where_that_shows_the_same(deltas, n):
    joined = merge(deltas)
    assert len(joined) == n
    assert joined == ([join(deltas)] if n == 1 else deltas)


WITH_TOOLS = {
    "/v1/chat/completions": {**USER, **CHAT_TOOLS, "n": 2, "logprobs": True},
    "/v1/messages": {**USER, **MESSAGES_TOOLS, "max_tokens": 500, "thinking": {"type": "adaptive"}},
    "/v1/responses": {**INPUT, **TOOLS, "include": ["message.output_text.logprobs"]},
    "/api/chat": {**USER, **CHAT_TOOLS, "logprobs": True},
}
MARKUP = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
PYTHON = "<|tool_call_start|>[weather(city='Oslo'), weather(city='Rome')]<|tool_call_end|>"
CHANNELS = (
    "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary<|message|>Naïve 🦊.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)
IN_SHAPES = {
    "hermes": CALLS,
    "qwen3_coder": f"<think>\nI ask.\n</think>\n\nNaïve 🦊.\n{MARKUP}\nand {MARKUP}{END}",
    "lfm2": f"<think>I ask.</think>Naïve 🦊. {PYTHON}{END}",
    "openai": CHANNELS,
}


def random_ends(seed, mean=3):
    """A step ends after this output token or not, in all runs alike; one has so many tokens on average."""
    return lambda n: Random(f"{seed}/{n}").random() < 1 / mean


PAIRS = [
    pytest.param(shape, path, marks=() if (s - p) % 4 < 2 else pytest.mark.soak)
    for s, shape in enumerate(IN_SHAPES)
    for p, path in enumerate(WITH_TOOLS)
]


@pytest.mark.grows
@pytest.mark.parametrize(("shape", "path"), PAIRS)
def test_whichever_tokens_came_together(tokenizers, shape, path):
    """Each shape in two dialects, and each dialect with two shapes; `make soak` has all, and other batches."""
    for seed in range(4 if SOAK else 1):
        check_every_cut(tokenizers[shape], texts(IN_SHAPES[shape]), path, WITH_TOOLS[path], random_ends(seed))


@pytest.mark.parametrize("path", WITH_TOOLS)
@pytest.mark.parametrize(("said", "mean"), [(BROKEN, 3), (NOTE, 25)])
def test_calls_that_break_in_any_batch(hermes, said, mean, path):
    check_every_cut(hermes, texts(said), path, WITH_TOOLS[path], random_ends(1, mean))


@pytest.mark.parametrize("path", WITH_TOOLS)
@pytest.mark.parametrize("said", [BROKEN, f"I ask.\n{OSLO[:-16]}{END}"])
def test_a_call_that_begins_and_breaks_in_one_step_or_in_many(hermes, said, path):
    n_until = len(hermes.encode(said.partition("and then")[0], add_special_tokens=False))
    check_every_cut(hermes, lambda request: said, path, WITH_TOOLS[path], lambda n: n > n_until)
    if said != BROKEN:  # token by token, that is one of the cases above
        check_every_cut(hermes, lambda request: said, path, WITH_TOOLS[path])


@pytest.mark.parametrize("path", CASES)
def test_a_stream_that_moves_again_and_again(hermes, path):
    async def scenario(*clients):
        random = Random(path)
        for _, body in chosen:
            whole = await stream(clients[0], path, body)
            pieces = whole[: random.randint(1, 3)]
            moves = 0
            while len(pieces) < len(whole):
                moves += 1
                rest = await stream(clients[moves % 2], path, body, resume_after(pieces, moves=moves))
                pieces += rest[: random.randint(1, 9)]
            assert shown(pieces) == shown(whole)
            n_moves.append(moves)

    n_moves: list[int] = []
    for name in ("text", "calls", "json"):
        chosen = [case for case in CASES[path] if case[0] == name]
        run(hermes, texts(SAID[name]), scenario)
    assert max(n_moves) > 3
