"""What clients of other servers send in bodies of ours: forms of thinking, hints, other words for the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.conversations import prompts, run
from support.scripted_model import tokenizer_of
from support.serving import sse

from phalanx.errors import InvalidRequest
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody
from phalanx.server.dialects.messages.messages_dialect import MESSAGES
from phalanx.server.dialects.ollama import ollama_dialect
from phalanx.server.dialects.openai.chat_completions import CHAT
from phalanx.server.dialects.openai.completions import COMPLETIONS
from phalanx.server.dialects.responses.responses_dialect import RESPONSES
from phalanx.server.outputs.output_formats import OutputFormats, by_name
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults
from phalanx.text.tokenizer import Tokenizer

SERVED = ApiModel(
    names=("tiny",),
    max_n=4,
    max_prompts=4,
    default_max_tokens=16,
    defaults=GenerationDefaults(),
    eos_ids=frozenset({0}),
    template_kwargs={"enable_thinking": "server's"},
    formats=by_name(OutputFormats(), "hermes", "qwen3"),
)
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHATS: dict[str, tuple[Dialect[Any], dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [USER]}),
    "responses": (RESPONSES, {"input": "hi"}),
}
DIALECTS: dict[str, tuple[Dialect[Any], dict[str, Any]]] = {
    **CHATS,
    "completions": (COMPLETIONS, {"prompt": "hi"}),
    "messages": (MESSAGES, {"messages": [USER], "max_tokens": 5}),
    "ollama": (ollama_dialect.CHAT, {"model": "tiny", "messages": [USER]}),
}
TOOLS = {"chat": [{"type": "function", "function": FUNCTION}], "responses": [{"type": "function", **FUNCTION}]}


def parsed(name: str, **fields: Any) -> ParsedBody:
    dialect, body = DIALECTS[name]
    data = json.dumps({**body, **fields}).encode()
    found = dialect.parse(parse_body(data, dialect.body, 1000, dialect.readers), SERVED)
    assert isinstance(found, ParsedBody)
    return found


def parse(name: str, **fields: Any) -> Any:
    return parsed(name, **fields).request


def refusal(name: str, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(name, **fields)
    return caught.value


# Thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(
    ("sent", "variables"),
    [
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "auto"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking_budget": 1024},
        ),
        ({"enable_thinking": True}, {"enable_thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"enable_thinking": True, "thinking_budget": 500},
            {"enable_thinking": True, "thinking_budget": 500},
        ),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"enabled": False, "exclude": False}}, {"enable_thinking": False}),
        ({"reasoning": {"max_tokens": 2000, "enabled": True}}, {"thinking_budget": 2000, "enable_thinking": True}),
        ({"reasoning": {}, "thinking": None, "enable_thinking": None}, {}),
        (
            {"thinking": {"type": "enabled"}, "enable_thinking": True, "reasoning": {"effort": "low", "enabled": True}},
            {"enable_thinking": True, "reasoning_effort": "low"},
        ),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_forms_of_thinking_are_variables_of_the_template(name, sent, variables):
    assert parse(name, **sent).conversation.template_kwargs == {**SERVED.template_kwargs, **variables}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"thinking": True}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "depth": 3}}, "thinking.depth"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
        ({"reasoning": "high"}, "reasoning"),
    ],
)
def test_wrong_forms_of_thinking_are_refused_by_name(name, sent, field):
    error = refusal(name, **sent)
    assert error.param == field and field in str(error)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(
    ("sent", "fields"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, ("enable_thinking", "thinking.type")),
        ({"enable_thinking": True, "reasoning": {"effort": "none"}}, ("enable_thinking", "reasoning.effort")),
        (
            {"thinking": {"type": "enabled"}, "reasoning": {"enabled": False}},
            ("thinking.type", "reasoning.enabled"),
        ),
        ({"thinking_budget": 5, "reasoning": {"max_tokens": 6}}, ("thinking_budget", "reasoning.max_tokens")),
    ],
)
def test_forms_that_contradict_each_other_are_refused(name, sent, fields):
    error = refusal(name, **sent)
    assert error.param == fields[1]
    assert f"{fields[0]} and {fields[1]} contradict each other" in str(error)


def test_efforts_of_a_chat_that_contradict_each_other():
    error = refusal("chat", reasoning_effort="low", reasoning={"effort": "high"})
    assert "reasoning_effort and reasoning.effort contradict" in str(error)
    assert refusal("chat", reasoning={"novel": 1}).param == "reasoning.novel"
    assert refusal("responses", reasoning={"exclude": True}).param == "reasoning.exclude"


DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ 'T' if thinking else 'F' }}"
)
"""How DeepSeek's templates, Kimi's and Granite's are told whether the model thinks."""


def test_templates_with_another_name_for_thinking_are_told_of_it(tmp_path):
    tokenizer_of("hermes", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": DEEPSEEK}))
    chat = {"messages": [USER], "model": "tiny"}
    asked = [
        ("/v1/chat/completions", {**chat, "thinking": {"type": "enabled"}}, "T"),
        ("/v1/chat/completions", {**chat, "thinking": {"type": "disabled"}}, "F"),
        ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"thinking": True}}, "T"),
        ("/v1/chat/completions", chat, "F"),
        ("/v1/responses", {"input": "hi", "reasoning": {"enabled": True}}, "T"),
        ("/v1/messages", {**chat, "max_tokens": 5, "thinking": {"type": "enabled"}}, "T"),
        ("/v1/messages", {**chat, "max_tokens": 5}, "F"),
        ("/api/chat", {**chat, "think": True}, "T"),
    ]

    async def scenario(client, engine):
        for path, body, _ in asked:
            (await client.post(path, json=body)).raise_for_status()
        assert [prompt[-1] for prompt in prompts(engine)] == [ending for _, _, ending in asked]

    run(Tokenizer.load(tmp_path), ["Fine.<|im_end|>"] * len(asked), scenario)


@pytest.mark.parametrize("excluded", [False, True])
def test_reasoning_may_be_left_out_of_a_chat(hermes, excluded):
    async def scenario(client, engine):
        body = {"messages": [USER], "reasoning": {"exclude": excluded}}
        whole = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        streamed = sse((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
        message = whole["choices"][0]["message"]
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed[:-1]]
        assert message["content"] == "".join(delta.get("content", "") for delta in deltas) == "Fine."
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        for field in ("reasoning", "reasoning_content"):
            assert message.get(field) == (None if excluded else "Hm.")
            assert "".join(delta.get(field, "") for delta in deltas) == ("" if excluded else "Hm.")

    run(hermes, ["<think>Hm.</think>Fine.<|im_end|>"] * 2, scenario)


# Hints and other words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(
    "sent",
    [
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "x" * 100_000}]}},
        {"safe_prompt": False},
        {"usage": {"include": False}},
    ],
)
def test_hints_change_nothing(name, sent):
    assert parse(name, **sent) == parse(name)


def test_a_stream_has_the_usage_that_openrouters_clients_ask_for():
    for name in ("chat", "completions"):
        assert parse(name, stream=True, usage={"include": True}).options.include_usage
        assert not parse(name, stream=True, usage={"include": False}).options.include_usage
        assert refusal(name, usage={"novel": 1}).param == "usage.novel"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("completions", "max_tokens"),
        ("responses", "max_output_tokens"),
        ("messages", "max_tokens"),
        ("ollama", "num_predict"),
    ],
)
def test_minus_one_is_no_limit_of_tokens(name, field):
    def limited(n):
        return {"options": {field: n}} if name == "ollama" else {field: n}

    assert parse(name, **limited(-1)).options.max_tokens is None
    assert parse(name, **limited(7)).options.max_tokens == 7
    if name != "ollama":
        assert refusal(name, **limited(-2)).param == field


def test_a_completion_without_a_limit_still_has_openais():
    assert parse("completions").options.max_tokens == 16


@pytest.mark.parametrize("name", CHATS)
def test_any_is_required(name):
    found, wanted = (parse(name, tools=TOOLS[name], tool_choice=choice) for choice in ("any", "required"))
    assert found == wanted and found.tools.required
    assert refusal(name, tools=TOOLS[name], tool_choice="all").param == "tool_choice"
    assert refusal(name, tool_choice="any").param == "tool_choice"


def test_a_response_says_required():
    options = parsed("responses", tools=TOOLS["responses"], tool_choice="any").format.keywords["options"]
    assert options.echoed["tool_choice"] == "required"
