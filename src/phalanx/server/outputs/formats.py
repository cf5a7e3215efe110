"""The formats of reasoning and calls, by name.

A table; `json_calls.py` and its neighbours parse them. Formats of calls have the names of mlx-lm's parsers and of
vLLM's `--tool-call-parser`, those of reasoning the names of vLLM's `--reasoning-parser`.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.server.outputs import harmony
from phalanx.server.outputs.gemma_calls import GemmaCalls
from phalanx.server.outputs.harmony import HarmonyCalls
from phalanx.server.outputs.headed_calls import HeadedCalls
from phalanx.server.outputs.json_calls import JsonCalls
from phalanx.server.outputs.markup_calls import MarkupCalls
from phalanx.server.outputs.pythonic_calls import PythonicCalls

MarkedFormat = JsonCalls | HeadedCalls | MarkupCalls | PythonicCalls | GemmaCalls
"""Formats that read calls between marks. Each has:

    opens        marks that begin calls
    marks        these and the marks that close calls, which are removed from the text of a broken call
    texts        all texts of the format: an added token in one of them has to be decoded as text
    begins_bare  the first character of an answer that may be a call without marks; "" if none may
    read         takes the calls after an opening mark, and returns their pieces
"""
ToolFormat = MarkedFormat | HarmonyCalls


class ReasoningFormat(Struct, frozen=True):
    """Marks around reasoning. `dropped`: marks around content, which are removed."""

    name: str
    open: str
    close: str
    dropped: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends inside of reasoning, because the template wrote the opening mark."""
        return prompt.rstrip().endswith(self.open)

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (self.open, self.close, *self.dropped)


class NamedToolFormat(Struct, frozen=True):
    """A format of calls, by its first name."""

    name: str
    format: ToolFormat


def _glm(prefix: str) -> MarkupCalls:
    return MarkupCalls(
        call=(f"<{prefix}tool_call>", f"</{prefix}tool_call>"),
        parameter=(f"<{prefix}arg_key>", f"</{prefix}arg_value>"),
        call_head="",
        key_head=(f"</{prefix}arg_key>", f"<{prefix}arg_value>"),
        rule="glm",
        call_name=r"\s*(\S+)\s*",
        key_name=r"\s*([^\s<][^<]*?)\s*",
        gap="\n",
    )


TOOLS: dict[str, ToolFormat] = {
    "hermes": JsonCalls("<tool_call>", "</tool_call>"),
    "llama3_json": JsonCalls("<|python_tag|>", arguments="parameters", bare=True, separator=";"),
    "llama4_json": JsonCalls("<|python_start|>", "<|python_end|>", arguments="parameters", bare=True, separator=";"),
    "mistral": HeadedCalls("[TOOL_CALLS]", "[ARGS]", lists=True, name=r"\s*([\w.-]+)\s*(?:\[CALL_ID\].*)?"),
    "kimi_k2": HeadedCalls(
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        name=r"\s*(?:functions\.)?(.+?):\d+\s*",
        header="functions.{name}:{index}",
    ),
    "deepseek_v3": HeadedCalls(
        "<｜tool▁call▁begin｜>",
        "```json",
        "<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        name=r"\s*\w*\s*<｜tool▁sep｜>\s*([\w.-]+)\s*",
        header="function<｜tool▁sep｜>{name}\n",
        before="\n",
        after="\n```",
    ),
    "deepseek_v31": HeadedCalls(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "qwen3_coder": MarkupCalls(
        call=("<function=", "</function>"),
        parameter=("<parameter=", "</parameter>"),
        call_head=">",
        key_head=(">",),
        rule="qwen",
        section=("<tool_call>", "</tool_call>"),
        pad="\n",
        gap="\n",
    ),
    "glm47": _glm(""),
    "longcat": _glm("longcat_"),
    "minimax_m2": MarkupCalls(
        call=("<invoke name=", "</invoke>"),
        parameter=("<parameter name=", "</parameter>"),
        call_head=">",
        key_head=(">",),
        rule="minimax",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        shared=True,
        gap="\n",
        written_call='"{name}"',
        written_key='"{name}"',
    ),
    "minicpm5": MarkupCalls(
        call=("<function name=", "</function>"),
        parameter=("<param name=", "</param>"),
        call_head=">",
        key_head=(">",),
        rule="minicpm",
        written_call='"{name}"',
        written_key='"{name}"',
    ),
    "muse_spark": MarkupCalls(
        call=("<atem:invoke", "</atem:invoke>"),
        parameter=("<atem:parameter", "</atem:parameter>"),
        call_head=">",
        key_head=(">",),
        rule="muse",
        section=("<atem:function_calls>", "</atem:function_calls>"),
        shared=True,
        call_name=r'.*\bname="([^"]+)".*',
        key_name=r'.*\bname="([^"]+)".*',
        gap="\n",
        written_call=' name="{name}"',
        written_key=' name="{name}"',
    ),
    "kimi_k3": MarkupCalls(
        call=("<|open|>call", "<|close|>call<|sep|>"),
        parameter=("<|open|>argument", "<|close|>argument<|sep|>"),
        call_head="<|sep|>",
        key_head=("<|sep|>",),
        rule="kimi",
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        shared=True,
        call_name=r'.*\btool="([^"]+)".*',
        key_name=r'.*\bkey="([^"]*)".*',
        block=("<|open|>json", "<|close|>json<|sep|>"),
        written_call=' tool="{name}" index="{index}"',
        written_key=' key="{name}" type="{type}"',
    ),
    "lfm2": PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama4_pythonic": PythonicCalls("<|python_start|>", "<|python_end|>", bare=True),
    "gemma4": GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>"),
    "openai": HarmonyCalls(),
}

TOOL_ALIASES = {
    "json_tools": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "pythonic": "llama4_pythonic",
    "glm45": "glm47",
    "laguna": "glm47",
    "minimax": "minimax_m2",
    "function_gemma": "functiongemma",
    "harmony": "openai",
    "gpt_oss": "openai",
}

_XTML = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
REASONING = {
    shape.name: shape
    for shape in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("longcat", "<longcat_think>", "</longcat_think>"),
        ReasoningFormat("think_marks", "<|think:start|>", "<|think:end|>"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>", dropped=_XTML),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("openai", f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", "<|end|>"),
    )
}

REASONING_ALIASES = {
    "harmony": "openai",
    "gpt_oss": "openai",
    **dict.fromkeys(
        "deepseek_r1 deepseek_v3 ernie45 glm45 hunyuan_a13b kimi_k2 minimax_m2 qwen3 step3".split(), "think"
    ),
}
