"""Reasoning is told from content by its marks, also where the prompt opened it or where nothing closes it."""

from __future__ import annotations

import pytest
from answers_of_models import ANSWERS, calls_of, output_formats_of, read, reasoning_of, text_of

from phalanx.server.outputs.formats import REASONING
from phalanx.server.outputs.output_formats import OutputFormats, make_parser
from phalanx.server.outputs.pieces import CallArguments, CallBegin, CallEnd, ReasoningPiece, TextPiece

CALL = '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
MARKED = sorted(set(REASONING) - {"openai"})


@pytest.mark.parametrize("name", MARKED)
def test_every_shape(name: str) -> None:
    shape = REASONING[name]
    answer = f"{shape.open}\nFirst.\n\nSecond.\n{shape.close}\n\nHello.\n"
    expected = [ReasoningPiece("First.\n\nSecond."), TextPiece("Hello.\n")], ""
    formats = OutputFormats(reasoning=shape)
    assert read(formats, answer) == expected
    assert read(formats, *answer) == expected
    opened = answer.removeprefix(shape.open)
    assert read(formats, *opened, in_reasoning=True) == expected
    assert shape.is_open(f"<|im_start|>assistant\n{shape.open}\n")
    assert not shape.is_open(f"{shape.open}\n\n{shape.close}\n\n")


@pytest.mark.parametrize("name", MARKED)
def test_nothing_closes_it(name: str) -> None:
    shape = REASONING[name]
    assert read(OutputFormats(reasoning=shape), "I think <b", in_reasoning=True)[0] == [ReasoningPiece("I think <b")]
    assert read(OutputFormats(reasoning=shape), f"{shape.open}I think{shape.close[:-1]}")[0] == [
        ReasoningPiece(f"I think{shape.close[:-1]}")
    ]


def test_an_answer_without_reasoning() -> None:
    formats = output_formats_of(reasoning="qwen3")
    assert read(formats, "  Hello </b>\n")[0] == [TextPiece("  Hello </b>\n")]
    assert read(formats, "")[0] == []
    assert read(formats, " \n")[0] == [TextPiece(" \n")]
    assert read(formats, "<think>\n\n</think>\n\nHello")[0] == [TextPiece("Hello")]
    assert read(formats, "\n\n</think>\n\nHello", in_reasoning=True)[0] == [TextPiece("Hello")]


def test_reasoning_between_content() -> None:
    pieces, _ = read(output_formats_of(reasoning="deepseek_r1"), "<think>a</think>b<think>c</think> d")
    assert pieces == [ReasoningPiece("a"), TextPiece("b"), ReasoningPiece("\nc"), TextPiece("d")]


def test_a_call_after_reasoning_and_inside_of_it() -> None:
    """A call ends the reasoning that was not closed, as in mlx-lm."""
    formats = output_formats_of("hermes", "qwen3")
    for answer in (f"<think>\nHm.\n</think>\n\n{CALL}", f"<think>\nHm.\n{CALL}"):
        pieces, detail = read(formats, *answer)
        assert pieces == [ReasoningPiece("Hm."), CallBegin("get-time"), CallArguments("{}"), CallEnd(CALL)]
        assert detail == ""


def test_a_bare_call_after_reasoning() -> None:
    pieces, _ = read(
        output_formats_of("llama3_json", "qwen3"),
        'so\n</think>\n\n{"name": "get-time", "parameters": {}}',
        in_reasoning=True,
    )
    assert reasoning_of(pieces) == "so"
    assert calls_of(pieces) == [("get-time", {})]


def test_white_space_between_marks_is_no_content() -> None:
    pieces, _ = read(output_formats_of("hermes"), f"\n\n{CALL}\n{CALL}\n")
    assert text_of(pieces) == ""
    pieces, _ = read(output_formats_of("hermes"), f"Before.\n\n{CALL}\n\nAfter.\n")
    assert text_of(pieces) == "Before.\n\n\n\nAfter.\n"


@pytest.mark.parametrize("name", MARKED)
def test_a_closing_mark_of_reasoning_that_none_opened_is_text(name: str) -> None:
    close = REASONING[name].close
    formats = output_formats_of("hermes", name)
    for answer in (f"Write {close} at its end.", close, f" {close}\n"):
        assert read(formats, *answer) == ([TextPiece(answer)], "")
    block = f"{REASONING[name].open}Hm.{close}"
    pieces, _ = read(formats, *f"{block}Then {close}.")
    assert pieces == [ReasoningPiece("Hm."), TextPiece(f"Then {close}.")]
    pieces, _ = read(formats, *f"Hm.{close}{close}", in_reasoning=True)
    assert pieces == [ReasoningPiece("Hm."), TextPiece(close)]


def test_the_closing_mark_of_reasoning_with_a_call_inside_is_none() -> None:
    pieces, _ = read(output_formats_of("hermes", "qwen3"), *f"<think>Hm.{CALL}</think>Yes.</think>")
    assert calls_of(pieces) == [("get-time", {})] and reasoning_of(pieces) == "Hm."
    assert text_of(pieces) == "Yes.</think>"


@pytest.mark.parametrize("name", MARKED)
def test_under_a_grammar_marks_inside_of_the_answer_are_text(name: str) -> None:
    """Only reasoning before it, which the grammar has, is taken apart."""
    shape = REASONING[name]
    formats = OutputFormats(reasoning=shape, tools=output_formats_of("hermes").tools)
    json = f'{{"a": "{shape.open} {shape.close}", "b": "{CALL}{"".join(shape.dropped)}"}}'
    assert read(formats, *json, is_bound=True) == ([TextPiece(json)], "")
    assert read(formats, *json, is_bound=True, parse_tools=False) == ([TextPiece(json)], "")
    expected = ([ReasoningPiece("Hm."), TextPiece(json)], "")
    assert read(formats, *f"{shape.open}\nHm.{shape.close}\n\n{json}", is_bound=True) == expected
    assert read(formats, *f"\nHm.{shape.close}{json}", is_bound=True, in_reasoning=True) == expected


def test_under_a_grammar_the_answer_may_be_calls() -> None:
    for name in ("hermes", "qwen3_coder", "kimi_k2", "lfm2", "llama3_json"):
        answer = ANSWERS[name][0].removeprefix("I will look.\n").removeprefix("So.\n").removeprefix("Let me see.")
        for before in ("", "<think>\nHm.\n</think>\n\n"):
            pieces, detail = read(output_formats_of(name, "qwen3"), *(before + answer), is_bound=True)
            assert calls_of(pieces) == calls_of(read(output_formats_of(name), answer)[0]) != [] and not detail
    bare = '{"name": "get-time"}'
    assert read(output_formats_of("llama3_json", "qwen3"), *bare, is_bound=True) == ([TextPiece(bare)], "")


def test_harmony_under_a_grammar() -> None:
    json = '{"a": "<|end|> <|channel|>analysis<|message|> <|return|>"}'
    answer = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{json}"
    for ending in ("", "<|return|>", "<|end|>"):
        pieces, _ = read(output_formats_of("openai"), *(answer + ending), is_bound=True)
        assert pieces == [ReasoningPiece("Hm."), TextPiece(json)]


def test_harmony_without_tools() -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    for formats in (output_formats_of("openai"), output_formats_of(reasoning="openai")):
        assert read(formats, *answer, parse_tools=False)[0] == [ReasoningPiece("Hm."), TextPiece("Yes.")]


def test_a_model_without_shapes_needs_no_parser() -> None:
    assert make_parser(OutputFormats(), tools=(), in_reasoning=False, parse_tools=True) is None
    assert make_parser(output_formats_of("hermes"), tools=(), in_reasoning=False, parse_tools=False) is None
