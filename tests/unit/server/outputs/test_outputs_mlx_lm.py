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
from answers_of_models import CASES, IDS, TOOLS, calls_of, read, shapes_of
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
    pieces, detail = read(shapes_of(name), answer)
    assert detail == ""
    theirs = their_calls(name, answer)
    assert theirs
    assert calls_of(pieces) == theirs


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
    pieces, detail = read(shapes_of(name), *answer, tools=tools)
    assert detail == ""
    assert calls_of(pieces) == their_calls(name, answer, tools)


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
    pieces, _ = read(shapes_of(name), WRITTEN[name].format(name="f", values=values), tools=tools)
    assert calls_of(pieces) == [("f", {"a": 5, "b": None, "c": "12", "d": 2})]
