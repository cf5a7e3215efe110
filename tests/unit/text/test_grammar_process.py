"""Grammars of strangers: each is let pass or refused with a reason, whatever it costs, and the next one is tried."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import GrammarRefused
from phalanx.text.grammar_process import GrammarLimits, GrammarTrial

OPTIONAL = {f"p{i}": {"type": "string"} for i in range(4000)}
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
BOMBS = {
    "a multiple of a large number": {"type": "integer", "multipleOf": 9_999_991},
    "patterns that hold together": {"allOf": [{"pattern": f".*[a-c]{{{i}}}x.*"} for i in range(1, 30)]},
    "optional properties": {"type": "object", "properties": OPTIONAL, "additionalProperties": False},
    "one of many objects": {
        "anyOf": [{"properties": {f"p{i}": {}}, "required": [], "type": "object"} for i in range(1000)]
    },
    "a chain of references": {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d4000": {}}},
    "parts of an object": {"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(1000)]},
}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture(scope="module")
def trial() -> GrammarTrial:
    return GrammarTrial(["<think>"], GrammarLimits(seconds=0.3))


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


@pytest.mark.parametrize("schema", BOMBS.values(), ids=BOMBS)
def test_what_costs_too_much_is_refused_and_the_next_one_is_tried(trial, schema):
    with pytest.raises(GrammarRefused, match=r"too complex|too large|max is|limit"):
        trial.check_schema(schema)
    trial.check_schema(PERSON)


@pytest.mark.parametrize("schema", [{}, PERSON, {"$schema": "http://json-schema.org/draft-07/schema#", **PERSON}])
def test_schemas_that_can_be_compiled(trial, schema):
    trial.check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"not": {}}, None, 'Unimplemented keys: ["not"]'),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "properties.a.items", "uniqueItems"),
        ({"properties": {"a": {"type": "string", "format": "regex"}}}, "properties.a", "Unknown format: regex"),
        ({"anyOf": [PERSON, {"type": "text"}]}, "anyOf.1", "Invalid type: text"),
        ({"prefixItems": [{"pattern": "("}]}, "prefixItems.0", "unclosed group"),
        ({"properties": {"a": {"$ref": "#/$defs/B"}}}, "properties.a", "/$defs/B"),
        ({"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"properties": {"b": {"contains": {}}}}}},
         "$defs.A.properties.b", "contains"),
    ],
)  # fmt: skip
def test_a_refused_schema_is_refused_with_reason_and_place(trial, schema, place, reason):
    with pytest.raises(GrammarRefused) as caught:
        trial.check_schema(schema)
    assert caught.value.param == place and reason in caught.value.message and "\n" not in caught.value.message


def test_a_refusal_by_a_failed_assertion_is_one_sentence():
    with pytest.raises(GrammarRefused, match="assertion failed") as caught:
        GrammarTrial([], GrammarLimits(seconds=60)).check_schema({"const": [1, 2] * 33000})
    assert "backtrace" not in caught.value.message and len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: a", "unknown name"),
        ("start: <nothing>", "<nothing>"),
        ("a", "Expected"),
        ("start: /(?=a)/", "look-around"),
        ("start: start", "no text matches it"),
        ("start: /[^\\s\\S]/", "no text matches it"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_with_a_reason(trial, grammar, reason):
    with pytest.raises(GrammarRefused, match=reason):
        trial.check(lark(grammar))


def test_a_grammar_may_name_the_models_special_tokens(trial):
    trial.check(lark('start: <think> "a"'))
    with pytest.raises(GrammarRefused):
        GrammarTrial([]).check(lark('start: <think> "a"'))


def test_gbnf_becomes_lark(trial):
    trial.check(lark(trial.lark('root ::= "a" word | [0-9]+\nword ::= "b"+ # bees')))


@pytest.mark.parametrize(
    "text", ["root ::= x", "x ::= y", 'root ::= "\\', "root ::= " + "(" * 9000, "root ::= )", "::="]
)
def test_what_is_no_gbnf_is_refused_with_a_reason(trial, text):
    with pytest.raises(GrammarRefused, match=r"\w"):
        trial.lark(text)
