"""The machines give the calls that mlx-lm's parsers make of whole texts.

mlx-lm's parsers are loaded from their files, without mlx-lm itself, which imports MLX.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from answers_of_models import CASES, IDS, TOOLS, calls_of, output_formats_of, read
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples

from phalanx.server.outputs.pieces import ToolDefinition

PARSERS = {
    "hermes": "json_tools",
    "mistral": "mistral",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "qwen3_coder": "qwen3_coder",
    "glm47": "glm47",
    "longcat": "longcat",
    "minimax_m2": "minimax_m2",
    "minicpm5": "minicpm5",
    "muse_spark": "muse_spark",
    "lfm2": "pythonic",
    "gemma4": "gemma4",
    "functiongemma": "function_gemma",
}
"""Our format -> mlx-lm's module."""


def parser_of(name: str) -> ModuleType:
    package = "mlx_lm_tool_parsers"
    if package not in sys.modules:
        found = importlib.util.find_spec("mlx_lm")
        assert found is not None and found.submodule_search_locations
        folder = Path(found.submodule_search_locations[0]) / "tool_parsers"
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{PARSERS[name]}")


def their_calls(name: str, answer: str, tools: tuple[ToolDefinition, ...] = TOOLS) -> list[tuple[str, Any]]:
    """What mlx-lm's server makes of an answer: the texts between the marks, each parsed whole."""
    parser = parser_of(name)
    offered = [{"function": {"name": tool.name, "parameters": tool.parameters}} for tool in tools]
    calls: list[tuple[str, Any]] = []
    for text in answer.split(parser.tool_call_start)[1:]:
        inner = text.split(parser.tool_call_end)[0] if parser.tool_call_end else text
        parsed = parser.parse_tool_call(inner.strip(), offered)
        for call in parsed if isinstance(parsed, list) else [parsed]:
            calls.append((call["name"], json.loads(json.dumps(call["arguments"]))))
    return calls


STRIPPED = ("glm47", "longcat", "minimax_m2", "minicpm5", "muse_spark")
"""Formats of whose values mlx-lm takes white space at both ends away, also of strings."""


def as_theirs(name: str, calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Our calls, without what theirs lack."""
    if name not in STRIPPED:
        return calls
    return [
        (called, {key: value.strip() if isinstance(value, str) else value for key, value in arguments.items()})
        for called, arguments in calls
    ]


BEYOND = ("gemma4-1", "qwen3_coder-3")
"""Answers with a closing mark inside of a string, where mlx-lm's server ends the call."""

OURS = [
    pytest.param(name, answer, id=case)
    for case, (name, answer) in zip(IDS, CASES, strict=True)
    if name in PARSERS
    if case not in BEYOND
]


@pytest.mark.parametrize(("name", "answer"), OURS)
def test_equal_to_mlx_lm(name: str, answer: str) -> None:
    pieces, detail = read(output_formats_of(name), answer)
    assert detail == ""
    theirs = their_calls(name, answer)
    assert theirs
    assert as_theirs(name, calls_of(pieces)) == theirs


def test_every_parser_of_mlx_lm_is_compared() -> None:
    folder = Path(str(parser_of("hermes").__file__)).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "laguna"}  # the last one is glm47
    assert modules == set(PARSERS.values())


def test_white_space_that_theirs_leave_out() -> None:
    answer = WRITTEN["glm47"].format(name="f", values=VALUE["glm47"].format(key="a", value="  x\n"))
    tools = (ToolDefinition(name="f", parameters={"properties": {"a": {"type": "string"}}}),)
    assert their_calls("glm47", answer, tools) == [("f", {"a": "x"})]
    assert calls_of(read(output_formats_of("glm47"), answer, tools=tools)[0]) == [("f", {"a": "  x\n"})]


WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>",
    "glm47": "<tool_call>{name}\n{values}</tool_call>",
    "longcat": "<longcat_tool_call>{name}\n{values}</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{name}">\n{values}</invoke>\n</minimax:tool_call>',
    "minicpm5": '<function name="{name}">{values}</function>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="{name}">\n{values}</atem:invoke>\n</atem:function_calls>',
    "lfm2": "<|tool_call_start|>[{name}({values})]<|tool_call_end|>",
}
VALUE = {
    "qwen3_coder": "<parameter={key}>\n{value}\n</parameter>\n",
    "glm47": "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    "longcat": "<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n",
    "minimax_m2": '<parameter name="{key}">{value}</parameter>\n',
    "minicpm5": '<param name="{key}">{value}</param>',
    "muse_spark": '<atem:parameter name="{key}">{value}</atem:parameter>\n',
    "lfm2": "{key}={value}, ",
}
TYPES: dict[str, list[str]] = {
    "string": [
        "Oslo",
        "",
        "  two words ",
        "a\nb",
        "null",
        "Null",
        "nullify",
        "12",
        "[1]",
        '"quoted"',
        "é ü",
        "\n",
        "a < b",
    ],
    "integer": ["1", "-3", "0", "12345678901"],
    "number": ["1", "1.5", "-2e3", "0.25"],
    "boolean": ["true", "false", "True", "False"],
    "object": ["{}", '{"a": [1, {"b": null}]}', "{'a': True}"],
    "array": ["[]", '["a", 2, null]', "['a']"],
}


@examples(200, soak=3000)
@given(data=st.data())
def test_values_are_converted_as_mlx_lm_does(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WRITTEN)))
    kinds = data.draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=4))
    properties = {f"p{i}": {"type": kind} for i, kind in enumerate(kinds)}
    tools = (ToolDefinition(name="f", parameters={"type": "object", "properties": properties}),)
    values = ""
    for key, schema in properties.items():
        text = data.draw(st.sampled_from(TYPES[schema["type"]]))
        if name == "lfm2" and schema["type"] == "string":
            text = repr(text)
        assume(not (name == "minicpm5" and "<" in text))
        values += VALUE[name].format(key=key, value=text)
    answer = WRITTEN[name].format(name="f", values=values.removesuffix(", "))
    pieces, detail = read(output_formats_of(name), *answer, tools=tools)
    assert detail == ""
    assert as_theirs(name, calls_of(pieces)) == their_calls(name, answer, tools)


OTHERS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {values}}}\n</tool_call>\n',
    "mistral": "[TOOL_CALLS]f[ARGS]{values}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{values}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{values}<|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "gemma4": "<|tool_call>call:f{values}<tool_call|>",
    "functiongemma": "<start_function_call>call:f{values}<end_function_call>",
}
"""Calls of formats that write arguments as JSON, or say what a value is."""
TEXTS = [
    "",
    " a\n",
    "é 😀",
    'say "hi" \\n',
    "</tool_calls> <tool_cal",
    "null",
    "12",
    "a, b: c",
    "[f(x=1)]",
    "<b> & 'c'",
]
GIVEN: dict[str, list[Any]] = {
    "string": [*TEXTS, "{a: {b}}"],
    "number": [0, -1, 1.5, -2000.0, 12345678901],
    "boolean": [True, False],
    "object": [{}, {"a": [1, {"b": None}]}, {"x": "}"}],
    "array": [[], ["a, ]", 2, None], [[True]]],
}


def in_gemma(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_gemma(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def written(name: str, arguments: dict[str, Any], *, ascii_only: bool) -> str:
    """A call of `f` as this format's template writes it."""
    if name in ("gemma4", "functiongemma"):
        values = in_gemma(arguments, '<|"|>' if name == "gemma4" else "<escape>")
    elif name == "kimi_k3":
        values = "".join(
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "json"}"<|sep|>'
            f"{value if isinstance(value, str) else json.dumps(value)}<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
    else:
        values = json.dumps(arguments, ensure_ascii=ascii_only)
    return OTHERS[name].format(values=values)


@examples(300, soak=3000)
@given(data=st.data())
def test_calls_of_every_other_format_are_read_as_mlx_lm_does(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OTHERS)))
    flat = name == "functiongemma"  # theirs knows no lists and no objects, and ends at the first brace
    answer, expected = "", []
    for _ in range(data.draw(st.integers(1, 2))):
        kinds = st.sampled_from(["string", "number", "boolean"] if flat else sorted(GIVEN))
        arguments = {f"p{i}": data.draw(kinds.flatmap(lambda kind: st.sampled_from(GIVEN[kind]))) for i in range(3)}
        arguments = {key: "x" if flat and value == "{a: {b}}" else value for key, value in arguments.items()}
        answer += written(name, arguments, ascii_only=data.draw(st.booleans()))
        expected.append(("f", arguments))
    tools = (ToolDefinition(name="f"),)
    pieces, detail = read(output_formats_of(name), *answer, tools=tools)
    assert detail == ""
    assert calls_of(pieces) == their_calls(name, answer, tools) == expected


UNION: dict[str, Any] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2"])
def test_a_value_of_several_types_is_one_of_them(name: str) -> None:
    """Where mlx-lm's parsers differ from each other, and from the schema: Qwen3-Coder's gives the string "5"."""
    reference = {"$ref": "#/$defs/Level"}
    parameters = {
        "type": "object",
        "properties": {"a": UNION, "b": UNION, "c": {"type": ["string", "null"]}, "d": reference},
        "$defs": {"Level": {"enum": [1, 2]}},
    }
    tools = (ToolDefinition(name="f", parameters=parameters),)
    texts = {"a": "5", "b": "null", "c": "12", "d": "2"}
    values = "".join(VALUE[name].format(key=key, value=text) for key, text in texts.items())
    pieces, _ = read(output_formats_of(name), WRITTEN[name].format(name="f", values=values), tools=tools)
    assert calls_of(pieces) == [("f", {"a": 5, "b": None, "c": "12", "d": 2})]
