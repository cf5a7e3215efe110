"""Formats are recognised from chat templates as mlx-lm does, or chosen by name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from phalanx.server.outputs.formats import TOOLS
from phalanx.server.outputs.output_formats import OutputFormats, by_name, choose, reasoning_parsers, tool_parsers

TEMPLATES = {
    "hermes": "{{- '<tool_call>\\n{\"name\": \"' + tool_call.name + '\"' }}",
    "qwen3_coder": "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "glm47": "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>",
    "minimax_m2": "{% set toolcall_begin_token = '<minimax:tool_call>' %}",
    "longcat": "<longcat_tool_call>{{ tool_call.name }}<longcat_arg_key>",
    "kimi_k2": "<|tool_calls_section_begin|>{% for tool_call in calls %}",
    "mistral": "{{- '[TOOL_CALLS]' }}",
    "lfm2": "{{- '<|tool_list_start|>[' }}",
    "gemma4": "{{- '<|tool_call>call:' + name }}<tool_call|>",
    "functiongemma": "<start_function_call>call:",
    "minicpm5": '<function name="{{ name }}"><param name="{{ key }}">',
    "muse_spark": "<atem:function_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>{{ '```json' }}",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "openai": "<|start|>assistant<|channel|>final<|message|>",
    "llama4_pythonic": "<|python_start|> Format: [func_name1(params_name1=params_value1)]",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_by_template(name: str) -> None:
    formats = choose(TEMPLATES[name], {})
    assert formats.tools is not None
    assert formats.tools.name == name
    assert formats.tools.format is TOOLS[name]


def test_by_vocabulary() -> None:
    xtml = {"<|open|>": 1, "<|close|>": 2, "<|sep|>": 3, "<|end_of_msg|>": 4}
    found = choose("", xtml)
    assert found.describe() == "tool calls: kimi_k3, reasoning: kimi_k3"
    assert choose("", {"<|tool_call_start|>": 1, "<|tool_call_end|>": 2}).describe().startswith("tool calls: lfm2")
    llama = 'if tools: {"name": function name, "parameters": dictionary}'
    assert choose(llama, {"<|python_tag|>": 9}).describe().startswith("tool calls: llama3_json")
    assert choose("", {"<think>": 1, "</think>": 2}).describe() == "tool calls: not recognised, reasoning: think"
    assert choose("", {"<|channel>": 1, "<channel|>": 2}).describe().endswith("gemma4")
    assert choose("{{ messages }}", {}).describe() == "tool calls: not recognised, reasoning: none"
    assert choose("'<think>' + r + '</think>'", {}).describe().endswith("reasoning: think")
    assert choose(TEMPLATES["openai"], {}).describe() == "tool calls: openai, reasoning: openai"


def test_the_marks_that_must_be_decoded() -> None:
    added = {"<tool_call>": 5, "</tool_call>": 6, "<think>": 7, "</think>": 8, "<|im_end|>": 9}
    formats = choose(TEMPLATES["hermes"], added)
    assert formats.marks == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert formats.without_tools().marks == {"<think>", "</think>"}
    k2 = by_name(OutputFormats(added_tokens={"<|tool_call_argument_begin|>": 1}), "kimi_k2")
    assert k2.marks == {"<|tool_call_argument_begin|>"}
    assert by_name(OutputFormats(added_tokens={"<|open|>": 1, "<|x|>": 2}), "kimi_k3").marks == {"<|open|>"}
    v3 = by_name(OutputFormats(added_tokens={"<｜tool▁sep｜>": 1}), "deepseek_v3")
    assert v3.marks == {"<｜tool▁sep｜>"}


def test_by_name() -> None:
    formats = choose(TEMPLATES["hermes"], {"<think>": 1, "</think>": 2})
    assert by_name(formats) == formats
    assert by_name(formats, "qwen3_xml", "deepseek_r1").describe() == "tool calls: qwen3_coder, reasoning: think"
    assert by_name(formats, "none", "none").describe() == "tool calls: not recognised, reasoning: none"
    for name in ("hermes", "pythonic", "llama3_json", "mistral", "openai", "deepseek_v3", "glm45", "kimi_k2"):
        assert name in tool_parsers()
        assert by_name(formats, name).tools
    for name in ("deepseek_r1", "qwen3", "openai", "mistral", "seed_oss", "glm45"):
        assert name in reasoning_parsers()
        assert by_name(formats, None, name).reasoning
    assert by_name(formats, "openai").describe() == "tool calls: openai, reasoning: openai"
    with pytest.raises(KeyError):
        by_name(formats, "hermez")


def test_every_format_of_mlx_lm_is_known() -> None:
    """The names that mlx-lm infers are ours or aliases of ours."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None and found.submodule_search_locations
    source = (Path(found.submodule_search_locations[0]) / "tokenizer_utils.py").read_text()
    body = source.partition("def _infer_tool_parser")[2].partition("\ndef ")[0]
    theirs = set(re.findall(r'return "(\w+)"', body)) - {"pythonic"}  # vLLM's name for Llama 4's; theirs is our lfm2
    assert len(theirs) > 8
    assert theirs <= set(tool_parsers())
