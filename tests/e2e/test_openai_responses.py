"""The Responses API with openai-python, against a server whose model says given texts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel
from support.responses_events import StreamGrammar
from support.scripted_model import TEMPLATES
from support.weather import ASK, RESULT, THOUGHT, asking, get_weather


class Forecast(BaseModel):
    text: str
    degrees: int


TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Ask for the weather.",
    "strict": True,
    "parameters": {**get_weather.model_json_schema(), "additionalProperties": False},
}


@pytest.fixture(scope="module", params=TEMPLATES)
def client(request, tmp_path_factory) -> Iterator[openai.OpenAI]:
    with asking(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


def test_a_loop_of_calls(client):
    """The output goes back as it came; of the second prompt only the result is new."""
    items = [ASK]
    first = client.responses.create(model="tiny", input=items, tools=[TOOL])
    reasoning, call = first.output
    assert reasoning.content[0].text.strip() == THOUGHT
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Oslo", "days": 2},
    )
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    second = client.responses.create(model="tiny", input=items, tools=[TOOL])
    assert second.output_text == "It rains." and second.status == "completed"
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert second.usage.output_tokens_details.reasoning_tokens > 0


def test_a_stream_of_events(client):
    events = list(client.responses.create(model="tiny", input=[ASK], tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    grammar = StreamGrammar()
    for event in events:
        grammar.take(event.model_dump(exclude_unset=True, mode="json"))
    assert grammar.finish()["output"][1]["name"] == "get_weather"
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 2


def test_a_stream_that_the_library_collects(client):
    with client.responses.stream(model="tiny", input=[ASK], tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    call = final.output[-1]
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 2}
    items = [ASK, *final.output, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    with client.responses.stream(model="tiny", input=items, tools=[TOOL]) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert said == stream.get_final_response().output_text == "It rains."


def test_a_parsed_answer(client):
    answer = client.responses.parse(model="tiny", input="Write a forecast.", text_format=Forecast)
    assert answer.output_parsed == Forecast(text="rain", degrees=7)


def test_parsed_arguments(client):
    tool = openai.pydantic_function_tool(get_weather)["function"]
    answer = client.responses.parse(model="tiny", input=[ASK], tools=[{"type": "function", **tool}])
    assert answer.output[-1].parsed_arguments == {"city": "Oslo", "days": 2}


def test_a_forced_tool_and_refusals(client):
    named = {"type": "function", "name": "get_weather"}
    answer = client.responses.create(model="tiny", input=[ASK], tools=[TOOL], tool_choice=named)
    assert answer.output[-1].name == "get_weather"
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tool_choice": {**named, "name": "get_wind"}}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input=[ASK], tools=[TOOL], **fields)
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match="writes text"):
        client.embeddings.create(model="tiny", input="hello")


def test_a_cut_answer_and_a_count(client):
    counted = client.responses.input_tokens.count(model="tiny", input=[ASK], tools=[TOOL])
    whole = client.responses.create(model="tiny", input=[ASK], tools=[TOOL])
    assert counted.input_tokens == whole.usage.input_tokens
    answer = client.responses.create(model="tiny", input=[ASK], max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
