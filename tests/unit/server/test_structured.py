"""What requests say their answers look like becomes exactly this grammar, or is refused by the field's name."""

from __future__ import annotations

import json
import sys
import tracemalloc

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from phalanx.demo import MODEL_DIR
from phalanx.errors import InvalidRequest
from phalanx.server.fields.json_fields import SCHEMA_BYTES
from phalanx.server.fields.json_schemas import FORMAT_PATTERNS, MAX_DEPTH, MAX_ENUM, bounded
from phalanx.server.fields.openai_bodies import ChatBody, CompletionBody
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.structured import MAX_CHOICES, MAX_GRAMMAR_CHARS, WHITESPACE, parse_answer

BYTES = LLTokenizer("byte")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
SPACED = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
CLOSED = {**PERSON, "additionalProperties": False}


def answer(**fields):
    messages = [{"role": "user", "content": "x"}]
    chat = parse_answer(parse_body(json.dumps({"messages": messages, **fields}).encode(), ChatBody, 100))
    assert parse_answer(parse_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody, 100)) == chat
    return chat


def matches(grammar: dict, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [grammar]}))
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def json_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, **more}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(PERSON)},
        {"response_format": json_schema(PERSON, strict=True, description="a person")},
        {"response_format": json_schema(PERSON, strict=False)},
        {"response_format": {"type": "json_object", "schema": PERSON}},
        {"response_format": {"type": "json_object", "value": PERSON, "schema": None}},
        {"response_format": {"type": "json", "value": PERSON}},
        {"response_format": {"type": "text"}, "guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON), "regex": None, "json_object": False}},
        {"structured_outputs": {"json": PERSON, "disable_fallback": True, "disable_additional_properties": False}},
    ],
)
def test_a_json_schema_by_any_name(fields):
    assert answer(**fields).grammar == {"json_schema": {**CLOSED, "x-guidance": SPACED}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": {}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_any_json_object(fields):
    grammar = answer(**fields).grammar
    assert grammar == {"json_schema": {"type": "object", "x-guidance": SPACED}}
    assert matches(grammar, '{"a": [1, {"b": null}]}') and not matches(grammar, "[1]")


def test_text_is_no_grammar():
    assert answer() is answer(response_format={"type": "text"}) is answer(response_format=None) is None


def test_whitespace_of_json_is_bounded():
    grammar = answer(guided_json=PERSON).grammar
    assert matches(grammar, '{"name": "a", "age": 1}') and matches(grammar, '{"name":"a","age":1}')
    assert matches(grammar, '{\n    "name": "a",\n    "age": 1\n}') and matches(grammar, '{\n\t"name": "a"\n}')
    assert not matches(grammar, '{\n\n"name": "a"}') and not matches(grammar, '{  "name": "a"}')
    assert not matches(grammar, "{\n" + " " * 25 + '"name": "a"}')
    tight = answer(structured_outputs={"json": PERSON, "disable_any_whitespace": True}).grammar
    assert matches(tight, '{"name":"a"}') and not matches(tight, '{"name": "a"}')
    own = answer(structured_outputs={"json": PERSON, "whitespace_pattern": "_"}).grammar
    assert matches(own, '{_"name":_"a"_}') and not matches(own, '{"name": "a"}')


@pytest.mark.parametrize(
    ("expression", "yes", "no"),
    [
        (r"\d{3}-\d{2}", "123-45", "123-456"),
        ("(a|b)", "a", "ab"),
        ("a/b", "a/b", r"a\/b"),
        (r"a\/b", "a/b", r"a\/b"),
        ("a\nb", "a\nb", "anb"),
        (r"\\/", r"\/", "/"),
        ("^a$", "a", "^a$"),
        ("é+", "éé", "e"),
    ],
)
def test_an_expression_matches_the_whole_answer(expression, yes, no):
    for fields in ({"guided_regex": expression}, {"structured_outputs": {"regex": expression}}):
        assert matches(answer(**fields).grammar, yes) and not matches(answer(**fields).grammar, no)


CHOICES = [
    "a",
    'say "hi"',
    "back\\slash",
    "é🙂",
    "two\nlines",
    "\x01\x7f\t",
    "/[a-z]*/",
    "a.b",
    "<|im_end|>",
    "{1,2}",
    "#-~&",
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_one_of_the_texts_whatever_is_in_them(choice):
    for fields in ({"guided_choice": CHOICES}, {"structured_outputs": {"choice": CHOICES}}):
        assert matches(answer(**fields).grammar, choice) and not matches(answer(**fields).grammar, choice + "a")
    assert not matches(answer(guided_choice=["axb"]).grammar, "a.b")


def test_a_grammar_is_lark_or_gbnf():
    lark = answer(guided_grammar='start: "a" WORD\nWORD: /b+/')
    assert not lark.is_gbnf and matches(lark.grammar, "abb")
    gbnf = answer(structured_outputs={"grammar": 'root ::= "a" word\nword ::= "b"+'})
    assert gbnf.is_gbnf and gbnf.param == "structured_outputs" and gbnf.place == "structured_outputs.grammar"
    assert not answer(guided_grammar='start: "::="').is_gbnf


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


REFUSED = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {**json_schema({}), "type": "json_object"}}, "response_format.json_schema"),
    ({"response_format": {**json_schema({}), "type": "text"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.value"),
    ({"response_format": {"type": "json_object", "value": {"a": "x" * SCHEMA_BYTES}}}, "response_format.value"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {**json_schema({}), "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": json_schema([])}, "response_format.json_schema.schema"),
    ({"response_format": json_schema("{}")}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": json_schema({}, frob=1)}, "response_format.json_schema.frob"),
    ({"response_format": json_schema({"a": "x" * SCHEMA_BYTES})}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(nested(MAX_DEPTH + 1))}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"enum": [*range(MAX_ENUM + 1)]})}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({"x-guidance": {}})}, "response_format.json_schema.schema.x-guidance"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a", "json": {}}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
     "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"backend": "xgrammar"}}, "structured_outputs.backend"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"guided_json": 1}, "guided_json"),
    ({"guided_json": "{" * 5000}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_grammar": "a", "guided_regex": "a"}, "guided_grammar"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"guided_decoding_backend": "auto"}, "guided_decoding_backend"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        answer(**fields)
    assert caught.value.param == param
    assert param.rpartition(".")[2].split("[")[0] in caught.value.message
    assert len(caught.value.message) < 300


def test_at_the_caps():
    assert answer(guided_json=nested(MAX_DEPTH - 1)) is not None
    assert answer(guided_json={"enum": [*range(MAX_ENUM)]}) is not None
    assert answer(guided_choice=[f"{i}" for i in range(MAX_CHOICES)]) is not None
    assert answer(guided_regex="a" * MAX_GRAMMAR_CHARS) is not None


def test_a_long_name_around_many_values_takes_little_memory():
    """Each value's place has the name in it; a schema of 120 KB took 300 MB."""
    tracemalloc.start()
    try:
        assert answer(guided_json={"x": {"name" * 15000: {f"{i}": {} for i in range(3000)}}}) is not None
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


INNER = {"type": "object", "properties": {"a": {}}}
SHUT = {**INNER, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (INNER, SHUT),
        ({"type": "array", "items": INNER}, {"type": "array", "items": SHUT}),
        ({"$ref": "#/$defs/A", "$defs": {"A": INNER}}, {"$ref": "#/$defs/A", "$defs": {"A": SHUT}}),
        ({"anyOf": [INNER, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"items": [INNER, True]}, {"items": [SHUT, True]}),
        ({"additionalProperties": INNER}, {"additionalProperties": SHUT}),
        ({"properties": {"properties": INNER}},
         {"properties": {"properties": SHUT}, "additionalProperties": False}),
        ({"enum": [{"properties": {"a": 1}}]}, {"enum": [{"properties": {"a": 1}}]}),
        ({**INNER, "additionalProperties": True}, None),
        ({**INNER, "required": ["b"]}, None),
        ({**INNER, "minProperties": 2}, None),
        ({"type": "object", "properties": {}}, None),
        ({"type": "object"}, None),
        ({"type": "string", "format": "email"}, {"type": "string", "format": "email", "maxLength": 64}),
        ({"format": "time"}, {"format": "time", "maxLength": 24, "allOf": [{"pattern": FORMAT_PATTERNS["time"]}]}),
        ({"format": "date", "allOf": {}}, None),
        ({"$ref": "#/$defs/A", "properties": {"a": {"format": "date", "allOf": [{"minLength": 1}]}}},
         {"$ref": "#/$defs/A", "properties": {"a": {
             "format": "date", "allOf": [{"minLength": 1}, {"pattern": FORMAT_PATTERNS["date"]}]}}}),
        ({"format": "email", "maxLength": 300}, None),
        ({"format": "email", "minLength": 300}, None),
        ({"format": ["time"]}, None),
        ({"allOf": [INNER, {"properties": {"b": {}}}]}, None),
        ({**INNER, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]}, None),
        ({"$defs": {"A": INNER}, "properties": {"b": {}}, "$ref": "#/$defs/A"}, None),
        ({"properties": 1, "required": "a", "items": 3, "allOf": {}, "$defs": []}, None),
    ],
)  # fmt: skip
def test_answers_are_bounded_unless_the_schema_says_otherwise(schema, expected):
    before = json.dumps(schema)
    assert bounded(schema) == (schema if expected is None else expected)
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("form", "text", "valid"),
    [
        ("date", "2024-02-29", True),
        ("date", "2000-02-29", True),
        ("date", "2023-02-28", True),
        ("date", "2023-12-31", True),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2023-04-31", False),
        ("date-time", "2023-12-11T21:51:59.25-23:28", True),
        ("date-time", "2024-02-29t23:59:59z", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2023-12-11T21:51:60-23:28", False),
        ("time", "21:51:59Z", True),
        ("time", "21:51:60-23:28", False),
    ],
)
def test_dates_are_in_the_calendar(form, text, valid):
    schema = {"type": "string", "format": form}
    assert jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(text) == valid
    tokenizer = LLTokenizer(str(MODEL_DIR / "tokenizer.json"))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(bounded(schema))), log_level=0)
    tokens = tokenizer.tokenize_str(json.dumps(text))
    assert not matcher.is_error()
    assert (matcher.validate_tokens(tokens) == len(tokens)) == valid


def test_an_empty_part_of_a_schema_costs_few_calls():
    """16 KiB of them are read on the event loop."""
    n_calls = 0

    def count(frame, event, argument):
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    body = parse_body(json.dumps({"prompt": "x", "guided_json": {"anyOf": [{}] * 1000}}).encode(), CompletionBody, 100)
    sys.setprofile(count)
    try:
        parse_answer(body)
    finally:
        sys.setprofile(None)
    assert n_calls < 1000 * 150
