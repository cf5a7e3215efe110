"""Bodies of /v1/responses to chat requests: what each field and item means, and what is refused by name."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import fields as fields_of

from phalanx.errors import InvalidRequest, UnknownModel
from phalanx.server.answers.deltas import ResponseHead
from phalanx.server.dialects.responses.responses_body import READERS, ResponsesBody
from phalanx.server.dialects.responses.responses_dialect import ECHOED, NEUTRAL, SHARED, parse_responses
from phalanx.server.dialects.responses.responses_items import seal
from phalanx.server.fields.json_fields import TOOLS_BYTES
from phalanx.server.outputs.output_formats import OutputFormats, by_name
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults
from phalanx.supervision.fake_engine import FAKE_INFO

SERVED = ApiModel(
    names=("tiny", "alias"),
    max_n=16,
    max_prompts=4,
    defaults=GenerationDefaults(temperature=0.6, top_k=20),
    eos_ids=frozenset({0}),
    template_kwargs={"enable_thinking": True},
    formats=by_name(OutputFormats(), "hermes", "none"),
)
HEAD = ResponseHead(id="resp_0", created=0, model="tiny", logprobs=False)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "get", "description": "Gets.", "parameters": PARAMETERS, "strict": True}
CUSTOM = {
    "type": "custom",
    "name": "note",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"},
}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "All.", "tools": [{**FUNCTION, "name": "close"}]}
FOREIGN = [
    *({"type": kind} for kind in ("web_search", "local_shell", "image_generation", "from_next_year")),
    {"type": "mcp", "server_label": "a", "server_url": "https://example.com", "require_approval": "never"},
    {"type": "file_search", "vector_store_ids": ["vs_1"], "filters": {"type": "eq", "key": "a", "value": 1}},
]


def parse(**fields):
    data = json.dumps({"input": "hello", **fields}).encode()
    return parse_responses(parse_body(data, ResponsesBody, FAKE_INFO.max_model_len, READERS), SERVED)


def messages(*items, **fields):
    return parse(input=list(items), **fields).request.conversation.messages


def response(**fields):
    """The response object, before there is any output."""
    data = parse(**fields).format(HEAD).opening(1, None).decode()
    return json.loads(data.split("data: ")[1].split("\n")[0])["response"]


def call(number, name="get", **fields):
    return {"type": "function_call", "id": "fc_1", "call_id": f"c{number}", "name": name, "arguments": "{}", **fields}


def output(number, text="done", **fields):
    return {"type": "function_call_output", "call_id": f"c{number}", "output": text, **fields}


def answer(text, **fields):
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part], **fields}


def as_called(number, name="get", arguments=None):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments or {}}}


USER = {"role": "user", "content": "hello"}
REASONING = [{"type": "reasoning_text", "text": "R"}]


# The conversation ---------------------------------------------------------------------------------------------------


def test_a_text_is_a_user_message():
    conversation = parse().request.conversation
    assert conversation.messages == [USER]
    assert conversation.add_generation_prompt and not conversation.continue_final_message


def test_items_may_have_no_type_and_parts_of_several_kinds():
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages(USER, {"role": "user", "content": parts}) == [USER, {"role": "user", "content": "a\nb"}]


def test_instructions_come_first_and_developers_where_they_are():
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "two"}]}
    said = messages(developer, {"role": "system", "content": "three"}, USER, developer, instructions="one")
    assert [(message["role"], message["content"]) for message in said] == [
        *(("system", text) for text in ("one", "two", "three")),
        ("user", "hello"),
        ("system", "two"),
    ]


def test_an_answer_of_several_items_is_one_message():
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": REASONING}
    said = messages(USER, reasoning, answer("I look."), call(1), call(2), output(1, "sun"), output(2, "rain"))
    assert said[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "R",
        "tool_calls": [as_called(1), as_called(2)],
    }
    assert said[2:] == [
        {"role": "tool", "content": text, "tool_call_id": id, "name": "get"}
        for id, text in (("c1", "sun"), ("c2", "rain"))
    ]


def test_two_texts_in_a_row_are_two_messages_and_a_text_after_a_call_is_none_of_its_own():
    assert [message["content"] for message in messages(USER, answer("a"), answer("b"))] == ["hello", "a", "b"]
    (_, one) = messages(USER, answer("a"), call(1), answer("b"))
    assert one["content"] == "ab" and len(one["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"summary": [{"type": "summary_text", "text": "S"}]}, "S"),
        (
            {"summary": [{"type": "summary_text", "text": "S"}], "content": [{"type": "reasoning_text", "text": "R"}]},
            "R",
        ),
        ({"summary": [], "encrypted_content": seal("E"), "content": [{"type": "reasoning_text", "text": "R"}]}, "E"),
        ({"summary": [], "encrypted_content": "gAAAAABo"}, None),
        ({"summary": []}, None),
    ],
)
def test_reasoning_comes_back_in_three_places(fields, text):
    said = messages(USER, {"type": "reasoning", "id": "rs_1", **fields}, answer("a"))
    assert said[1].get("reasoning_content") == text


def test_calls_of_custom_tools_and_of_namespaces():
    item = {"type": "custom_tool_call", "call_id": "c1", "name": "note", "input": "a\nb"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]}
    said = messages(USER, item, result, call(2, "close", namespace="agents", arguments='{"a": 1}'))
    assert said[1]["tool_calls"] == [as_called(1, "note", {"input": "a\nb"})]
    assert said[2] == {"role": "tool", "content": "ok", "tool_call_id": "c1", "name": "note"}
    assert said[3]["tool_calls"] == [as_called(2, "agents__close", {"a": 1})]


def test_records_of_tools_that_others_ran_are_left_out():
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    assert messages(USER, search, answer("a")) == [USER, {"role": "assistant", "content": "a"}]


def test_long_histories_cost_no_more_than_their_length():
    """Texts that become one message are joined once."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r" * 1000}]}
    (_, one) = messages(USER, *([thought, answer("a" * 1000)] * 2000))
    assert len(one["content"]) == len(one["reasoning_content"]) == 2_000_000


def test_a_refusal_is_a_text():
    assert messages(USER, answer("", content=[{"type": "refusal", "refusal": "No."}]))[1]["content"] == "No."


# Tools --------------------------------------------------------------------------------------------------------------


def test_own_tools_are_offered_and_foreign_ones_left_out():
    asked = parse(tools=[FUNCTION, *FOREIGN, CUSTOM, NAMESPACE])
    tools = asked.request.tools
    assert [tool.name for tool in tools.tools] == ["get", "note", "agents__close"]
    assert tools.tools[0].parameters == PARAMETERS and not tools.required and tools.parallel
    assert "regex grammar:\n[a-z]+" in tools.tools[1].parameters["properties"]["input"]["description"]
    shown = asked.request.conversation.template_kwargs["tools"]
    assert [tool["function"]["name"] for tool in shown] == ["get", "note", "agents__close"]
    assert parse(tools=FOREIGN).request.tools is None
    assert [tool["type"] for tool in response(tools=[*FOREIGN, NAMESPACE])["tools"]] == ["namespace"]


@pytest.mark.parametrize(
    ("choice", "names", "required"),
    [
        ("auto", ["get", "agents__close"], False),
        ("required", ["get", "agents__close"], True),
        ({"type": "function", "name": "get"}, ["get"], True),
        ({"type": "function", "name": "close", "namespace": "agents"}, ["agents__close"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get"}]}, ["get"], False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get"}]}, ["get"], True),
    ],
)
def test_choices(choice, names, required):
    tools = parse(tools=[FUNCTION, NAMESPACE], tool_choice=choice).request.tools
    assert [tool.name for tool in tools.tools] == names and tools.required == required


def test_no_choice():
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    for choice in ("none", allowed):
        asked = parse(tools=[FUNCTION], tool_choice=choice)
        assert asked.request.tools is None and "tools" not in asked.request.conversation.template_kwargs
    assert not parse(tools=[FUNCTION], parallel_tool_calls=False).request.tools.parallel


# Options ------------------------------------------------------------------------------------------------------------


def test_options():
    options = parse(
        model="alias", stream=True, max_output_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=5, stop="x",
        timeout=2.5, timing=True, cache_salt="s", num_speculative_tokens=1, min_p=0.1, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, stream_options={"include_obfuscation": False},
    ).request.options  # fmt: skip
    assert (options.model, options.stream, options.max_tokens, options.n) == ("alias", True, 7, 1)
    assert (options.stop_strings, options.timeout_s, options.timing) == (("x",), 2.5, True)
    assert (options.cache_salt, options.max_drafts, options.seeded) == ("s", 1, True)
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 5)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1, -1)
    assert sampling.repetition_penalty == 1.5 and sampling.logprobs is None
    assert parse().request.options.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({"top_logprobs": 3}, 3),
        ({"top_logprobs": 0}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"include": ["file_search_call.results"]}, None),
    ],
)
def test_log_probabilities(fields, logprobs):
    assert parse(**fields).request.options.sampling.logprobs == logprobs


def test_formats():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    found = parse(text={"format": form}).request.options.answer
    assert (found.param, found.place) == ("text.format", "text.format.schema")
    assert found.grammar["json_schema"]["properties"] == schema["properties"]
    assert parse(text={"format": {"type": "json_object"}}).request.options.answer.place == "text.format"
    assert parse(text={"format": {"type": "text"}}).request.options.answer is None
    assert response(text={"format": form, "verbosity": "low"})["text"] == {"format": form, "verbosity": "low"}


def test_variables_of_the_template():
    asked = parse(reasoning={"effort": "none", "context": "auto"}, text={"verbosity": "low"})
    variables = asked.request.conversation.template_kwargs
    assert variables == {"reasoning_effort": "none", "enable_thinking": False, "verbosity": "low"}
    own = parse(reasoning={"effort": "high"}, chat_template_kwargs={"reasoning_effort": "max"})
    assert own.request.conversation.template_kwargs == {"enable_thinking": True, "reasoning_effort": "max"}


def test_the_response_says_what_was_asked():
    said = response(
        instructions="Be brief.", metadata={"a": "b"}, store=True, prompt_cache_key="k", max_output_tokens=5,
        tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False, top_p=0.5, service_tier="auto",
        reasoning={"effort": "low", "summary": "auto"}, user="u", safety_identifier="s", max_tool_calls=3,
    )  # fmt: skip
    assert said["instructions"] == "Be brief." and said["store"] is False and said["tool_choice"] == "required"
    assert said["tools"] == [FUNCTION]
    assert said["reasoning"] == {"effort": "low", "summary": "auto"} and said["parallel_tool_calls"] is False
    assert (said["temperature"], said["top_p"], said["max_output_tokens"]) == (0.6, 0.5, 5)
    assert (said["metadata"], said["prompt_cache_key"], said["max_tool_calls"]) == ({"a": "b"}, "k", 3)
    assert said["previous_response_id"] is None and said["usage"] is None
    assert response(instructions="x" * (1 << 17))["instructions"] is None  # not three times in every stream


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
def test_a_summary_is_the_reasoning(field):
    asked = parse(reasoning={field: "auto"}, include=["reasoning.encrypted_content"])
    options = asked.format.keywords["options"]
    assert options.summary and options.sealed
    plain = parse(reasoning={"effort": "low"}).format.keywords["options"]
    assert not plain.summary and not plain.sealed


INERT = {
    "store": False,
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "client_metadata": {"x-codex-installation-id": "1", "nested": {"a": [1]}},
    "access_programs": {"cyber": "standard"},
    "include": ["web_search_call.action.sources"],
    "prediction": {"type": "content", "content": "x"},
    "safe_prompt": False,
    "usage": {"include": True},
    **{field: neutral for field, (neutral, _) in NEUTRAL.items() if neutral is not None},
}


@pytest.mark.parametrize("field", INERT)
def test_fields_that_do_not_change_the_answer(field):
    assert parse(**{field: INERT[field]}).request == parse().request


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_truncation_changes_nothing_where_the_prompt_fits(truncation):
    assert parse(truncation=truncation).request == parse().request
    assert response(truncation=truncation)["truncation"] == truncation
    assert response()["truncation"] == "disabled"


def test_every_field_is_read():
    """No field is declared and forgotten."""
    read = {"input", "instructions", "stream_options", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"}
    read |= {"parallel_tool_calls", "top_logprobs", "chat_template_kwargs", *SHARED, *ECHOED, *NEUTRAL, *INERT}
    read |= {"thinking", "enable_thinking", "thinking_budget", "truncation"}
    assert read == {field.name for field in fields_of(ResponsesBody)}


# What is refused ----------------------------------------------------------------------------------------------------


ALLOWED = {"type": "allowed_tools", "mode": "auto"}


def item(**fields):
    return {"input": [USER, fields]}


def content(*parts):
    return item(role="user", content=list(parts))


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "last"}, "truncation"),
    ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management"),
    ({"moderation": {"mode": "block"}}, "moderation"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"messages": [USER]}, "messages"),
    ({"n": 2}, "n"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    (item(), "input[1].type"),
    (item(type="item_reference", id="msg_1"), "input[1].type"),
    (item(type="compaction", encrypted_content="x"), "input[1].type"),
    (item(type="message", content="x"), "input[1].role"),
    (item(role="tool", content="x"), "input[1].role"),
    (item(role="user"), "input[1].content"),
    (content({"type": "input_image", "image_url": "data:image/png;base64,AA"}), "input[1].content[0].type"),
    (content({"type": "input_text", "text": "a"}, {"type": "input_file"}), "input[1].content[1].type"),
    (content({"type": "input_text"}), "input[1].content[0].text"),
    (content({"type": "refusal", "text": "a"}), "input[1].content[0].refusal"),
    (content({"text": "a"}), "input[1].content[0].type"),
    (content({"type": "input_text", "text": 5}), "input[1].content[0].text"),
    (item(**{**call(1), "call_id": None}), "input[1].call_id"),
    (item(**{**call(1), "name": ""}), "input[1].name"),
    (item(**call(1, arguments="{")), "input[1].arguments"),
    (item(**call(1, arguments="[]")), "input[1].arguments"),
    (item(**output(1, None)), "input[1].output"),
    (item(**{**output(1), "call_id": None}), "input[1].call_id"),
    (item(**output(1, [{"type": "input_image"}])), "input[1].output[0].type"),
    ({"tools": [{"name": "get"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**FUNCTION, "parameters": {"type": "string"}}]}, "tools[0].parameters"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools"),
    ({"tools": [{**NAMESPACE, "tools": [NAMESPACE]}]}, "tools[0].tools[0].type"),
    ({"tools": [{**FUNCTION, "description": "x" * TOOLS_BYTES}]}, "tools"),
    ({"tools": [{**NAMESPACE, "tools": [{"type": "function", "name": "f"}] * 300}] * 2}, "tools"),
    ({"tools": [FUNCTION], "tool_choice": "get"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "put"}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": [{"type": "function", "name": "put"}]}}, "tool_choice"),
    ({"tools": FOREIGN, "tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "grammar": "x"}}}, "text.format.grammar"),
    ({"text": {"form": 1}}, "text.form"),
    ({"reasoning": "high"}, "reasoning"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"stop": [""]}, "stop"),
    ({"store": "no"}, "store"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{i}-{param}" for i, (_, param) in enumerate(REFUSED)])
def test_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_a_reference_to_an_item_is_refused_with_the_setting_that_avoids_it():
    with pytest.raises(InvalidRequest, match="set store: false in the client, so that it sends the items themselves"):
        parse(**item(type="item_reference", id="msg_1"))


def test_a_reference_to_a_response_is_refused_with_the_setting_that_avoids_it():
    """As Microsoft's agent framework sends it with the result of a call, and nothing else."""
    with pytest.raises(InvalidRequest, match="set store: false in the client, so that it sends the whole conversation"):
        parse(input=[output(1)], previous_response_id="resp_1", tools=[FUNCTION])


def test_a_model_that_is_not_served():
    with pytest.raises(UnknownModel):
        parse(model="gpt-5")
