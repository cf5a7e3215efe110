"""Numbers of schemas are compiled exactly, or refused with their place, in every dialect and every field.

llguidance reads numbers as floats of 64 bits, computes with bounds of integers of 64 bits, and ends by a signal at the
least of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.conversations import run
from support.scripted_model import tokenizer_of

from phalanx.errors import GrammarRefused, InvalidRequest
from phalanx.server.fields.openai_bodies import CompletionBody
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.structured import parse_answer
from phalanx.text.grammar_process import GrammarTrial
from phalanx.text.tokenizer import Tokenizer

BYTES = LLTokenizer("byte")
AROUND = (2**53, 2**60, 2**62, 2**63, 2**64, 10**15, 10**18, 10**19, 10**30, 9007199254740993000, 2**63 - 1024)
WHOLE = sorted({sign * (n + more) for n in AROUND for more in (-1, 0, 1, 2) for sign in (1, -1)})
FLOATS = [float(n) for n in WHOLE] + [1e300, -1e300, 1.7976931348623157e308, 0.1 + 0.2, 1e-7, 99.99, -0.5, 1e-310]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
TYPES: list[dict[str, Any]] = [{"type": "integer"}, {"type": "number"}, {}]


@pytest.fixture(scope="module")
def trial() -> GrammarTrial:
    return GrammarTrial([])


def schemas() -> Iterator[tuple[dict[str, Any], float]]:
    for number in (*WHOLE, *FLOATS):
        for kind in TYPES:
            yield {**kind, "const": number}, number
            yield {**kind, "enum": [number]}, number
            yield {"allOf": [kind, {"const": number}]}, number
            yield from (({**kind, bound: number}, number) for bound in BOUNDS)
            yield {**kind, "minimum": number, "exclusiveMinimum": True}, number
            yield {**kind, "minimum": number, "maximum": number}, number


def allows(schema: dict[str, Any], value: int) -> bool:
    part = {**schema, **next((p for p in schema.get("allOf", ()) if "const" in p), {})}
    low = part.get("exclusiveMinimum")
    return (
        value == part.get("const", value)
        and value in part.get("enum", [value])
        and part.get("minimum", value) <= value <= part.get("maximum", value)
        and (value != part.get("minimum") if low is True else low is None or low < value)
        and value < part.get("exclusiveMaximum", value + 1)
    )


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_a_number_is_exact_or_refused_with_its_place(trial):
    compiled = 0
    for schema, number in schemas():
        body = parse_body(json.dumps({"prompt": "x", "guided_json": schema}).encode(), CompletionBody, 100)
        try:
            answer = parse_answer(body)
        except InvalidRequest as error:
            assert error.param == "guided_json" and error.message.startswith("guided_json."), (schema, error)
            continue
        assert answer is not None
        grammar = json.dumps({"grammars": [answer.grammar]})
        try:
            trial.check(grammar)
        except GrammarRefused as error:
            assert "its process ended" not in error.message, (schema, error)
            continue
        compiled += 1
        for value in {int(number) + more for more in (-1025, -1, 0, 1, 1025)} - {0}:
            assert matches(grammar, str(value)) == allows(schema, value), (schema, value)
    assert compiled > 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**53 - 1), "maximum": 2**53 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"const": 2**60},
        {"enum": [10**18, 2**53 + 2, 1.5, 3.141592653589793]},
        {"type": "number", "minimum": 0.0, "maximum": 100.0, "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 1000},
        {"allOf": [{"multipleOf": 100}, {"multipleOf": 0.01}, {"multipleOf": 100}, {"multipleOf": 250}]},
        {"prefixItems": [{"type": "number", "multipleOf": 100000}, {"type": "number", "multipleOf": 0.0001}]},
        {"type": "integer", "default": 2**53 + 1, "examples": [2**64 + 1, 1e300], "title": "1e300"},
        {
            "properties": {
                "const": {"type": "string"},
                "minimum": {"default": 2**63},
                "enum": {"enum": [True, None, "a"]},
            }
        },
        {"type": "string", "minLength": 3, "maxLength": 1 << 20},
    ],
)
def test_what_is_exact_passes(schema, trial):
    answer = parse_answer(CompletionBody(prompt="x", guided_json=schema))
    assert answer is not None
    trial.check(json.dumps({"grammars": [answer.grammar]}))


BIG = 2**53 + 1
HIDDEN = [
    ({"properties": {"a": {"enum": ["x", {"y": [1, BIG]}]}}}, f"properties.a.enum.1.y.1 is {BIG}"),
    ({"items": {"anyOf": [{}, {"maximum": BIG}]}}, f"items.anyOf.1.maximum is {BIG}"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"const": BIG}}}, f"$defs.A.const is {BIG}"),
    ({"$ref": "#/$defs/a/b~1c", "$defs": {"a": {"b/c": {"const": BIG}}}}, f"$defs.a.b/c.const is {BIG}"),
    ({"$ref": "#/allOf/0/items/0", "allOf": [{"items": [{"minimum": BIG}]}]}, f"allOf.0.items.0.minimum is {BIG}"),
    ({"const": 10**400}, "const is a huge number"),
    ({"type": "integer", "minimum": -1e30, "maximum": -1e29}, "minimum is -1e+30"),
    (
        {"type": "integer", "multipleOf": BIG},
        f"multipleOf is {BIG}, which cannot be compiled exactly; one up to 429496729",
    ),
    ({"type": "integer", "multipleOf": 2**32 - 1}, "multipleOf is 4294967295"),
    ({"type": "number", "multipleOf": 42949672.95}, "multipleOf is 42949672.95"),
    ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65536}]}, "allOf.0.multipleOf is 65537"),
    (
        {
            "items": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
            "$defs": {"a": {"multipleOf": 65536}, "b": {"multipleOf": 65537}},
        },
        "$defs.a.multipleOf is 65536",
    ),
    ({"multipleOf": 3, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 1e-9}}}, "$defs.a.multipleOf is 1e-09"),
]


@pytest.mark.parametrize(("schema", "said"), HIDDEN, ids=lambda value: str(value)[:40])
def test_a_number_is_found_wherever_it_is_compiled(schema, said):
    with pytest.raises(InvalidRequest) as caught:
        parse_answer(CompletionBody(prompt="x", structured_outputs=None, guided_json=schema))
    assert caught.value.message.startswith(f"guided_json.{said}") and caught.value.param == "guided_json"
    grammar = f"start: a\na: %json {json.dumps(schema)}"
    with pytest.raises(InvalidRequest) as caught:
        parse_answer(CompletionBody(prompt="x", guided_grammar=grammar))
    assert caught.value.message.startswith(f"guided_grammar.%json.{said}") and caught.value.param == "guided_grammar"


@pytest.mark.parametrize("depth", [150, 800, 3000])
def test_a_deep_schema_in_a_grammar_is_refused(depth, trial):
    """By its depth, or where that is too much to look at, by the compiler."""
    text = 'start: %json {"const": ' + "[" * depth + "1" + "]" * depth + "}"
    with pytest.raises((InvalidRequest, GrammarRefused), match=r"nested too deeply|recursion limit"):
        answer = parse_answer(CompletionBody(prompt="x", guided_grammar=text))
        assert answer is not None
        trial.check(json.dumps({"grammars": [answer.grammar]}))


def test_references_in_circles_and_to_nowhere_end():
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/b"}, "c": {"$ref": "#/x/9/1"}}}
    assert parse_answer(CompletionBody(prompt="x", guided_json=schema)) is not None


# Every dialect -----------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"id": {"const": BIG}}, "required": ["id"]}
USER = {"role": "user", "content": "x"}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
CLAUDES = {"name": "f", "input_schema": SCHEMA}
NAMED = {"type": "json_schema", "schema": SCHEMA}
OF_ANSWERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "response_format.json_schema.schema": [
        (path, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}})
        for path in (CHAT, TEXT)
    ],
    "response_format.schema": [(CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}})],
    "response_format.value": [(TEXT, {"response_format": {"type": "json_object", "value": SCHEMA}})],
    "structured_outputs.json": [(CHAT, {"structured_outputs": {"json": json.dumps(SCHEMA)}})],
    "structured_outputs.grammar.%json": [
        (CHAT, {"structured_outputs": {"grammar": f"start: %json {json.dumps(SCHEMA)}"}})
    ],
    "guided_json": [(CHAT, {"guided_json": SCHEMA}), (TEXT, {"guided_json": json.dumps(SCHEMA)})],
    "output_format.schema": [(MESSAGES, {"output_format": NAMED})],
    "output_config.format.schema": [(MESSAGES, {"output_config": {"format": NAMED}})],
    "text.format.schema": [(RESPONSES, {"text": {"format": {"name": "n", **NAMED}}})],
    "format": [("/api/chat", {"format": SCHEMA}), ("/api/generate", {"format": SCHEMA})],
}
OF_CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tools[0].function.parameters": [
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (CHAT, {"tools": [TOOL], "response_format": {"type": "json_object"}}),
        ("/api/chat", {"tools": [TOOL], "format": "json"}),
    ],
    "tools[0].input_schema": [(MESSAGES, {"tools": [CLAUDES], "tool_choice": {"type": "any"}})],
    "tools[0].parameters": [(RESPONSES, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"})],
}
FREE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [TOOL]}),
    (MESSAGES, {"tools": [CLAUDES]}),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION}]}),
    ("/api/chat", {"tools": [TOOL]}),
]


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    asked = {"prompt": "x"} if path in (TEXT, "/api/generate") else {"messages": [USER]}
    asked = {"input": "x"} if path == RESPONSES else asked
    return {"model": "tiny", **asked, **({"max_tokens": 5} if path == MESSAGES else {}), **fields}


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(request.param, tmp_path_factory.mktemp(request.param))


def test_every_field_of_every_dialect_names_the_place(tokenizer):
    async def scenario(client, engine):
        for place, asked in (*OF_ANSWERS.items(), *OF_CALLS.items()):
            for path, fields in asked:
                response = await client.post(path, json=body_of(path, fields))
                said = f"{place}.properties.id.const is {BIG}"
                assert response.status_code == 400 and said in response.text, (path, fields, response.text)
        assert not engine.received

    run(tokenizer, [], scenario)


def test_calls_that_are_free_obey_no_grammar(tokenizer):
    async def scenario(client, engine):
        for path, fields in FREE:
            response = await client.post(path, json=body_of(path, fields))
            assert response.status_code == 200, (path, response.text)

    run(tokenizer, ["Fine.<|im_end|>"] * len(FREE), scenario)
