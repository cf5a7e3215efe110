"""Tools and reasoning with openai-python, against a server whose model says given texts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from support.scripted_model import TEMPLATES
from support.weather import ASK, RESULT, THOUGHT, asking, get_weather

TOOL = openai.pydantic_function_tool(get_weather)


@pytest.fixture(scope="module", params=TEMPLATES)
def client(request, tmp_path_factory) -> Iterator[openai.OpenAI]:
    with asking(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


def test_a_loop_with_parsed_calls(client):
    messages = [ASK]
    first = client.chat.completions.parse(model="tiny", messages=messages, tools=[TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Oslo", days=2)
    assert message.reasoning_content.strip() == THOUGHT
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    second = client.chat.completions.parse(model="tiny", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It rains."
    assert second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert second.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_loop_with_streamed_calls(client):
    with client.chat.completions.stream(model="tiny", messages=[ASK], tools=[TOOL]) as stream:
        seen = list(stream)
        first = stream.get_final_completion()
    kinds = [event.type for event in seen]
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert kinds.count("tool_calls.function.arguments.done") == 1
    chunks = [event.chunk for event in seen if event.type == "chunk"]
    reasoning = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    assert reasoning.strip() == THOUGHT
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 2}
    assert first.choices[0].finish_reason == "tool_calls" and not first.choices[0].message.content
    history = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]}
    history["tool_calls"][0]["function"].pop("parsed_arguments", None)
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    with client.chat.completions.stream(model="tiny", messages=[ASK, history, result], tools=[TOOL]) as stream:
        assert stream.get_final_completion().choices[0].message.content == "It rains."


def test_a_named_tool_and_a_refused_one(client):
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(model="tiny", messages=[ASK], tools=[TOOL], tool_choice=named)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    with pytest.raises(openai.BadRequestError) as caught:
        wrong = {"type": "function", "function": {"name": "get_wind"}}
        client.chat.completions.create(model="tiny", messages=[ASK], tools=[TOOL], tool_choice=wrong)
    assert caught.value.param == "tool_choice"
