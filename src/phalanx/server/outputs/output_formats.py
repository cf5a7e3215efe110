"""Finds a model's formats of reasoning and calls: by its chat template, as mlx-lm does, or by name.

`formats.py` is the table of formats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec import Struct

from phalanx.server.outputs.format_parser import FormatParser
from phalanx.server.outputs.formats import (
    REASONING,
    REASONING_ALIASES,
    TOOL_ALIASES,
    TOOLS,
    NamedToolFormat,
    ReasoningFormat,
)
from phalanx.server.outputs.harmony import HarmonyCalls
from phalanx.server.outputs.pieces import OutputParser, ToolDefinition

XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


class OutputFormats(Struct, frozen=True):
    """A model's formats besides content. `added_tokens`: text -> id of the tokenizer's added tokens."""

    reasoning: ReasoningFormat | None = None
    tools: NamedToolFormat | None = None
    added_tokens: Mapping[str, int] = {}

    @property
    def marks(self) -> frozenset[str]:
        """The added tokens, special ones too, that must be decoded as text for the parser."""
        texts = (*(self.reasoning.texts if self.reasoning else ()), *(self.tools.format.texts if self.tools else ()))
        return frozenset(token for token in self.added_tokens if any(token in text for text in texts))

    def describe(self, *, shows_tools: bool = True) -> str:
        """A line for the log: "tool calls: hermes, reasoning: think".

        Args:
            shows_tools: whether the chat template shows a request's tools to the model.
        """
        calls = self.tools.name if self.tools else "not recognised"
        reasoning = self.reasoning.name if self.reasoning else "none"
        return f"tool calls: {calls if shows_tools else 'none'}, reasoning: {reasoning}"

    def without_tools(self) -> OutputFormats:
        """The formats for a request without tools. (Harmony keeps its channels.)"""
        if self.tools is None or isinstance(self.tools.format, HarmonyCalls):
            return self
        return msgspec.structs.replace(self, tools=None)


def choose(template: str, added_tokens: Mapping[str, int]) -> OutputFormats:
    """The formats of a model with this chat template ("" without one)."""
    tools = _tools_of(template, added_tokens)
    reasoning = next((name for name in REASONING if _reasons(REASONING[name], template, added_tokens)), "")
    if tools == "openai":
        reasoning = tools
    return OutputFormats(
        reasoning=REASONING[reasoning] if reasoning else None,
        tools=NamedToolFormat(tools, TOOLS[tools]) if tools else None,
        added_tokens=added_tokens,
    )


def by_name(
    formats: OutputFormats, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputFormats:
    """`formats`, with those that flags name; "none" for none.

    Raises:
        KeyError: no format has this name; the names are `tool_parsers()` and `reasoning_parsers()`.
    """
    if tool_parser is not None:
        name = TOOL_ALIASES.get(tool_parser, tool_parser)
        formats = msgspec.structs.replace(formats, tools=None if name == "none" else NamedToolFormat(name, TOOLS[name]))
    if reasoning_parser is not None:
        name = REASONING_ALIASES.get(reasoning_parser, reasoning_parser)
        formats = msgspec.structs.replace(formats, reasoning=None if name == "none" else REASONING[name])
    if formats.tools and isinstance(formats.tools.format, HarmonyCalls):  # its calls and its reasoning are one format
        formats = msgspec.structs.replace(formats, reasoning=REASONING["openai"])
    return formats


def tool_parsers() -> list[str]:
    """Names for `by_name`."""
    return sorted({*TOOLS, *TOOL_ALIASES, "none"})


def reasoning_parsers() -> list[str]:
    """Names for `by_name`."""
    return sorted({*REASONING, *REASONING_ALIASES, "none"})


def make_parser(
    formats: OutputFormats,
    *,
    tools: Sequence[ToolDefinition],
    in_reasoning: bool,
    parse_tools: bool,
    is_bound: bool = False,
) -> OutputParser | None:
    """The parser of one answer's text; None if the text is all content.

    Args:
        in_reasoning: the prompt ends inside of reasoning (`ReasoningFormat.is_open`).
        parse_tools: parse calls; else their text is content.
        is_bound: a grammar constrains the text after the reasoning to calls, or to content in which marks are text.
    """
    if not parse_tools:
        formats, tools = formats.without_tools(), ()
    if formats.reasoning is None and formats.tools is None:
        return None
    form = formats.tools.format if formats.tools else None
    if formats.reasoning is REASONING["openai"]:
        form = TOOLS["openai"]
    return FormatParser(formats.reasoning, form, tools, in_reasoning=in_reasoning, is_bound=is_bound)


def _reasons(shape: ReasoningFormat, template: str, added_tokens: Collection[str]) -> bool:
    """Whether a model writes this reasoning: its vocabulary has the marks, or its template both."""
    if shape.name == "openai":
        return False  # known by its calls
    if shape.name == "kimi_k3":
        return all(token in added_tokens for token in XTML)
    if shape.name == "gemma4":
        return "<|channel>" in added_tokens and shape.close in added_tokens
    both = (shape.open, shape.close)
    return all(mark in added_tokens for mark in both) or all(mark in template for mark in both)


_BY_TEMPLATE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
    (("<tool_call>", "tool_call.name"), "hermes"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|channel|>", "<|message|>", "<|start|>"), "openai"),
    (("<|python_start|>", "[func_name1("), "llama4_pythonic"),
    (("<|python_start|>", '"parameters"'), "llama4_json"),
    (("<tool_call>", '"name"', '"arguments"'), "hermes"),
)
"""Texts that all stand in a template -> its format. Up to muse_spark and hermes the order is mlx-lm's."""


def _tools_of(template: str, added_tokens: Collection[str]) -> str:
    for texts, name in _BY_TEMPLATE:
        if all(text in template for text in texts):
            return name
    if all(token in added_tokens for token in XTML):
        return "kimi_k3"
    if "<|tool_call_start|>" in added_tokens and "<|tool_call_end|>" in added_tokens:
        return "lfm2"
    if "<|python_tag|>" in added_tokens and "tools" in template and '"parameters"' in template:
        return "llama3_json"
    return ""
