"""Fields that no dialect knows: inside conversations and tools passed over, unless the model would miss content."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.histories import ANTHROPIC_TOOL, BLOCKS, CALL, FLAT, HISTORY, OLLAMA_HISTORY, TOOL, USER
from support.serving import CHAT as ASK
from support.serving import fake_engine, serving

from phalanx.errors import InvalidRequest
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody
from phalanx.server.dialects.messages.messages_dialect import MESSAGES
from phalanx.server.dialects.ollama import ollama_dialect
from phalanx.server.dialects.openai.chat_completions import CHAT
from phalanx.server.dialects.responses.responses_dialect import RESPONSES
from phalanx.server.fields.json_fields import MAX_STRANGE
from phalanx.server.outputs.output_formats import OutputFormats, by_name
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults

SERVED = ApiModel(
    names=("tiny",),
    max_n=4,
    max_prompts=4,
    defaults=GenerationDefaults(),
    eos_ids=frozenset({0}),
    template_kwargs={},
    formats=by_name(OutputFormats(), "hermes", "qwen3"),
)
VS_CODE = {
    "copilot_cache_control": {"type": "ephemeral"},
    "cot_id": "c1",
    "cot_summary": "It thought.",
    "reasoning_text": "Hm: what now?",
    "reasoning_opaque": "x" * 1000,
}
"""What the agent mode of VS Code adds to messages and tools."""
NOVEL = {**VS_CODE, "index": 0, "extra_content": {"google": {"thought_signature": "s"}}, "images": [], "file": None}
TEXT = [{"type": "text", "text": "And tomorrow?"}]
ANSWER = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_abc", "content": [{"type": "text", "text": "rain"}]}
BODIES: dict[str, tuple[Dialect[Any], dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [USER, ANSWER, RESULT, {"role": "user", "content": TEXT}], "tools": [TOOL]}),
    "responses": (RESPONSES, {"input": [USER, *HISTORY], "tools": [FLAT, {"type": "custom", "name": "patch"}]}),
    "messages": (
        MESSAGES,
        {"max_tokens": 9, "system": TEXT, "messages": [USER, *BLOCKS], "tools": [ANTHROPIC_TOOL]},
    ),
    "ollama": (ollama_dialect.CHAT, {"model": "tiny", "messages": [USER, *OLLAMA_HISTORY], "tools": [TOOL]}),
}
FREE = ("arguments", "parameters", "input_schema", "cache_control")
"""Objects in which a client may call a field what it likes, or that are passed over themselves."""


def parse(name: str, body: Any) -> Any:
    dialect, _ = BODIES[name]
    parsed = dialect.parse(parse_body(json.dumps(body).encode(), dialect.body, 1000, dialect.readers), SERVED)
    assert isinstance(parsed, ParsedBody)
    return parsed.request


def objects(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
        for name, inner in value.items():
            if name not in FREE and not (name == "input" and isinstance(inner, dict)):
                yield from objects(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from objects(inner, f"{path}[{i}]")


def varied(name: str, more: dict[str, Any], *, tools: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The body with further fields in each object of its conversation, or of its tools, at a time."""
    _, plain = BODIES[name]
    fields = [field for field, value in plain.items() if isinstance(value, list) and (field == "tools") == tools]
    for field in fields:
        for i, (path, _) in enumerate(objects(plain[field], field)):
            body = copy.deepcopy(plain)
            list(objects(body[field], field))[i][1].update(more)
            yield path, body


@pytest.mark.parametrize("name", BODIES)
def test_unknown_fields_in_conversations_and_tools_change_nothing(name):
    plain = parse(name, BODIES[name][1])
    for tools in (False, True):
        variants = list(varied(name, NOVEL, tools=tools))
        assert len(variants) >= (1 if tools else 4)
        for path, body in variants:
            assert parse(name, body) == plain, path
    everywhere = copy.deepcopy(BODIES[name][1])
    for value in everywhere.values():
        for _, found in list(objects(value, "")):
            found.update(NOVEL)
    assert parse(name, everywhere) == plain


@pytest.mark.parametrize("name", BODIES)
def test_content_that_the_model_would_miss_is_refused_at_any_depth(name):
    values = {"image_url": {"url": "x"}, "input_audio": {"data": "x"}, "file": {"file_id": "f"}}
    for field, value in values.items():
        for more, place in [({field: value}, field), ({"novel": [{"a": {field: value}}]}, "novel")]:
            for path, body in varied(name, more, tools=False):
                with pytest.raises(InvalidRequest) as caught:
                    parse(name, body)
                assert caught.value.param == f"{path}.{place}" and field in str(caught.value)
                assert "only text" in str(caught.value)
        for path, body in varied(name, {"examples": [{field: value}]}, tools=True):
            assert parse(name, body) == parse(name, BODIES[name][1]), path


@pytest.mark.parametrize("value", [None, "", [], {}, "[ ]", "{ }"])
def test_content_that_is_empty_is_none(value):
    shown = f" {value if value in ('[ ]', '{ }') else json.dumps(value)} "
    for novel in (f'"file" :{shown}', f'"novel": [{{"file" :{shown}}}]'):
        data = f'{{"messages": [{{"role": "user", "content": "hi", {novel}}}]}}'.encode()
        assert parse_body(data, CHAT.body, 100).messages[0].content == "hi"


def test_names_of_content_in_texts_and_arguments_are_none():
    text = 'Send {"image_url": {"url": "x"}, "file": "y"}.'
    call = {**CALL, "function": {"name": "f", "arguments": {"file": "a.py", "images": ["b.png"]}}}
    answer = {"role": "assistant", "content": text, "tool_calls": [call], "novel": text, "parsed": {"file": "a.py"}}
    parsed = parse("chat", {"messages": [{"role": "user", "content": text, **VS_CODE}, answer]})
    assert parsed.conversation.messages[0]["content"] == text
    assert parsed.conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "file": "a.py",
        "images": ["b.png"],
    }


def test_unknown_fields_of_any_size_are_passed_over():
    many = {f"a{i}": {"b": [1]} for i in range(MAX_STRANGE)}
    for novel in ("x:" * (1 << 21), many):
        body = {"messages": [{"role": "user", "content": "hi", "novel": novel}]}
        assert parse("chat", body).conversation.messages == [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has \d+ names that are unknown") as caught:
        parse("chat", {"messages": [{"role": "user", "content": "hi", "novel": [many, {"file": "f"}]}]})
    assert caught.value.param == "messages[0]"


@pytest.mark.parametrize("name", BODIES)
def test_a_field_of_a_conversation_that_is_there_twice_is_refused(name):
    body = json.dumps(BODIES[name][1]).replace('"role": "user"', '"role": "user", "role": "user"', 1)
    dialect, _ = BODIES[name]
    with pytest.raises(InvalidRequest, match="has a field twice"):
        parse_body(body.encode(), dialect.body, 1000, dialect.readers)


@pytest.mark.parametrize("message", [{"function_call": {"name": "f", "arguments": "{}"}}, {"audio": {"id": "a"}}])
def test_answers_of_other_kinds_are_not_left_out(message):
    (field,) = message
    with pytest.raises(InvalidRequest) as caught:
        parse("chat", {"messages": [USER, {"role": "assistant", "content": None, **message}, USER]})
    assert caught.value.param == f"messages[1].{field}"


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_unknown_fields_of_the_body_and_of_settings_are_refused_by_name(name):
    for more in ({"novel": 1}, {"stream": True, "stream_options": {"novel": 1}}):
        with pytest.raises(InvalidRequest) as caught:
            parse(name, {**BODIES[name][1], **more})
        assert str(caught.value.param).endswith("novel")


def test_the_agent_mode_of_vs_code(tokenizer):
    async def main():
        async with asyncio.timeout(60), serving(tokenizer, fake_engine(tokenizer)) as client:
            plain = await client.post("/v1/chat/completions", json={**ASK, "max_tokens": 5, "seed": 1})
            messages = [{**message, **VS_CODE} for message in ASK["messages"]]
            sent = await client.post(
                "/v1/chat/completions", json={**ASK, "messages": messages, "max_tokens": 5, "seed": 1}
            )
            assert sent.status_code == plain.status_code == 200
            assert sent.json()["choices"] == plain.json()["choices"]

    asyncio.run(main())
