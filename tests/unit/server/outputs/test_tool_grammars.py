"""What a grammar of calls lets through is whole calls whose arguments follow the schema.

A model is played by chance: random tokens under the mask of llguidance, until the grammar ends. The tokenizer has a
token for every byte, some longer ones, and tokens for the marks or none.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any, Literal

import jsonschema_rs
import llguidance
import msgspec
import pytest
from answers_of_models import calls_of, finite, output_formats_of, read, reasoning_of, text_of
from support.examples import SOAK

from phalanx.server.outputs.formats import TOOLS
from phalanx.server.outputs.lark import GrammarUnsupported
from phalanx.server.outputs.output_formats import OutputFormats
from phalanx.server.outputs.output_grammars import tool_grammar, with_reasoning
from phalanx.server.outputs.pieces import CallBegin, TextPiece, ToolDefinition

POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "string", "maxLength": 3}},
    "required": ["x"],
    "additionalProperties": False,
}
WEATHER = ToolDefinition(
    name="get_weather",
    parameters={
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f", "null"]},
            "point": {"$ref": "#/$defs/Point"},
            "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "note": {"type": ["string", "null"]},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "share": {"type": "number"},
        },
        "required": ["city", "point"],
        "$defs": {"Point": POINT},
    },
)
BOUND = ToolDefinition(
    name="bound",
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[a-z]{2,4}$"},
            "word": {"type": "string", "minLength": 2, "maxLength": 5},
            "level": {"type": "integer", "enum": [1, 2, 3]},
        },
        "required": ["code", "word", "level"],
        "additionalProperties": False,
    },
)
BARE = ToolDefinition(name="no-arguments")
OFFERED = (WEATHER, BOUND, BARE)

ENOUGH = 1500  # tokens of one answer
ROUNDS = 40 if SOAK else 2


class ByteTokenizer:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, marks: Sequence[str], longer: Sequence[str], *, special: bool) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in longer]
        self.ids = {mark: len(self.tokens) + i for i, mark in enumerate(marks)}
        self.tokens += [mark.encode() for mark in marks]
        self.eos_token_id = len(self.tokens)
        self.tokens.append(b"<eos>")
        self.special_token_ids = [*(self.ids.values() if special else ()), self.eos_token_id]

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


def play(tokenizer: ByteTokenizer, grammar: str, seed: int) -> str | None:
    """A random text of the grammar; None if it did not end. Characters that end things are more likely."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokenizer)), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    chance = random.Random(seed)
    chosen: list[int] = []
    while len(chosen) < ENOUGH:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(tokenizer.tokens)) if mask[i // 8] >> (i % 8) & 1]
        assert allowed, matcher.get_error()
        if tokenizer.eos_token_id in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return b"".join(tokenizer.tokens[token] for token in chosen).decode()
        allowed = [token for token in allowed if token != tokenizer.eos_token_id]
        allowed = [token for token in allowed if 32 <= token < 127 or token >= 256] or allowed
        ends = [i for i in allowed if i >= 256 or tokenizer.tokens[i] in b'"}]<\n)']
        token = chance.choice(ends if ends and chance.random() < 0.3 else allowed)
        assert matcher.consume_token(token), matcher.get_error()
        chosen.append(token)
    return None


Marks = Literal["special", "added", "text"]
"""How a tokenizer has the marks: as special tokens, as tokens like any other, or not at all."""


def formats_with_tokens(name: str, kind: Marks, reasoning: str | None = None) -> tuple[OutputFormats, ByteTokenizer]:
    """The formats of a model, and a tokenizer with the marks, or with long tokens that are the same texts."""
    formats = output_formats_of(name, reasoning)
    assert formats.tools is not None
    texts = formats.tools.format.texts + (formats.reasoning.texts if formats.reasoning else ())
    marks = sorted({text for text in texts if re.fullmatch(r"[<\[][^{]*[>\]]", text)})
    if name == "kimi_k3":
        marks = ["<|open|>", "<|close|>", "<|sep|>"]
    if name == "deepseek_v3":
        marks.append("<｜tool▁sep｜>")
    ends = [text for text in texts if text and "{" not in text]
    longer = ['"}', '": "', "</", ">\n", *(ends if kind == "text" else [])]
    tokenizer = ByteTokenizer([] if kind == "text" else marks, longer, special=kind == "special")
    return msgspec.structs.replace(formats, added_tokens=tokenizer.ids), tokenizer


def assert_follows(name: str, arguments: Any) -> None:
    schema = next(tool.parameters for tool in OFFERED if tool.name == name) or {"type": "object"}
    errors = [str(error) for error in jsonschema_rs.validator_for(schema).iter_errors(arguments)]
    assert not errors, (arguments, errors)


@pytest.mark.grows
@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("name", sorted(TOOLS))
def test_calls_cannot_be_malformed(name: str, kind: Marks) -> None:
    formats, tokenizer = formats_with_tokens(name, kind)
    ended = 0
    for parallel in (False, True):
        grammar = with_reasoning(
            tool_grammar(formats, OFFERED, parallel=parallel), formats, in_reasoning=False, is_calls=True
        )
        for seed in range(ROUNDS):
            answer = play(tokenizer, grammar, seed)
            if answer is None:
                continue
            ended += 1
            pieces, detail = read(formats, answer, tools=OFFERED)
            assert not detail, answer
            assert text_of(pieces) == ""
            calls = calls_of(pieces)
            assert calls and (parallel or len(calls) == 1), answer
            for called, arguments in calls:
                assert_follows(called, arguments)
    assert ended >= ROUNDS / 2


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "openai"])
@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_calls_after_reasoning(name: str, kind: Marks, in_reasoning: bool) -> None:
    if name == "openai":
        in_reasoning = False  # its templates open no message
    reasoning = "openai" if name == "openai" else "qwen3"
    formats, tokenizer = formats_with_tokens(name, kind, reasoning)
    grammar = with_reasoning(
        tool_grammar(formats, (BOUND,), parallel=False), formats, in_reasoning=in_reasoning, is_calls=True
    )
    reasoned = 0
    for seed in range(12):
        if (answer := play(tokenizer, grammar, seed)) is None:
            continue
        pieces, detail = read(formats, answer, tools=OFFERED, in_reasoning=in_reasoning)
        assert not detail and text_of(pieces) == "", answer
        assert [type(piece) for piece in pieces].count(CallBegin) == 1
        reasoned += bool(reasoning_of(pieces))
    assert reasoned


ANSWERS: list[dict[str, Any]] = [
    {"json_schema": {**POINT, "x-guidance": {"whitespace_flexible": False}}},
    {"lark_grammar": 'start: "yes" | "no"'},
]


@pytest.mark.parametrize("answer", ANSWERS, ids=["schema", "choice"])
@pytest.mark.parametrize("name", ["hermes", "openai"])
@pytest.mark.parametrize("kind", ["special", "added", "text"])
def test_an_answer_of_its_own_grammar_after_reasoning(name: str, answer: dict[str, Any], kind: Marks) -> None:
    reasoning = "openai" if name == "openai" else "qwen3"
    formats, tokenizer = formats_with_tokens(name, kind, reasoning)
    formats = formats.without_tools()
    for in_reasoning in (False, True) if name != "openai" else (False,):
        grammar = with_reasoning(answer, formats, in_reasoning=in_reasoning)
        for seed in range(5):
            if (text := play(tokenizer, grammar, seed)) is None:
                continue
            pieces, _ = read(formats, text, in_reasoning=in_reasoning, parse_tools=False, is_bound=True)
            content = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
            if "json_schema" in answer:
                assert not list(jsonschema_rs.validator_for(POINT).iter_errors(json.loads(content, parse_float=finite)))
            else:
                assert content in ("yes", "no")


def test_without_reasoning_the_grammar_is_the_answer() -> None:
    assert json.loads(with_reasoning(ANSWERS[1], OutputFormats(), in_reasoning=False)) == {"grammars": [ANSWERS[1]]}


def unsupported(name: str, properties: dict[str, Any], **more: Any) -> str:
    tool = ToolDefinition(name="f", parameters={"type": "object", "properties": properties, **more})
    with pytest.raises(GrammarUnsupported) as refused:
        tool_grammar(output_formats_of(name), (tool,), parallel=False)
    return str(refused.value)


def test_what_a_format_cannot_write_is_said() -> None:
    assert "parameter 'a-b' is not a name" in unsupported("lfm2", {"a-b": {}})
    assert "parameter 'a.b' cannot be written" in unsupported("gemma4", {"a.b": {}})
    assert "the name 'a b' cannot be written" in unsupported("qwen3_coder", {"a b": {}})
    assert "cannot be bound to 'anyOf'" in unsupported("glm47", {}, anyOf=[{"required": ["a"]}])
    assert "no value of 'a' can be written" in unsupported("qwen3_coder", {"a": {"enum": ["null"]}})
    with pytest.raises(ValueError, match="needs tools"):
        tool_grammar(OutputFormats(), OFFERED, parallel=False)
    with pytest.raises(ValueError, match="needs tools"):
        tool_grammar(output_formats_of("hermes"), (), parallel=False)


def test_names_and_values_in_any_script() -> None:
    """Names, enums and descriptions are the client's texts; quotes, slashes and newlines are no grammar."""
    nasty = ["😀 é", 'say "hi"', "a/b\\c", "line\nbreak", "//x", "%json", "</p>", "<[1]>"]
    parameters = {"type": "object", "properties": {"v": {"type": "string", "enum": nasty}}, "required": ["v"]}
    tools = (ToolDefinition(name="größe", parameters=parameters),)
    for name in ("hermes", "qwen3_coder", "lfm2", "gemma4"):
        for kind in ("special", "text"):
            formats, tokenizer = formats_with_tokens(name, kind)
            grammar = with_reasoning(tool_grammar(formats, tools, parallel=False), formats, in_reasoning=False)
            seen = set()
            for seed in range(12):
                answer = play(tokenizer, grammar, seed)
                assert answer is not None
                ((called, arguments),) = calls_of(read(formats, answer, tools=tools)[0])
                assert called == "größe"
                seen.add(arguments["v"])
            assert len(seen) > 2
            assert seen <= set(nasty)


def test_free_objects_and_undeclared_parameters() -> None:
    """A schema that names no members leaves them free; one that requires a member without describing it takes any."""
    free = ToolDefinition(name="free", parameters={"type": "object"})
    odd = ToolDefinition(name="odd", parameters={"type": "object", "properties": {}, "required": ["it"]})
    for name in ("hermes", "qwen3_coder", "glm47"):
        formats, tokenizer = formats_with_tokens(name, "special")
        answers = []
        for tool in (free, odd):
            grammar = with_reasoning(tool_grammar(formats, (tool,), parallel=False), formats, in_reasoning=False)
            played = [answer for seed in range(6) if (answer := play(tokenizer, grammar, seed))]
            answers.append([calls_of(read(formats, answer, tools=(tool,))[0])[0][1] for answer in played])
        assert answers[1] and all("it" in arguments for arguments in answers[1])
        assert answers[0]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "lfm2"])
def test_objects_inside_arguments_have_no_members_beyond_their_schema(name: str) -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
    tool = ToolDefinition(name="move", parameters={"properties": {"to": point}, "required": ["to"]})
    formats, tokenizer = formats_with_tokens(name, "special")
    grammar = with_reasoning(tool_grammar(formats, (tool,), parallel=False), formats, in_reasoning=False)
    played = [answer for seed in range(6) if (answer := play(tokenizer, grammar, seed))]
    arguments = [calls_of(read(formats, answer, tools=(tool,))[0])[0][1] for answer in played]
    assert arguments and all(value.keys() == {"to"} and value["to"].keys() == {"x"} for value in arguments)
