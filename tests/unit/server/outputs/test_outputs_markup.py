"""Calls in markup as models really write them: without a mark here and there, and with marks inside of values."""

from __future__ import annotations

import pytest
from answers_of_models import calls_of, output_formats_of, read, text_of

from phalanx.server.outputs.pieces import CallBegin, TextPiece, ToolDefinition

WRITE = ToolDefinition(
    name="write_file",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "lines": {"type": "integer"},
            "options": {"type": "object"},
        },
    },
)
NOW = ToolDefinition(name="now")
OFFERED = (WRITE, NOW)

CALL = {
    "qwen3_coder": "<tool_call>\n<function=write_file>\n{values}</function>\n</tool_call>",
    "glm47": "<tool_call>write_file\n{values}</tool_call>",
    "longcat": "<longcat_tool_call>write_file\n{values}</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write_file">\n{values}</invoke>\n</minimax:tool_call>',
    "minicpm5": '<function name="write_file">{values}</function>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="write_file">\n{values}</atem:invoke>\n'
    "</atem:function_calls>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|>{values}<|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
}
"""Format -> a call of `write_file`."""
VALUE = {
    "qwen3_coder": ("<parameter={key}>\n", "{value}", "\n</parameter>", "\n"),
    "glm47": ("<arg_key>{key}</arg_key>\n<arg_value>", "{value}", "</arg_value>", "\n"),
    "longcat": ("<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>", "{value}", "</longcat_arg_value>", ""),
    "minimax_m2": ('<parameter name="{key}">', "{value}", "</parameter>", "\n"),
    "minicpm5": ('<param name="{key}">', "{value}", "</param>", ""),
    "muse_spark": ('<atem:parameter name="{key}" string="true">', "{value}", "</atem:parameter>", "\n"),
    "kimi_k3": ('<|open|>argument key="{key}" type="string"<|sep|>', "{value}", "<|close|>argument<|sep|>", ""),
}
"""Format -> the head of a parameter, its value, its closing mark, and what stands after that."""
CLOSE = {name: parts[2].lstrip("\n") for name, parts in VALUE.items()}
SECTIONS = {
    "qwen3_coder": ("<tool_call>\n", "\n</tool_call>"),
    "minimax_m2": ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    "muse_spark": ("<atem:function_calls>\n", "\n</atem:function_calls>"),
    "kimi_k3": ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
}
"""Formats whose calls stand between marks of their own."""


def written(name: str, *, closed: bool = True, **values: str) -> str:
    """A call of `write_file`. `closed`: with the closing marks of its parameters."""
    parameters = ""
    for key, value in values.items():
        head, body, close, gap = VALUE[name]
        parameters += head.format(key=key) + body.format(value=value) + (close if closed else "") + gap
    return CALL[name].format(values=parameters)


def calls(name: str, answer: str) -> list[object]:
    """What is called, whether the text comes whole or by the character."""
    whole = read(output_formats_of(name), answer, tools=OFFERED)
    assert read(output_formats_of(name), *answer, tools=OFFERED) == whole
    return list(calls_of(whole[0]))


@pytest.mark.parametrize("closing", [True, False], ids=["with its end", "without"])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_call_without_the_mark_of_its_section(name: str, closing: bool) -> None:
    opening, end = SECTIONS[name]
    bare = written(name, path="a.txt", content="x").replace(opening, "")
    bare = bare if closing else bare.replace(end, "")
    answer = f"I write.\n{bare}\nDone."
    assert calls(name, answer) == [("write_file", {"path": "a.txt", "content": "x"})]
    pieces, detail = read(output_formats_of(name), answer, tools=OFFERED)
    assert text_of(pieces).split() == ["I", "write.", "Done."] and not detail
    assert calls(name, bare + bare) == [("write_file", {"path": "a.txt", "content": "x"})] * 2


@pytest.mark.parametrize("name", SECTIONS)
def test_what_only_mentions_a_call_is_text(name: str) -> None:
    """Of a tool that is not offered all stays as it is. Of an offered one nothing is shown of a call that is none."""
    call = written(name, path="a").removeprefix(SECTIONS[name][0]).removesuffix(SECTIONS[name][1])
    other = f" Calls are\n{call.replace('write_file', 'rm')} \n"
    pieces, detail = read(output_formats_of(name), *other, tools=OFFERED)
    assert (pieces, detail) == ([TextPiece(other)], "")
    head = call[: call.index("write_file")] + "write_file"
    for mention in (f"Say {head}", f"Say {head}> to call.", f"Say {head} and go on.\n"):
        pieces, detail = read(output_formats_of(name), *mention, tools=OFFERED)
        assert text_of(pieces) == mention
        assert not any(isinstance(piece, CallBegin) for piece in pieces)


def test_a_call_without_marks_does_not_end_reasoning() -> None:
    bare = written("qwen3_coder", path="a").removeprefix("<tool_call>\n")
    pieces, _ = read(output_formats_of("qwen3_coder", "qwen3"), f"<think>Say {bare}</think>Well.", tools=OFFERED)
    assert calls_of(pieces) == [] and text_of(pieces) == "Well."


@pytest.mark.parametrize("name", VALUE)
def test_a_closing_mark_inside_of_a_text_stays(name: str) -> None:
    close = CLOSE[name]
    for content in (f"a {close} b", f"{close}", f"{close}\n{close} c", f"x\n{close}\n\ny", f"{close[:-1]}{close}."):
        answer = written(name, path="a.txt", content=content)
        assert calls(name, answer) == [("write_file", {"path": "a.txt", "content": content})]
        answer = written(name, content=content, path="a.txt")
        assert calls(name, answer) == [("write_file", {"content": content, "path": "a.txt"})]


@pytest.mark.parametrize("name", VALUE)
def test_other_marks_inside_of_a_text_stay(name: str) -> None:
    head = VALUE[name][0]
    for content in (
        head.format(key="unknown") + "1",
        head.format(key="path"),  # which the call has
        "</function> </tool_call> </invoke> <tool_call> <function=rm>",
        CALL[name].split("{values}")[1] + " is the end.",
    ):
        answer = written(name, path="a.txt", content=content)
        assert calls(name, answer) == [("write_file", {"path": "a.txt", "content": content})]


@pytest.mark.parametrize("name", VALUE)
def test_a_closing_mark_that_is_missing(name: str) -> None:
    answer = written(name, closed=False, path="a.txt", content="one\n\ntwo", lines="2")
    lines = "2" if name == "kimi_k3" else 2  # its heads say the type
    assert calls(name, answer) == [("write_file", {"path": "a.txt", "content": "one\n\ntwo", "lines": lines})]


@pytest.mark.parametrize("mark", ["<function=write_file", "<parameter=path", "<parameter=content", "<parameter=lines"])
def test_a_head_that_the_lines_end_closes(mark: str) -> None:
    values = {"path": "a.txt", "content": "\nx > y", "lines": "3"}
    answer = written("qwen3_coder", **values).replace(f"{mark}>", mark)
    assert mark in answer and f"{mark}>" not in answer
    assert calls("qwen3_coder", answer) == [("write_file", {**values, "lines": 3})]


@pytest.mark.parametrize("name", ["minimax_m2", "minicpm5", "muse_spark", "kimi_k3", "glm47"])
def test_heads_of_other_formats_that_the_lines_end_closes(name: str) -> None:
    head = VALUE[name][0].format(key="path")
    dropped = {"kimi_k3": "<|sep|>", "glm47": "</arg_key>\n"}.get(name, ">")
    whole = written(name, path="a.txt", content="x")
    answer = whole.replace(head, head.replace(dropped, "\n"))
    assert answer != whole
    assert calls(name, answer) == [("write_file", {"path": "a.txt", "content": "x"})]


def test_a_head_that_nothing_closes_is_no_name() -> None:
    for name, opened in (("qwen3_coder", "<parameter=path</parameter>"), ("minimax_m2", '<parameter name="path"')):
        answer = written(name, path="a.txt", content="x").replace(VALUE[name][0].format(key="path"), opened)
        pieces, detail = read(output_formats_of(name), answer, tools=OFFERED)
        assert calls_of(pieces) == []
        assert detail == "The call of 'write_file' is not whole: one of its parameters has no name."


@pytest.mark.parametrize("name", VALUE)
@pytest.mark.parametrize("content", ["    indented", "ends\n", "\n\nx\n\n", " ", "\n", "a\r\n", "\tb \n "])
def test_white_space_of_a_text_is_its_own(name: str, content: str) -> None:
    """Only what the template writes around a value is left out: a line's end on each side in Qwen's."""
    answer = written(name, path="a.txt", content=content)
    assert calls(name, answer) == [("write_file", {"path": "a.txt", "content": content})]


@pytest.mark.parametrize("name", sorted(set(VALUE) - {"kimi_k3"}))
def test_white_space_around_other_values_is_none(name: str) -> None:
    answer = written(name, lines=" 3\n", options='\n{"a": [1]} ')
    assert calls(name, answer) == [("write_file", {"lines": 3, "options": {"a": [1]}})]


@pytest.mark.parametrize("name", VALUE)
def test_a_call_is_not_swallowed_by_one_before_it(name: str) -> None:
    """One without an end is no call, and the next one is."""
    first, second = written(name, path="a"), written(name, path="b")
    for cut in (first[: first.index(CLOSE[name])], first.split(CLOSE[name])[0] + CLOSE[name]):
        assert calls(name, cut + second) == [("write_file", {"path": "b"})]
        assert calls(name, f"{cut}\nOh.\n{second}") == [("write_file", {"path": "b"})]
    other = second.replace("write_file", "rm")
    if name in SECTIONS:
        cut = first[: first.index(CLOSE[name])] + SECTIONS[name][1]
        assert calls(name, cut + other) == []


def test_json_that_is_not_whole_protects_no_marks() -> None:
    for name in ("glm47", "qwen3_coder"):
        broken = written(name, options='{"a": "x').replace("\n", "")
        assert calls(name, broken + written(name, path='"b"')) == [
            ("write_file", {"options": '{"a": "x'}),  # as mlx-lm
            ("write_file", {"path": '"b"'}),
        ]


def test_kimi_k3_may_write_all_arguments_as_json() -> None:
    block = '<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>'
    for arguments, expected in (('{"lines": 2, "path": "<|close|>"}', {"lines": 2, "path": "<|close|>"}), ("{}", {})):
        answer = CALL["kimi_k3"].format(values=block.replace("{arguments}", arguments))
        assert calls("kimi_k3", answer) == [("write_file", expected)]
    for arguments in ("[]", '{"lines": 2', "{} x"):
        answer = CALL["kimi_k3"].format(values=block.replace("{arguments}", arguments))
        assert calls("kimi_k3", answer) == []
