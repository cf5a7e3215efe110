"""What bodies of /api/chat and /api/generate mean: every field, and every error with its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from phalanx.errors import InvalidRequest, UnknownModel
from phalanx.server.dialects.common.dialect import ParsedBody, StaticAnswer
from phalanx.server.dialects.ollama.ollama_body import OllamaCall, OllamaCalled, OllamaMessage
from phalanx.server.dialects.ollama.ollama_dialect import CHAT, GENERATE
from phalanx.server.dialects.ollama.ollama_messages import conversation_of
from phalanx.server.fields.json_fields import SCHEMA_BYTES, TOOLS_BYTES, VARIABLES_BYTES
from phalanx.server.fields.openai_bodies import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS
from phalanx.server.outputs.output_formats import OutputFormats, by_name
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.parsed import ApiModel, ChatRequest, CompletionRequest, GenerationDefaults

SERVED = ApiModel(
    names=("tiny", "second"),
    hidden_name="/models/tiny",
    max_n=4,
    max_prompts=4,
    defaults=GenerationDefaults(temperature=0.7),
    eos_ids=frozenset({0}),
    template_kwargs={"fixed": 1},
    formats=by_name(OutputFormats(), "hermes", "qwen3"),
)
PLAIN = replace(SERVED, formats=OutputFormats())
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Ask.", "parameters": SCHEMA}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def asked(served: ApiModel = SERVED, **fields: Any) -> ParsedBody | StaticAnswer:
    dialect = CHAT if "messages" in fields else GENERATE
    body = parse_body(json.dumps({"model": "tiny", **fields}).encode(), dialect.body, 100, dialect.readers)
    return dialect.parse(body, served)


def parse(served: ApiModel = SERVED, **fields: Any) -> ChatRequest:
    found = asked(served, **({"messages": [USER]} | fields))
    assert isinstance(found, ParsedBody) and isinstance(found.request, ChatRequest)
    return found.request


def messages(*given: Any) -> list[dict[str, Any]]:
    return parse(messages=list(given)).conversation.messages


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        asked(**({"messages": [USER]} | fields))
    return caught.value


# Options ---------------------------------------------------------------------------------------------------------


def test_without_options():
    options = parse().options
    assert options.stream and options.model == "tiny" and options.max_tokens is None and not options.seeded
    assert options.sampling.temperature == 0.7 and options.sampling.logprobs is None
    assert options.answer is None and options.stop_strings == ()


def test_options():
    given = {
        "temperature": 0.5, "top_k": 5.0, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2, "repeat_last_n": -1,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 7, "num_predict": 12.0, "stop": ["a", "b"],
        "mirostat": 0, "typical_p": 1, "tfs_z": 1.0,
    }  # fmt: skip
    options = parse(options=given, stream=False).options
    found = options.sampling
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.5, 5, 0.9, 0.1)
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (1.2, 0.3, 0.4)
    assert (found.seed, options.seeded, options.max_tokens, options.stop_strings) == (7, True, 12, ("a", "b"))
    assert not options.stream


@pytest.mark.parametrize("most", [-2, -1, 0])
def test_num_predict_without_a_limit(most):
    assert parse(options={"num_predict": most}).options.max_tokens is None


def test_options_that_mean_something_else_here():
    assert not parse(options={"seed": -1}).options.seeded
    assert parse(options={"repeat_penalty": 1.3, "repeat_last_n": 0}).options.sampling.repetition_penalty == 1.0
    assert parse(options={"repeat_last_n": 64}).options.sampling.repetition_penalty == 1.0
    assert parse(options={"stop": "a"}).options.stop_strings == ("a",)


def test_settings_of_the_machine_and_unknown_fields_change_nothing():
    machine = {"num_ctx": 4096, "num_gpu": 99, "num_thread": 8, "use_mmap": True, "low_vram": False, "numa": {}}
    sent = {"keep_alive": "5m", "options": machine, "new": {"a": [1]}, "truncate": True}
    assert parse(**sent) == parse()
    assert parse(keep_alive=-1, options=None, format=None, think=None, tools=None) == parse()


@pytest.mark.parametrize(("name", "model"), [("second", "second"), ("tiny:latest", "tiny"), ("/models/tiny", "tiny")])
def test_names_with_and_without_a_tag(name, model):
    assert parse(model=name).options.model == model


def test_formats():
    anything = parse(format="json").options.answer
    assert anything.param == "format" and anything.grammar["json_schema"]["type"] == "object"
    assert "city" in parse(format=SCHEMA).options.answer.grammar["json_schema"]["properties"]
    assert parse(format="").options.answer is None


def test_thinking():
    assert parse(think=True).conversation.template_kwargs == {"fixed": 1, "enable_thinking": True}
    assert parse(think=False).conversation.template_kwargs == {"fixed": 1, "enable_thinking": False}
    assert parse(think="low").conversation.template_kwargs["reasoning_effort"] == "low"
    assert parse(PLAIN, think=False).conversation.template_kwargs["enable_thinking"] is False


def test_logprobs():
    assert parse(logprobs=True).options.sampling.logprobs == 0
    assert parse(logprobs=True, top_logprobs=3).options.sampling.logprobs == 3


# Messages --------------------------------------------------------------------------------------------------------


def test_roles_and_contents():
    system = {"role": "system", "content": "Be kind."}
    assert messages(system, USER) == [system, USER]
    assert messages({"role": "user", "images": [], "content": None}) == [{"role": "user", "content": ""}]
    thought = {"role": "assistant", "content": "yes", "thinking": "Hm."}
    assert messages(USER, thought, USER)[1] == {"role": "assistant", "content": "yes", "reasoning_content": "Hm."}


def test_a_begun_answer_is_continued():
    conversation = parse(messages=[USER, {"role": "assistant", "content": "It"}]).conversation
    assert conversation.continue_final_message and not conversation.add_generation_prompt
    conversation = parse(messages=[USER]).conversation
    assert conversation.add_generation_prompt and not conversation.continue_final_message


def test_results_find_their_calls_by_name_or_in_order():
    other = {"function": {"name": "time", "arguments": None}}
    history = messages(
        USER,
        {"role": "assistant", "tool_calls": [CALL, other, CALL]},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
        {"role": "tool", "content": "nobody asked", "tool_name": "wind"},
    )
    ids = [call["id"] for call in history[1]["tool_calls"]]
    assert len(set(ids)) == 3 and all(len(id) == 9 and id.isalnum() for id in ids)
    assert history[1]["tool_calls"][1]["function"] == {"name": "time", "arguments": {}}
    results = [(message["tool_call_id"], message["name"]) for message in history[2:5]]
    assert results == [(ids[1], "time"), (ids[0], "weather"), (ids[2], "weather")]
    assert history[5]["tool_call_id"] not in ids and history[5]["name"] == "wind"


@pytest.mark.parametrize("field", ["tool_name", "tool_call_id"])
def test_results_without_a_call_are_not_compared_with_every_call(field):
    """One request may have 300,000 calls and thousands of results: every pair of them would be minutes."""
    n_compared = 0

    class Counted(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal n_compared
            n_compared += 1
            return str.__eq__(self, other)

    call = OllamaCall(function=OllamaCalled(name=Counted("weather")))
    history = [OllamaMessage(role="assistant", tool_calls=[call] * 200) for _ in range(5)]
    history += [OllamaMessage(role="tool", **{field: Counted("wind")}) for _ in range(1000)]
    results = conversation_of(history)[5:]
    assert len({result["tool_call_id"] for result in results}) == (1000 if field == "tool_name" else 1)
    assert n_compared < 20_000


def test_ids_that_a_client_keeps():
    history = messages(
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **CALL}, {"id": "b", **CALL}]},
        {"role": "tool", "content": "rain", "tool_call_id": "b"},
        {"role": "tool", "content": "sun", "tool_call_id": "c"},
    )
    assert [call["id"] for call in history[1]["tool_calls"]] == ["a", "b"]
    assert [message["tool_call_id"] for message in history[2:]] == ["b", "c"]


def test_tools():
    request = parse(tools=[TOOL, {"function": {"name": "time"}}])
    assert [tool.name for tool in request.tools.tools] == ["weather", "time"]
    assert not request.tools.required and request.tools.parallel
    assert [tool["function"]["name"] for tool in request.conversation.template_kwargs["tools"]] == ["weather", "time"]
    assert parse(tools=[]).tools is None


# Generate --------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_users_message():
    found = asked(prompt="hi", system="Be kind.", suffix="", template="", context=[], images=[])
    assert isinstance(found, ParsedBody) and isinstance(found.request, ChatRequest)
    assert found.request.conversation.messages == [{"role": "system", "content": "Be kind."}, USER]


def test_a_raw_prompt():
    found = asked(prompt="hi", raw=True)
    assert isinstance(found, ParsedBody) and isinstance(found.request, CompletionRequest)
    assert found.request.prompts == ("hi",) and not found.request.echo


@pytest.mark.parametrize(
    ("sent", "place"), [({"messages": []}, {"message": {"role": "assistant", "content": ""}}), ({}, {"response": ""})]
)
def test_without_a_prompt_the_answer_is_that_the_model_is_loaded(sent, place):
    found = asked(**sent, model="second")
    assert isinstance(found, StaticAnswer)
    head = {"model": "second", "created_at": "1970-01-01T00:01:00Z", "done": True, "done_reason": "load"}
    assert found.answer(60) == {**head, **place}


@pytest.mark.parametrize("sent", [{"messages": []}, {}])
@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        *((zero, "unload") for zero in (0, 0.0, -0.0, "0", "0s", "0m0.0s")),
        *((other, "load") for other in (None, -1, 300, 0.5, "5m", "10m", "-1", "", False, [0])),
    ],
)
def test_without_a_prompt_keep_alive_0_is_answered_unload(sent, keep_alive, reason):
    found = asked(**sent, keep_alive=keep_alive)
    assert isinstance(found, StaticAnswer) and found.answer(60)["done_reason"] == reason


def test_keep_alive_0_beside_a_prompt_changes_nothing():
    assert parse(keep_alive=0) == parse()


# Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"format": "xml"}, "format"),
        ({"format": 5}, "format"),
        ({"format": {"a": "x" * SCHEMA_BYTES}}, "format"),
        ({"format": {"x-guidance": {}}}, "format.x-guidance"),
        ({"think": "much"}, "think"),
        ({"think": 1}, "think"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"options": []}, "options"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_k": 1.5}}, "options.top_k"),
        ({"options": {"top_k": -2}}, "options.top_k"),
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"options": {"min_p": 2}}, "options.min_p"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"presence_penalty": 3}}, "options.presence_penalty"),
        ({"options": {"frequency_penalty": 3}}, "options.frequency_penalty"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
        ({"options": {"seed": 0.5}}, "options.seed"),
        ({"options": {"num_predict": 1e300}}, "options.num_predict"),
        ({"options": {"num_predict": 2.5}}, "options.num_predict"),
        ({"options": {"stop": [""]}}, "options.stop"),
        ({"options": {"stop": ["a"] * 17}}, "options.stop"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{**USER, "images": ["AAAA"]}]}, "messages[0].images"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "tool_calls": [CALL] * (MAX_CALLS + 1)}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"a": "x" * VARIABLES_BYTES}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"function": {"name": "f", "description": "x" * TOOLS_BYTES}}]}, "tools"),
    ],
)
def test_wrong_fields_of_a_chat(sent, field):
    error = refusal(**sent)
    assert error.param == field
    assert field.split(".")[-1].split("[")[0] in str(error)


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ({"prompt": "x", "context": [1, 2]}, "context"),
        ({"prompt": "x", "images": ["AAAA"]}, "images"),
        ({"prompt": "x", "raw": True, "system": "y"}, "system"),
        ({"prompt": "x", "options": {"top_p": -1}}, "options.top_p"),
    ],
)
def test_wrong_fields_of_a_prompt(sent, field):
    with pytest.raises(InvalidRequest) as caught:
        asked(**sent)
    assert caught.value.param == field and field.split(".")[-1] in str(caught.value)


def test_what_a_model_cannot():
    with pytest.raises(InvalidRequest, match="cannot call tools: the format") as caught:
        asked(PLAIN, messages=[USER], tools=[TOOL])
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest, match="--reasoning-parser") as caught:
        asked(PLAIN, messages=[USER], think=True)
    assert caught.value.param == "think"


@pytest.mark.parametrize("name", ["large", "large:latest", "tiny:7b"])
def test_unknown_models(name):
    with pytest.raises(UnknownModel, match=f"'{name}' is not served here; this server has tiny, second"):
        asked(messages=[USER], model=name)
