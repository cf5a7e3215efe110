"""Structured output with the real `openai` client and with `phalanx.LLM`, on real engines and on any model."""

from __future__ import annotations

import re
from enum import Enum
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field
from support.serving import MODEL, Running

from phalanx import LLM, SamplingParams, StructuredOutputsParams

MESSAGES = [{"role": "user", "content": "hello there"}]
SEEDS = range(4)
DATE = r"2026-(0[1-9]|1[0-2])-[0-3]\d"
SUM = 'root ::= number (" + " number){1,3}\nnumber ::= [0-9]{1,3}'


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Part(BaseModel):
    name: Literal["wheel", "door"]
    count: int = Field(ge=0, le=9)


class Car(BaseModel):
    """As clients write their answers' classes."""

    size: Size
    parts: list[Part] = Field(max_length=2)
    spare: Part | None
    price: Literal[1, 2.5, "free"]


@pytest.fixture
def client(real_server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=real_server.base_url, api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("seed", SEEDS)
def test_openai_parse_and_its_streams(client: openai.OpenAI, seed: int) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "response_format": Car, "seed": seed, "max_tokens": 400}
    answer = client.chat.completions.parse(**asked)  # type: ignore[call-overload]
    car = answer.choices[0].message.parsed
    assert isinstance(car, Car) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:  # type: ignore[call-overload]
        pieces = [event for event in stream if event.type == "content.delta"]
        assert len(pieces) > 1
        assert stream.get_final_completion().choices[0].message.parsed == car


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": DATE}, DATE),
        ({"choice": ["red", 'a "quoted" word', "東京"]}, 'red|a "quoted" word|東京'),
        ({"grammar": SUM}, r"\d{1,3}( \+ \d{1,3}){1,3}"),
        ({"json": {"enum": [1, "one"]}}, '1|"one"'),
    ],
)
def test_vllms_fields_in_both_endpoints(client: openai.OpenAI, form: dict, pattern: str, seed: int) -> None:
    more = {"model": MODEL, "seed": seed, "max_tokens": 60, "extra_body": {"structured_outputs": form}}
    chat = client.chat.completions.create(messages=MESSAGES, n=2, **more)  # type: ignore[call-overload]
    text = client.completions.create(prompt="hello", **more)
    for choice, said in [*((c, c.message.content) for c in chat.choices), *((c, c.text) for c in text.choices)]:
        assert re.fullmatch(pattern, said) and choice.finish_reason == "stop"


def test_a_refused_schema_is_a_bad_request(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "tags", "schema": schema, "strict": True}}
    with pytest.raises(
        openai.BadRequestError, match=r"schema\.properties\.tags cannot be compiled.*uniqueItems"
    ) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)  # type: ignore[call-overload]
    assert caught.value.param == "response_format"


def test_llm(llm: LLM) -> None:
    forms = {
        '1|"one"': StructuredOutputsParams(json={"enum": [1, "one"]}),
        DATE: StructuredOutputsParams(regex=DATE),
        "red|green": StructuredOutputsParams(choice=["red", "green"]),
        r"\d{1,3}( \+ \d{1,3}){1,3}": StructuredOutputsParams(grammar=SUM),
    }
    params = [SamplingParams(max_tokens=60, seed=1, structured_outputs=form) for form in forms.values()]
    outputs = llm.generate(["hello"] * len(params), params)
    chats = llm.chat([MESSAGES] * len(params), params)
    for pattern, *answered in zip(forms, outputs, chats, strict=True):
        for output in answered:
            assert re.fullmatch(pattern, output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
