"""Calls with the faults that models make, of every format, in every dialect: what a client would run.

A client of a stream runs what it has of a call if that is whole JSON; so a stream must show no more than a whole answer
has. The server is the real one, its engine says given texts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from support.conversations import run
from support.examples import SOAK
from support.messages_events import read_message
from support.migrating import KEY, PacedEngine, paced, resume_after, shown, stream
from support.ollama_lines import read_lines
from support.responses_events import check_stream
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import CONFIG, serving, sse

from phalanx.server.outputs.formats import TOOLS as FORMATS
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Submit

Called = list[tuple[str, Any]]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Ask.", "parameters": PARAMETERS}
ASK = {"role": "user", "content": "How is the weather?"}
WHOLE = [("get_weather", {"city": "Oslo", "days": 2})]
END = "<|im_end|>"
STRIDE = 1 if SOAK else 29  # tokens between the places where a stream moves

CUT_AND_WHOLE = "a call that is cut, and another one"
JSON = '{"city": "Oslo", "days": 2}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
    "llama3_json": f'<|python_tag|>{{"name": "get_weather", "parameters": {JSON}}}',
    "llama4_json": f'<|python_start|>{{"name": "get_weather", "parameters": {JSON}}}<|python_end|>',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "openai": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Oslo"
    "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n"
    "</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "minicpm5": '<function name="get_weather"><param name="city">Oslo</param><param name="days">2</param></function>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Oslo'
    '</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument'
    "<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Oslo", days=2)]<|tool_call_end|>',
    "llama4_pythonic": '<|python_start|>[get_weather(city="Oslo", days=2)]<|python_end|>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:2}<end_function_call>",
}
"""Format -> a call with nothing wrong."""
OPENED = {
    "qwen3_coder": ("<tool_call>\n", "<parameter=city>\n"),
    "minimax_m2": ("<minimax:tool_call>\n", '<parameter name="city">'),
    "muse_spark": ("<atem:function_calls>\n", '<atem:parameter name="city">'),
    "kimi_k3": ("<|open|>tools<|sep|>", ""),
}
"""Formats with marks around calls: the first of them, and a head that a mark of one character closes."""
CLOSED = {
    "qwen3_coder": "</parameter>",
    "glm47": "</arg_value>",
    "longcat": "</longcat_arg_value>",
    "minimax_m2": "</parameter>",
    "minicpm5": "</param>",
    "muse_spark": "</atem:parameter>",
    "kimi_k3": "<|close|>argument<|sep|>",
}
"""Formats in markup: the mark that closes a value."""


SWALLOWING = ("lfm2", "llama4_pythonic", "gemma4", "functiongemma")
"""Formats whose strings may have every mark in them, so that one without an end takes the next call in."""


def faults(name: str) -> Iterator[tuple[str, str, Called]]:
    """What is wrong, the answer, and the calls of it that are run."""
    whole = CALLS[name]
    cut = whole[: whole.index("Oslo") + 3]
    yield "nothing", whole, WHOLE
    yield "cut", cut, []
    yield "cut, and text after it", cut + "\nOh, I forgot.", []
    yield "not offered", whole.replace("get_weather", "wind"), []
    yield CUT_AND_WHOLE, f"{cut}\n{whole}", [] if name in SWALLOWING else WHOLE
    if name in CLOSED:
        close = CLOSED[name]
        text = f"a {close} b"
        yield "a closing mark in a text", whole.replace("Oslo", text), [("get_weather", {"city": text, "days": 2})]
        yield "no closing mark", whole.replace(f"Oslo\n{close}", "Oslo").replace(f"Oslo{close}", "Oslo"), WHOLE
        yield "white space", whole.replace("Oslo", "  Oslo "), [("get_weather", {"city": "  Oslo ", "days": 2})]
    if name in OPENED:
        opening, head = OPENED[name]
        yield "no opening mark", whole.replace(opening, ""), WHOLE
        if head:
            yield "a head that is not closed", whole.replace(head, head.replace(">", "").rstrip("\n") + "\n"), WHOLE
    if JSON in whole:
        yield "a brace too many", whole.replace(JSON, JSON + "}"), WHOLE
        yield "no JSON", whole.replace('"Oslo"', "Oslo"), []
        yield "a brace too few", whole.replace(JSON, JSON[:-1]), []


PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [ASK], "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/messages": {
        "messages": [ASK],
        "max_tokens": 1000,
        "tools": [{"name": "get_weather", "description": "Ask.", "input_schema": PARAMETERS}],
    },
    "/v1/responses": {"input": [ASK], "tools": [{"type": "function", **FUNCTION}]},
    "/api/chat": {"messages": [ASK], "tools": [{"type": "function", "function": FUNCTION}]},
}


def chunks_joined(text: str) -> dict[str, Any]:
    """The message of a chat's stream, with all that was sent of its calls."""
    message: dict[str, Any] = {"content": "", "tool_calls": {}}
    for chunk in sse(text)[:-1]:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            call = message["tool_calls"].setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
            for key, value in part["function"].items():
                call["function"][key] += value
    return {**message, "tool_calls": list(message["tool_calls"].values())}


def seen(path: str, response: httpx.Response, *, streamed: bool) -> tuple[str, list[tuple[str, Any]]]:
    """The text of an answer, and name and arguments, as text or not, of the calls of it that a client has."""
    if path == "/v1/chat/completions":
        message = chunks_joined(response.text) if streamed else response.json()["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(one["name"], one["arguments"]) for one in functions]
    if path == "/api/chat":
        answer = read_lines(response.text) if streamed else None
        message = {"content": answer.text, "tool_calls": answer.calls} if answer else response.json()["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"], [(one["name"], one["arguments"]) for one in functions]
    if path == "/v1/messages":
        message = read_message(response.text).message if streamed else response.json()
        assert message is not None
        blocks = message["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        return text, [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    items = check_stream(response.text).done if streamed else response.json()["output"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    return text, [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]


def run_by_a_client(calls: list[tuple[str, Any]]) -> Called:
    """The calls whose arguments are JSON. No arguments at all would be run as well."""
    found: Called = []
    for name, arguments in calls:
        assert arguments != "", "a client takes that for a call without arguments"
        try:
            found.append((name, json.loads(arguments) if isinstance(arguments, str) else arguments))
        except ValueError:
            continue
    return found


def config_of(name: str) -> ServerConfig:
    reasoning = None if name == "openai" else "qwen3"
    return replace(CONFIG, tool_call_parser=name, reasoning_parser=reasoning, admin_key=KEY, keepalive_seconds=1e6)


def test_every_format_is_here() -> None:
    assert CALLS.keys() == FORMATS.keys()


async def check_answer(client: httpx.AsyncClient, path: str, fields: dict[str, Any], expected: Called) -> str:
    """Ask for an answer whole and streamed, and check that both have these calls. Returns its text."""
    body = {**PATHS[path], "model": "tiny", **fields}
    whole = await client.post(path, json={**body, "stream": False})
    streamed = await client.post(path, json={**body, "stream": True})
    text, calls = seen(path, whole.raise_for_status(), streamed=False)
    streamed_text, streamed_calls = seen(path, streamed.raise_for_status(), streamed=True)
    assert run_by_a_client(calls) == expected and len(calls) == len(expected)
    assert run_by_a_client(streamed_calls) == expected
    assert streamed_text.split() == text.split()
    return text


def play(tokenizer: Tokenizer, name: str, scenario: Callable[[httpx.AsyncClient, list[str]], Awaitable[None]]) -> None:
    """A scenario with a client of a server whose model says what stands in a list."""

    async def main() -> None:
        said: list[str] = []
        engine = ScriptedEngine(tokenizer, lambda prompt: said[0] + END)
        async with asyncio.timeout(120), serving(tokenizer, engine, config_of(name)) as client:
            await scenario(client, said)

    asyncio.run(main())


@pytest.mark.parametrize("name", CALLS)
def test_what_is_run_in_every_dialect(hermes: Tokenizer, name: str) -> None:
    async def scenario(client: httpx.AsyncClient, said: list[str]) -> None:
        for fault, answer, expected in faults(name):
            said[:] = [answer if name == "openai" else f"<think>Hm.</think>{answer}"]
            for path in PATHS:
                text = await check_answer(client, path, {}, expected)
                assert bool(text.strip()) == (not expected or fault == CUT_AND_WHOLE), (fault, path)

    play(hermes, name, scenario)


@pytest.mark.parametrize("name", CALLS)
def test_under_a_grammar(hermes: Tokenizer, name: str) -> None:
    """Of calls alone, and of calls or an answer in JSON."""

    async def scenario(client: httpx.AsyncClient, said: list[str]) -> None:
        said[:] = [CALLS[name]]
        for fields in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            assert await check_answer(client, "/v1/chat/completions", fields, WHOLE) == ""

    play(hermes, name, scenario)


@pytest.mark.grows
@pytest.mark.parametrize("name", CALLS)
def test_drafts_and_moves_change_nothing(hermes: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens a step; and the stream goes on at another server."""
    texts = {fault: answer for fault, answer, _ in faults(name)}
    good = next(texts[fault] for fault in ("a closing mark in a text", "a brace too many", "nothing") if fault in texts)
    said = f"I ask. {good}\n{texts['cut, and text after it']}{END}"
    path = "/v1/chat/completions"
    body = {**PATHS[path], "model": "tiny"}

    async def main() -> None:
        async with asyncio.timeout(240), AsyncExitStack() as stack:
            engines = [PacedEngine(hermes, lambda _: said, ends) for ends in (None, None, lambda n: n % 5 == 0)]
            served = [serving(hermes, engine, config_of(name)) for engine in engines]
            first, second, drafting = [await stack.enter_async_context(one) for one in served]
            whole = await stream(first, path, body)
            drafted = await stream(drafting, path, body)
            assert chunks_joined(shown(drafted).decode()) == chunks_joined(shown(whole).decode())
            for k in range(1, len(whole), STRIDE):
                rest = await stream(second, path, body, resume_after(whole[:k]))
                assert shown(whole[:k] + rest) == shown(whole), k

    with paced(monkeypatch):
        asyncio.run(main())


def test_a_faulty_call_is_found_again(tmp_path: Path) -> None:
    """The next turn goes on after what the model wrote, and not after what the template makes of it."""
    tokenizer = tokenizer_of("qwen3_coder", tmp_path)
    said = [
        "<think>Hm.</think>\n<function=get_weather>\n<parameter=city\n  a </parameter> b \n<parameter=days>\n2\n"
        f"</parameter>\n</function>{END}",
        f"Fine.{END}",
    ]
    path = "/v1/chat/completions"

    async def scenario(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        answer = (await client.post(path, json={**PATHS[path], "model": "tiny"})).raise_for_status().json()
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "  a </parameter> b ", "days": 2}
        history = [
            ASK,
            {"role": "assistant", "content": message["content"], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        ]
        (await client.post(path, json={**PATHS[path], "model": "tiny", "messages": history})).raise_for_status()
        first, second = (sent.request.prompt for sent in engine.received if isinstance(sent, Submit))
        before = [*first, *tokenizer.encode(said[0], add_special_tokens=False)]
        assert second[: len(before)] == before

    run(tokenizer, said, scenario)


# Marks in answers that a grammar binds ------------------------------------------------------------------------------

MARKED = '{"text": "A <think> b </think> c </think>", "call": "<tool_call>{}</tool_call>"}'
FORMATTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"response_format": {"type": "json_object"}},
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    "/v1/responses": {"text": {"format": {"type": "json_object"}}},
    "/api/chat": {"format": "json"},
}


@pytest.mark.parametrize("before", ["", "<think>Hm.</think>\n\n"], ids=["alone", "after reasoning"])
@pytest.mark.parametrize("with_tools", [False, True])
def test_marks_inside_of_json_stay(hermes: Tokenizer, before: str, with_tools: bool) -> None:
    async def scenario(client: httpx.AsyncClient, said: list[str]) -> None:
        said[:] = [before + MARKED]
        for path, fields in FORMATTED.items():
            fields = fields if with_tools else {**fields, "tools": []}
            assert json.loads(await check_answer(client, path, fields, [])) == json.loads(MARKED), path

    play(hermes, "hermes", scenario)


def test_a_mark_that_closes_no_reasoning_is_text(hermes: Tokenizer) -> None:
    async def scenario(client: httpx.AsyncClient, said: list[str]) -> None:
        said[:] = ["Reasoning ends with </think> there."]
        for path in PATHS:
            assert await check_answer(client, path, {}, []) == said[0]

    play(hermes, "hermes", scenario)
