"""The machines' work grows with the text and with nothing else: what is held back and calls per character are bounded.

Work is counted, not timed: characters that stay in the reader's buffer are those that would be looked at again.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from answers_of_models import ANSWERS, TOOLS, calls_of, output_formats_of

from phalanx.server.outputs.output_formats import make_parser
from phalanx.server.outputs.pieces import CallArguments, Piece, TextPiece, ToolDefinition
from phalanx.server.outputs.reader import Reader
from phalanx.server.outputs.values import convert_guessed, to_json, types_of

LONG = 3_000
HELD = 400  # characters: marks and headers are shorter

TEXTS: dict[str, str] = {
    "nothing": "x" * LONG,
    "space": " \n" * (LONG // 2),
    "half a mark": "<tool_" * (LONG // 6),
    "brackets": "<" * LONG,
    "lists": "[" * LONG,
    "quotes": "\"'" * (LONG // 2),
}
OPENINGS: dict[str, list[str]] = {
    "hermes": ["", "<tool_call>", '<tool_call>{"name": "get_weather", "arguments": {"city": "', '<tool_call>{"a": '],
    "llama3_json": ["", '{"name": "'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]get-time[ARGS]"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    "qwen3_coder": ["<tool_call>", "<tool_call><function=", "<tool_call><function=get_weather><parameter=city>"],
    "glm47": [
        "<tool_call>",
        "<tool_call>get_weather<arg_key>",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>",
    ],
    "lfm2": ["<|tool_call_start|>[", "<|tool_call_start|>[get_weather(city=", "<|tool_call_start|>[get_weather(city='"],
    "gemma4": ["<|tool_call>", "<|tool_call>call:get_weather{"],
    "openai": ["<|channel|>", "<|channel|>final<|message|>", "<|channel|>commentary to=functions.get-time<|message|>"],
}
CASES = [(name, opening, kind) for name, openings in OPENINGS.items() for opening in openings for kind in TEXTS]


class Counter:
    """Counts calls of functions, those of C included, while it is entered."""

    def __enter__(self) -> Counter:
        self.n = 0
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: Any, event: str, argument: Any) -> None:
        self.n += event in ("call", "c_call")


@pytest.mark.parametrize(("name", "opening", "kind"), CASES)
def test_little_is_held_back(name: str, opening: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, the text that waits in the reader is short."""
    held = 0
    feed = Reader.feed

    def watched(self: Reader, text: str) -> None:
        nonlocal held
        held = max(held, len(self._text) - self._at)
        feed(self, text)

    monkeypatch.setattr(Reader, "feed", watched)
    formats = output_formats_of(name, None if name == "openai" else "qwen3")
    parser = make_parser(formats, tools=TOOLS, in_reasoning=False, parse_tools=True)
    assert parser is not None
    text = opening + TEXTS[kind]
    for at in range(0, len(text), 7):
        parser.add(text[at : at + 7])
    assert held <= HELD
    parser.finish()


@pytest.mark.parametrize("name", sorted(OPENINGS))
def test_work_is_linear(name: str) -> None:
    """Twice the text takes at most twice the calls, for the worst of the openings and texts."""
    for opening in OPENINGS[name]:
        for text in TEXTS.values():
            assert _calls(name, opening + text[:1200]) <= 2.2 * _calls(name, opening + text[:600]) + 200


def _calls(name: str, text: str) -> int:
    parser = make_parser(output_formats_of(name), tools=TOOLS, in_reasoning=False, parse_tools=True)
    assert parser is not None
    pieces: list[Piece] = []
    with Counter() as counter:
        for at in range(0, len(text), 4):
            pieces += parser.add(text[at : at + 4])
        pieces += parser.finish()
    calls_of(pieces)
    return counter.n


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_many_calls(name: str) -> None:
    answer = ANSWERS[name][0]
    one, ten = _calls(name, answer * 4), _calls(name, answer * 40)
    assert ten <= 11 * one


def test_a_megabyte_of_arguments_is_sent_on() -> None:
    content = "line\n" * 200_000
    parser = make_parser(output_formats_of("qwen3_coder"), tools=TOOLS, in_reasoning=False, parse_tools=True)
    assert parser is not None
    pieces = parser.add("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    for at in range(0, len(content), 4096):
        pieces += parser.add(content[at : at + 4096])
    assert sum(len(piece.text) for piece in pieces if isinstance(piece, CallArguments)) > 0.99 * len(content)
    pieces += parser.add("\n</parameter>\n</function>\n</tool_call>") + parser.finish()
    assert calls_of(pieces) == [("get_weather", {"city": content})]


@pytest.mark.parametrize("depth", [100, 5000, 100_000])
def test_deep_nesting(depth: int) -> None:
    """What is nested deeper than clients can read is no call; nothing overflows."""
    deep = "[" * depth + "]" * depth
    for name, opening, closing in (
        ("hermes", '<tool_call>{"name": "get-time", "arguments": {"a": ', "}}</tool_call>"),
        ("glm47", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>", "</arg_value></tool_call>"),
        ("lfm2", "<|tool_call_start|>[get-time(a=", ")]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:get-time{a:", "}<tool_call|>"),
    ):
        parser = make_parser(output_formats_of(name), tools=TOOLS, in_reasoning=False, parse_tools=True)
        assert parser is not None
        pieces = parser.add(opening + deep + closing) + parser.finish()
        calls = calls_of(pieces)
        assert calls or any(isinstance(piece, TextPiece) for piece in pieces)
        assert depth > 100 or name == "lfm2" or calls


def test_schemas_that_lead_to_themselves() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/a"}] * 50}
    root = {"$defs": {"a": loop, "b": {"$ref": "#/$defs/b"}, "c": {"$ref": "#/$defs/missing/x"}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == frozenset()
    assert types_of({"$ref": "#/$defs/b"}, root) == frozenset()
    assert types_of({"$ref": "#/$defs/c"}, root) == frozenset()
    tool = ToolDefinition(name="f", parameters={"properties": {"p": loop}, **root})
    parser = make_parser(output_formats_of("qwen3_coder"), tools=(tool,), in_reasoning=False, parse_tools=True)
    assert parser is not None
    pieces = parser.add("<tool_call><function=f><parameter=p>\nx\n</parameter></function></tool_call>")
    assert calls_of(pieces) == [("f", {"p": "x"})]


EXPLODING = ["-" * 50_000 + "1", "1+" * 50_000 + "1", "a." * 50_000, "1if 1else " * 20_000, "9" * 5000]


@pytest.mark.parametrize("text", EXPLODING, ids=["signs", "sums", "names", "choices", "digits"])
def test_python_that_explodes_is_a_string(text: str, recwarn: pytest.WarningsRecorder) -> None:
    assert convert_guessed(text) in (to_json(text), text)
    assert not recwarn.list


def test_longer_python_is_not_read() -> None:
    assert convert_guessed("[" + "'a', " * 1000 + "]") == to_json(["a"] * 1000)
    long = "[" + "'a', " * 100_000 + "]"
    assert convert_guessed(long) == to_json(long)


@pytest.mark.parametrize("mark", ["</parameter> ", "<function=", "</function>"])
def test_an_answer_that_comes_at_once_is_not_copied_at_every_mark(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that moved comes so: its next server reads all that was written."""
    copied: list[bool] = []
    give_back = Reader.give_back

    def watched(self: Reader, text: str) -> None:
        before = self._text
        give_back(self, text)
        copied.append(self._text is not before)

    monkeypatch.setattr(Reader, "give_back", watched)
    parser = make_parser(output_formats_of("qwen3_coder", None), tools=TOOLS, in_reasoning=False, parse_tools=True)
    assert parser is not None
    parser.add(OPENINGS["qwen3_coder"][-1] + mark * 100)
    assert len(copied) >= 99 and not any(copied)
