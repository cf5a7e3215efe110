"""Calls that are not whole, no JSON, or of a tool that was not offered come out as text, with a detail."""

from __future__ import annotations

import pytest
from answers_of_models import CASES, IDS, TOOLS, calls_of, output_formats_of, read, shown_json, text_of

from phalanx.server.outputs.formats import TOOLS as FORMATS
from phalanx.server.outputs.json_scanner import is_json
from phalanx.server.outputs.pieces import CallArguments, CallBegin, CallBroken, CallEnd, TextPiece


@pytest.mark.parametrize(("name", "answer"), CASES, ids=IDS)
def test_an_answer_that_ends_early(name: str, answer: str) -> None:
    """Of every beginning of an answer, the calls are calls of the whole answer, and no mark is content."""
    formats = output_formats_of(name)
    whole = calls_of(read(formats, answer)[0])
    for i in range(len(answer)):
        pieces, detail = read(formats, answer[:i])
        calls = calls_of(pieces)
        assert calls == whole[: len(calls)], answer[:i]
        assert not [mark for mark in FORMATS[name].marks if mark in text_of(pieces)], answer[:i]
        if any(isinstance(piece, CallBroken) for piece in pieces):
            assert detail, answer[:i]


def test_a_call_that_breaks_after_fragments_were_sent() -> None:
    answer = 'Look: <tool_call>\n{"name": "get_weather", "arguments": {"city": "Os", oops}}\n</tool_call> sorry'
    pieces, detail = read(output_formats_of("hermes"), answer)
    assert pieces == [
        TextPiece("Look: "),
        CallBegin("get_weather"),
        CallArguments('{"city": "Os", '),
        CallBroken(),
        TextPiece('\n{"name": "get_weather", "arguments": {"city": "Os", oops}}\n sorry'),
    ]
    assert detail == "The call of 'get_weather' is not whole: its arguments are not JSON."


def test_a_call_after_a_broken_one_is_a_call() -> None:
    answer = (
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'
        '<tool_call>{"name": "get-time", "arguments": {}}</tool_call>'
    )
    pieces, detail = read(output_formats_of("hermes"), answer)
    assert calls_of(pieces) == [("get-time", {})]
    assert "not a JSON object" in detail


NOT_OFFERED = {
    "hermes": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "kimi_k2": "<|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "qwen3_coder": "<tool_call><function=rm></function></tool_call>",
    "glm47": "<tool_call>rm</tool_call>",
    "lfm2": "<|tool_call_start|>[rm()]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:rm{}<tool_call|>",
    "openai": "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
}


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_a_tool_that_was_not_offered(name: str) -> None:
    pieces, detail = read(output_formats_of(name), *NOT_OFFERED[name])
    assert [type(piece) for piece in pieces] == [TextPiece]
    assert "rm" in text_of(pieces)
    assert detail == "The model called 'rm', a tool that the request does not offer."


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", '<tool_call>{"name": "get-time", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get-time", "arguments": {}, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get-time", "arguments": {},}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get-time", "arguments": "[]"}</tool_call>'),
        ("hermes", "<tool_call>get-time</tool_call>"),
        ("hermes", "<tool_call></tool_call>x"),
        ("mistral", "[TOOL_CALLS]what next?"),
        ("mistral", "[TOOL_CALLS]" + "x" * 1000),
        ("kimi_k2", "<|tool_call_begin|>get-time<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.get-time:0<|tool_call_argument_begin|>x<|tool_call_end|>"),
        ("qwen3_coder", "<tool_call>\n<function=get-time>\nhello</function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=get-time>\n<parameter=a b c"),
        ("qwen3_coder", "<tool_call>hello</tool_call>"),
        ("glm47", "<tool_call>get-time a=1</tool_call>"),
        ("lfm2", "<|tool_call_start|>[get-time(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get-time(a=b())]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>get-time()<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[get-time(a=" + "[" * 5000 + ")]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:get-time{a}<tool_call|>"),
        ("gemma4", "<|tool_call>call:get-time{}, and<tool_call|>"),
        ("openai", "<|channel|>commentary to=functions.get-time<|message|>[]<|call|>"),
    ],
)
def test_what_is_no_call(name: str, answer: str) -> None:
    pieces, detail = read(output_formats_of(name), answer)
    assert calls_of(pieces) == []
    assert detail
    assert not any(mark in text_of(pieces) for mark in FORMATS[name].marks)
    assert any(isinstance(piece, TextPiece) for piece in pieces) or answer.endswith("</tool_call>x")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", '{"name": "get_weather"}'),
        ("llama3_json", ' \n{"answer": [1, 2], "name": "get_weather"} and so on'),
        ("llama3_json", "{"),
        ("llama3_json", "{ this is set notation }"),
        ("llama4_pythonic", "[1, 2, 3]"),
        ("llama4_pythonic", "[a link](https://example.org) and more"),
        ("llama4_pythonic", "[" + "x" * 1000),
        ("hermes", "Use a < b and <tool_ or <tool_calls>."),
        ("openai", "No channel at all."),
    ],
)
def test_answers_that_only_look_like_calls(name: str, answer: str) -> None:
    assert read(output_formats_of(name), *answer) == ([TextPiece(answer)], "")


ENDINGS = ["}", "}}", "]", " }\n", "}\n]"]
"""What models write after the JSON of a call, which was whole."""
WITH_RUBBISH = {
    "hermes": '<tool_call>\n{"name": "get-time", "arguments": {}}@@\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "get-time", "parameters": {}}@@',
    "llama4_json": '<|python_start|>{"name": "get-time", "parameters": {}}@@<|python_end|>',
    "mistral": "[TOOL_CALLS]get-time[ARGS]{}@@",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get-time:0<|tool_call_argument_begin|>{}@@"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n{}@@\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get-time<｜tool▁sep｜>{}@@<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "openai": "<|channel|>commentary to=functions.get-time<|message|>{}@@<|call|>",
    "lfm2": "<|tool_call_start|>[get-time()]@@<|tool_call_end|>",
    "gemma4": "<|tool_call>call:get-time{}@@<tool_call|>",
}


@pytest.mark.parametrize("rubbish", ENDINGS)
@pytest.mark.parametrize("name", WITH_RUBBISH)
def test_a_bracket_too_many_ends_no_call(name: str, rubbish: str) -> None:
    answer = WITH_RUBBISH[name].replace("@@", rubbish)
    pieces, detail = read(output_formats_of(name), *(answer * 2))
    assert calls_of(pieces) == [("get-time", {})] * 2
    assert (text_of(pieces), detail) == ("", "")


@pytest.mark.parametrize("name", sorted(set(WITH_RUBBISH) - {"gemma4"}))
def test_text_after_whole_json_is_content(name: str) -> None:
    """The call is one all the same. (Gemma's has no JSON: what cannot be read is none.)"""
    answer = WITH_RUBBISH[name].replace("@@", " and\nmore ")
    pieces, detail = read(output_formats_of(name), *answer)
    assert calls_of(pieces) == [("get-time", {})] and not detail
    assert text_of(pieces).replace("```", "").split() == ["and", "more"]


def test_a_bracket_too_many_inside_of_a_list() -> None:
    calls = '{"name": "get-time", "arguments": {}}}, {"name": "get_weather", "arguments": {"days": 1}}'
    pieces, detail = read(output_formats_of("mistral"), *f"[TOOL_CALLS][{calls}}}]")
    assert calls_of(pieces) == [("get-time", {}), ("get_weather", {"days": 1})] and not detail
    pieces, detail = read(output_formats_of("mistral"), *f"[TOOL_CALLS][{calls} or so")
    assert calls_of(pieces) == [("get-time", {}), ("get_weather", {"days": 1})] and "not JSON" in detail
    pieces, _ = read(
        output_formats_of("lfm2"), *"<|tool_call_start|>[get-time()), get_weather(days=1))]<|tool_call_end|>"
    )
    assert calls_of(pieces) == [("get-time", {}), ("get_weather", {"days": 1})]


VOID = [
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"days": 1} oops}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"days": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"days": 1}'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"place": {}}, "arguments": {}}</tool_call>'),
    ("llama3_json", '{"name": "get_weather", "parameters": {"days": 1}, and so on'),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"days": 1}'),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>1</parameter></tool_call>"),
    ("qwen3_coder", "<tool_call><function=get_weather></tool_call>"),
    ("glm47", "<tool_call>get_weather<arg_key>place</arg_key><arg_value>{}</arg_value>, please"),
    ("lfm2", "<|tool_call_start|>[get_weather(place={}) and so on"),
    ("lfm2", "<|tool_call_start|>[get-time()"),
]


@pytest.mark.parametrize(("name", "answer"), VOID)
def test_what_was_shown_of_a_call_that_is_none_is_no_json(name: str, answer: str) -> None:
    """Clients of streams run a call whose arguments are whole, or empty, whatever comes after them."""
    pieces, detail = read(output_formats_of(name), *answer)
    assert calls_of(pieces) == [] and detail
    assert all(shown and not is_json(shown) for shown in shown_json(pieces))


def test_calls_without_arguments() -> None:
    """Kimi K2 and gpt-oss write nothing at all; others an empty text, or null."""
    head = "<|tool_call_begin|>functions.get-time:0<|tool_call_argument_begin|>"
    for answer in (f"{head}<|tool_call_end|>", f"<|tool_calls_section_begin|>{head} \n<|tool_call_end|>{head}{{}}"):
        pieces, detail = read(output_formats_of("kimi_k2"), *answer)
        assert calls_of(pieces) == [("get-time", {})] * answer.count(head) and not detail
    assert calls_of(read(output_formats_of("kimi_k2"), *head)[0]) == []  # it ended there, before they came
    code = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n\n```<｜tool▁call▁end｜>"
    assert calls_of(read(output_formats_of("deepseek_v3"), *code)[0]) == [("get-time", {})]
    channel = "<|channel|>commentary to=functions.get-time<|message|><|call|>"
    assert calls_of(read(output_formats_of("openai"), *channel)[0]) == [("get-time", {})]
    for empty in ('""', "null", '"{}"'):
        answer = f'<tool_call>{{"name": "get-time", "arguments": {empty}}}</tool_call>'
        assert calls_of(read(output_formats_of("hermes"), *answer)[0]) == [("get-time", {})]


def test_marks_that_close_nothing_are_no_content() -> None:
    assert read(output_formats_of("hermes"), "a</tool_call>b")[0] == [TextPiece("ab")]


def test_an_answer_may_end_without_the_closing_mark() -> None:
    pieces, detail = read(output_formats_of("hermes"), '<tool_call>\n{"name": "get-time", "arguments": {}}')
    assert calls_of(pieces) == [("get-time", {})]
    assert not detail
    assert pieces[-1] == CallEnd('<tool_call>\n{"name": "get-time", "arguments": {}}')


UNCLOSED = {
    "hermes": ("", '<tool_call>\n{"name": "get-time", "arguments": {}}\n', ""),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.get-time:0<|tool_call_argument_begin|>{}\n",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n{}\n```",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>get-time<｜tool▁sep｜>{}",
        "<｜tool▁calls▁end｜>",
    ),
}


@pytest.mark.parametrize("in_section", [True, False])
@pytest.mark.parametrize("name", UNCLOSED)
def test_a_call_is_whole_where_the_next_one_begins(name: str, in_section: bool) -> None:
    begin, call, end = UNCLOSED[name]
    answer = call * 3 if not in_section or not end else f"{begin}{call * 3}{end}So."
    pieces, detail = read(output_formats_of(name), *answer)
    assert calls_of(pieces) == [("get-time", {})] * 3 and not detail
    assert text_of(pieces) == ("So." if in_section and end else "")


def test_what_ends_before_its_name_is_said_to_be_a_call() -> None:
    _, detail = read(output_formats_of("hermes"), '<tool_call>\n{"na')
    assert detail == "A call is not whole: the answer ended inside."


def test_stray_marks_of_harmony_are_no_content() -> None:
    formats = output_formats_of("openai")
    assert read(formats, *"<|message|>x<|end|>") == ([TextPiece("x")], "")
    pieces, _ = read(formats, "<|channel|>final<|message|>a<|message|>b<|constrain|>c<|return|>")
    assert text_of(pieces) == "abc"


def test_without_tools_calls_are_text() -> None:
    answer = 'x <tool_call>{"name": "get-time", "arguments": {}}</tool_call>'
    formats = output_formats_of("hermes", "qwen3")
    assert read(formats, answer, tools=TOOLS, parse_tools=False) == ([TextPiece(answer)], "")
