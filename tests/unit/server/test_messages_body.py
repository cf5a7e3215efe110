"""What bodies of /v1/messages mean: every field, and every error with its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from phalanx.errors import InvalidRequest
from phalanx.server.dialects.messages.messages_dialect import BILLING, MESSAGES, parse_counted, parse_messages
from phalanx.server.fields.json_fields import SCHEMA_BYTES, TOOLS_BYTES, VARIABLES_BYTES
from phalanx.server.fields.openai_bodies import MAX_MESSAGES, MAX_PARTS
from phalanx.server.outputs.output_formats import OutputFormats, by_name
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.parsed import ApiModel, ChatRequest, GenerationDefaults

SERVED = ApiModel(
    names=("tiny", "claude-tiny"),
    max_n=4,
    max_prompts=4,
    defaults=GenerationDefaults(temperature=0.7),
    eos_ids=frozenset({0}),
    template_kwargs={},
    formats=by_name(OutputFormats(), "hermes", "qwen3"),
)
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Ask.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
CALLED = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def parse(served: ApiModel = SERVED, counted: bool = False, **fields: Any) -> ChatRequest:
    body = {"model": "tiny", "max_tokens": 10, "messages": [USER], **fields}
    read = parse_body(json.dumps(body).encode(), MESSAGES.body, 100, MESSAGES.readers)
    request = (parse_counted if counted else parse_messages)(read, served).request
    assert isinstance(request, ChatRequest)
    return request


def messages(*given: Any, **fields: Any) -> list[dict[str, Any]]:
    return parse(messages=list(given), **fields).conversation.messages


# Options ---------------------------------------------------------------------------------------------------------


def test_options():
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["a", "b"], "stream": True}
    options = parse(**sent, timeout=3, cache_salt="s", model="claude-tiny").options
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (options.stop_strings, options.stream, options.timeout_s, options.cache_salt) == (("a", "b"), True, 3, "s")
    assert (options.model, options.max_tokens, options.n) == ("claude-tiny", 10, 1)


def test_defaults():
    options = parse().options
    assert (options.sampling.temperature, options.stop_strings, options.stream) == (0.7, (), False)
    assert options.clamp_max_tokens, "clients send 32,000 whatever the context is"


def test_counting_needs_no_max_tokens():
    assert parse(counted=True, max_tokens=None).options.max_tokens is None


@pytest.mark.parametrize("field", ["output_format", "output_config.format"])
def test_an_answer_of_a_schema(field):
    form = {"type": "json_schema", "schema": SCHEMA}
    sent = {"output_format": form} if field == "output_format" else {"output_config": {"format": form}}
    answer = parse(**sent).options.answer
    assert answer is not None and answer.param == field
    assert answer.grammar["json_schema"]["properties"] == SCHEMA["properties"]


NOVEL = {"a": [1, {"b": "c"}]}


def test_unknown_fields_are_passed_over_everywhere():
    known = parse(
        messages=[{"role": "user", "content": [text("hi")]}, {"role": "assistant", "content": [CALL]}, result("x")],
        tools=[TOOL],
        system=[text("s")],
        thinking={"type": "adaptive"},
        tool_choice={"type": "auto"},
        output_config={"effort": "low"},
    )
    novel = parse(
        messages=[
            {"role": "user", "content": [text("hi", novel=NOVEL, citations=None)], "novel": NOVEL},
            {"role": "assistant", "content": [{**CALL, "caller": NOVEL}]},
            result("x", cache_control={"type": "ephemeral"}),
        ],
        tools=[{**TOOL, "defer_loading": True, "cache_control": NOVEL}],
        system=[text("s", cache_control={"type": "ephemeral", "ttl": "1h"})],
        thinking={"type": "adaptive", "novel": NOVEL},
        tool_choice={"type": "auto", "novel": NOVEL},
        output_config={"effort": "low", "task_budget": NOVEL},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        novel=NOVEL,
    )
    assert novel == known


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": content, **more}]}


# Thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "server", "variables"),
    [
        ({}, {}, {"enable_thinking": False}),
        ({}, {"enable_thinking": True}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": True}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}, {}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"enable_thinking": False},
            {"enable_thinking": True, "thinking_budget": 2048},
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
            {},
            {"reasoning_effort": "high"},
        ),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {}, {"reasoning_effort": "low"}),
    ],
)
def test_template_variables(sent, server, variables):
    assert parse(replace(SERVED, template_kwargs=server), **sent).conversation.template_kwargs == variables


# Messages --------------------------------------------------------------------------------------------------------


def test_roles_and_system():
    assert messages(USER, {"role": "system", "content": "now"}, USER, system="be kind") == [
        {"role": "system", "content": "be kind"},
        USER,
        {"role": "system", "content": "now"},
        USER,
    ]


def test_the_billing_block_is_left_out():
    system = [text(f"{BILLING} cc_version=2.1; cch=1f2e3;"), text("a"), text("b", cache_control={"type": "ephemeral"})]
    assert messages(USER, system=system)[0] == {"role": "system", "content": "a\nb"}
    assert messages(USER, system=system[:1]) == [USER]


def test_texts_of_a_message():
    assert messages({"role": "user", "content": [text("a"), text("b")]}) == [{"role": "user", "content": "a\nb"}]


def test_an_answer_that_thought_and_called():
    thinking = {"type": "thinking", "thinking": "hm", "signature": "anybody's"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    answer = {"role": "assistant", "content": [thinking, hidden, text("a"), text("b"), CALL]}
    assert messages(USER, answer, result("rain")) == [
        USER,
        {"role": "assistant", "content": "ab", "reasoning_content": "hm", "tool_calls": [CALLED]},
        {"role": "tool", "content": "rain", "tool_call_id": "t1", "name": "weather"},
    ]


@pytest.mark.parametrize(
    ("content", "more", "seen"),
    [
        ("rain", {}, "rain"),
        ("rain", {"is_error": False}, "rain"),
        ("no such city", {"is_error": True}, "Error: no such city"),
        ([text("a"), text("b")], {}, "a\nb"),
        ([], {}, ""),
        (None, {}, ""),
    ],
)
def test_results_of_calls(content, more, seen):
    assert messages(USER, {"role": "assistant", "content": [CALL]}, result(content, **more))[-1]["content"] == seen


def test_results_and_texts_keep_their_order():
    content = [text("a"), *result("1")["content"], *result("2")["content"], text("b"), text("c")]
    assert [(one["role"], one["content"]) for one in messages({"role": "user", "content": content})] == [
        ("user", "a"),
        ("tool", "1"),
        ("tool", "2"),
        ("user", "b\nc"),
    ]


SERVER_TOOL = {"type": "server_tool_use", "id": "s1", "name": "tool_search_tool_regex", "input": {"file": "a"}}
FOUND = {"type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference", "tool_name": "a"}]}


@pytest.mark.parametrize(
    "record",
    [
        {"type": "tool_search_tool_result", "tool_use_id": "s1", "content": FOUND},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "web_fetch_tool_result", "tool_use_id": "s1", "content": {"content": {"file": "x"}}},
        {"type": "mcp_tool_result", "tool_use_id": "s1", "is_error": False, "content": [text("a")]},
    ],
)
def test_records_of_tools_that_anthropic_ran_are_left_out(record):
    """Claude Code's search for tools is one. The model cannot use them, and what came of them is in the texts."""
    answer = {"role": "assistant", "content": [SERVER_TOOL, record, text("I found a."), CALL]}
    assert messages(USER, answer, result("rain"))[1] == {
        "role": "assistant",
        "content": "I found a.",
        "tool_calls": [CALLED],
    }
    with pytest.raises(InvalidRequest) as caught:
        messages({"role": "user", "content": [record]})
    assert caught.value.param == "messages[0].content[0].type"


def test_a_tool_that_was_found_is_named_in_the_result():
    found = [{"type": "tool_reference", "tool_name": name} for name in ("WebFetch", "mcp__db__query")]
    history = messages(USER, {"role": "assistant", "content": [CALL]}, result([*found, text("2 of 9")]))
    assert history[-1]["content"] == "WebFetch\nmcp__db__query\n2 of 9"


def test_an_empty_answer_of_ours_comes_back():
    assert messages(USER, {"role": "assistant", "content": []}, USER)[1] == {"role": "assistant", "content": ""}


def test_an_answer_at_the_end_is_gone_on_with():
    conversation = parse(messages=[USER, {"role": "assistant", "content": "Once"}]).conversation
    assert conversation.continue_final_message and not conversation.add_generation_prompt
    conversation = parse().conversation
    assert conversation.add_generation_prompt and not conversation.continue_final_message


# Tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "required", "parallel"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "weather"}, True, False),
    ],
)
def test_tool_choice(choice, required, parallel):
    request = parse(tools=[TOOL, {"name": "bare"}], tool_choice=choice)
    use = request.tools
    assert use is not None and (use.required, use.parallel) == (required, parallel)
    names = ["weather"] if choice and choice["type"] == "tool" else ["weather", "bare"]
    assert [tool.name for tool in use.tools] == names
    shown = request.conversation.template_kwargs["tools"]
    assert shown[0] == {
        "type": "function",
        "function": {"name": "weather", "description": "Ask.", "parameters": SCHEMA},
    }
    assert [tool["function"]["name"] for tool in shown] == ["weather", "bare"]


def test_no_tool_may_be_called():
    request = parse(tools=[TOOL], tool_choice={"type": "none"})
    assert request.tools is None and "tools" not in request.conversation.template_kwargs


def test_tools_that_anthropic_runs_are_left_out_beside_others():
    use = parse(tools=[SEARCH, {**TOOL, "type": "custom"}]).tools
    assert use is not None and [tool.name for tool in use.tools] == ["weather"]


# Errors ----------------------------------------------------------------------------------------------------------

ANSWER = {"role": "assistant", "content": [CALL]}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"model": "claude-opus"}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [text("a")] * (MAX_PARTS + 1)}]}, "messages[0].content"),
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages"),
        (block(text="no type"), "messages[0].content[0].type"),
        (block(type="text"), "messages[0].content[0].text"),
        (block(**IMAGE), "messages[0].content[0].type"),
        (block(type="document", source={}), "messages[0].content[0].type"),
        (block(type="tool_result", content="x"), "messages[0].content[0].tool_use_id"),
        (block(**CALL), "messages[0].content[0].type"),
        ({"messages": [result([text("a"), IMAGE])]}, "messages[0].content[0].content[1].type"),
        ({"messages": [{"role": "system", "content": result("x")["content"]}]}, "messages[0].content[0].type"),
        ({"messages": [{**ANSWER, "content": [{**CALL, "id": None}]}, USER]}, "messages[0].content[0].id"),
        ({"messages": [{**ANSWER, "content": [{**CALL, "name": ""}]}, USER]}, "messages[0].content[0].name"),
        ({"messages": [{**ANSWER, "content": [{**CALL, "input": "x"}]}, USER]}, "messages[0].content[0].input"),
        (
            {"messages": [{**ANSWER, "content": [{**CALL, "input": {"a": "b" * VARIABLES_BYTES}}]}, USER]},
            "messages[0].content[0].input",
        ),
        ({"messages": [{**ANSWER, "content": result("x")["content"]}, USER]}, "messages[0].content[0].type"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"system": [{"type": "tool_reference", "tool_name": "a"}]}, "system[0].type"),
        ({"messages": [result([{"type": "tool_reference"}])]}, "messages[0].content[0].content[0].type"),
        ({"system": 1}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"timeout": 0}, "timeout"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": "yes"}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"title": "x" * SCHEMA_BYTES}}}},
            "output_config.format.schema",
        ),
        ({"tools": [SEARCH]}, "tools[0].type"),
        ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, {"name": "x", "input_schema": {"type": "string"}}]}, "tools[1].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "description": "x" * TOOLS_BYTES}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "wind"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{"type": "url", "url": "https://x"}]}, "mcp_servers"),
    ],
)
def test_errors_name_their_field(sent, field):
    with pytest.raises(InvalidRequest) as caught:
        parse(**sent)
    assert caught.value.param == field
    assert field in str(caught.value) or field == "model"


def test_neutral_values_pass():
    assert parse(mcp_servers=[], tools=[], stop_sequences=[], system="") == parse()
