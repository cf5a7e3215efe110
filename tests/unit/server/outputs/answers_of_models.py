"""Answers as models write them, one or more per format, and what the tests make of an answer's pieces."""

from __future__ import annotations

import json
from typing import Any

from phalanx.server.outputs.output_formats import OutputFormats, by_name, make_parser
from phalanx.server.outputs.pieces import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolDefinition,
)

PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}}
TOOLS = (
    ToolDefinition(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "share": {"type": "number"},
                "exact": {"type": "boolean"},
                "place": PLACE,
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    ),
    ToolDefinition(name="get-time", parameters={"type": "object", "properties": {}}),
)

ANSWERS: dict[str, list[str]] = {
    "hermes": [
        (
            "I will look.\n<tool_call>\n"
            '{"name": "get_weather", "arguments": {"city": "Zürich, \\"Oerlikon\\" \\u00e9 {[<", "days": 2}}\n'
            "</tool_call>"
        ),
        '<tool_call>{"arguments": {"city": "Oslo", "place": {"lat": -1.5e3}}, "name": "get_weather"}</tool_call>',
        (
            '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"name": "get_weather", "arguments": {"tags": [], "exact": null}}\n</tool_call>\nDone.'
        ),
    ],
    "llama3_json": [
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
        (
            "<|python_tag|>"
            '{"type": "function", "name": "get_weather", "parameters": {"city": "a;b"}}; {"name":'
            ' "get-time", "parameters": {}}'
        ),
    ],
    "llama4_json": [
        '<|python_start|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|python_end|>',
    ],
    "mistral": [
        '[TOOL_CALLS]get_weather[ARGS]{"city": "[ARGS]"}[TOOL_CALLS]get-time[ARGS]{}',
        (
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "get-time",'
            ' "arguments": "{}"}]'
        ),
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "123456789"}]',
    ],
    "kimi_k2": [
        (
            "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>"
            'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
            "<|tool_call_begin|>functions.get-time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
    ],
    "deepseek_v3": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "```"}\n'
            "```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get-time\n```json\n{}\n"
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ],
    "deepseek_v31": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>"
        ),
    ],
    "qwen3_coder": [
        (
            "So.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nLine 1\n\n <b> & </p\n</parameter>\n"
            '<parameter=days>\n2\n</parameter>\n<parameter=place>\n{"lat": 1.5, "name": "x"}\n</parameter>\n'
            "</function>\n</tool_call>"
        ),
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nnull\n</parameter>\n<parameter=exact>\n"
            "True\n</parameter>\n<parameter=share>\n3.0\n</parameter>\n<parameter=tags>\n['a', 'b']\n"
            "</parameter>\n<parameter=other>\n\n</parameter>\n</function>\n</tool_call>"
        ),
        (
            "<tool_call>\n<function=get-time>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
            "<parameter=city>\nnullable\n</parameter>\n</function>\n</tool_call>"
        ),
        "<tool_call>\n<function=get_weather>\n<parameter=place>\n"
        '{"name": "</parameter></tool_call>"}\n</parameter>\n</function>\n</tool_call>',
        (
            "<tool_call>\n<function=get_weather\n<parameter=city\nOslo\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
    ],
    "glm47": [
        (
            '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>  Zürich "x"\n </arg_value>\n<arg_key>'
            "days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>place</arg_key>\n<arg_value>"
            '{"lat": 1}</arg_value>\n</tool_call>'
        ),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>123</arg_value><arg_key>exact</arg_key>"
            "<arg_value>True</arg_value><arg_key>tags</arg_key><arg_value>oslo</arg_value></tool_call>"
        ),
        (
            "<tool_call>get-time</tool_call>\n<tool_call>"
            '{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
        ),
    ],
    "longcat": [
        (
            "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>"
            "Oslo</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>"
            "2</longcat_arg_value>\n</longcat_tool_call>"
        ),
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo\n</parameter>\n'
            '<parameter name="days">2</parameter>\n<parameter name="place">{"lat": 2}</parameter>\n</invoke>\n'
            '<invoke name="get-time">\n</invoke>\n</minimax:tool_call>'
        ),
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">NULL</parameter>\n'
            '<parameter name="share">1.5</parameter>\n<parameter name="exact">yes</parameter>\n</invoke>\n'
            "</minimax:tool_call>"
        ),
    ],
    "minicpm5": [
        (
            '<function name="get_weather"><param name="city"><![CDATA[a < b\nc]]></param><param name="days">'
            "2</param></function>"
        ),
    ],
    "muse_spark": [
        (
            '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
            '<atem:parameter name="city" string="true">Oslo</atem:parameter>\n<atem:parameter name="place">'
            '{"lat": 1}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
        ),
    ],
    "kimi_k3": [
        (
            '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>'
            'argument key="city" type="string"<|sep|> Oslo \n<|close|>argument<|sep|><|open|>'
            'argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|open|>'
            'call tool="get-time" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        ),
        (
            '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
            '{"city": "Oslo", "tags": ["a"]}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        ),
    ],
    "lfm2": [
        (
            "<|tool_call_start|>"
            '[get_weather(city="a, )]\\"b\\"", days=2, place={"lat": 1.0, "name": "x"}, exact=True,'
            ' tags=["a"])]<|tool_call_end|>'
            "Looking."
        ),
        (
            "<|tool_call_start|>"
            "[get_weather(city='it\\'s', exact=false, tags=('a', 'b')), get_weather(city='')]<|tool_call_end|>"
        ),
    ],
    "llama4_pythonic": [
        '[get_weather(city="Oslo", days=2), get-time()]',
        "<|python_start|>[get-time()]<|python_end|>",
    ],
    "gemma4": [
        (
            '<|tool_call>call:get_weather{city:<|"|>a{b}, c:d "x"<|"|>,days:2,place:{lat:1.5,name:<|"|>y<|"|>'
            '},tags:[<|"|>z<|"|>],exact:true}<tool_call|>'
        ),
        '<|tool_call>call:get_weather{city:<|"|><tool_call|>"<|"|>,place:{"name":"\\"<tool_call|>"}}<tool_call|>',
        "<|tool_call>call:get-time{}call:get_weather{days:1}<tool_call|>",
    ],
    "functiongemma": [
        ("<start_function_call>call:get_weather{city:<escape>Oslo: x, y<escape>,days:2,exact:true}<end_function_call>"),
    ],
    "openai": [
        (
            "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>"
            "commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
        ),
        "<|channel|>final<|message|>It rains.",
        "<|start|>assistant to=functions.get-time<|channel|>commentary json<|message|>{}",
    ],
}
"""Format -> answers. Every call in them is whole."""

CASES = [(name, answer) for name, answers in ANSWERS.items() for answer in answers]
IDS = [f"{name}-{i}" for name, answers in ANSWERS.items() for i in range(len(answers))]


def output_formats_of(tools: str | None = None, reasoning: str | None = None) -> OutputFormats:
    return by_name(OutputFormats(), tools, reasoning)


def read(
    formats: OutputFormats,
    *texts: str,
    tools: tuple[ToolDefinition, ...] = TOOLS,
    in_reasoning: bool = False,
    parse_tools: bool = True,
    is_bound: bool = False,
) -> tuple[list[Piece], str]:
    """The pieces of an answer that comes in these parts, neighbours of one kind joined, and the detail."""
    parser = make_parser(formats, tools=tools, in_reasoning=in_reasoning, parse_tools=parse_tools, is_bound=is_bound)
    assert parser is not None
    pieces = [piece for text in texts for piece in parser.add(text)] + parser.finish()
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, (TextPiece, ReasoningPiece, CallArguments)) and type(last) is type(piece):
            assert isinstance(last, (TextPiece, ReasoningPiece, CallArguments))
            joined[-1] = type(piece)(last.text + piece.text)
        else:
            joined.append(piece)
    return joined, parser.detail


def finite(text: str) -> float:
    """JSON may have 1e999, which Python makes infinite and validators refuse."""
    return max(-1e300, min(1e300, float(text)))


def calls_of(pieces: list[Piece]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls that ended; asserts that the pieces are in order."""
    calls: list[tuple[str, Any]] = []
    name: str | None = None
    arguments = ""
    for piece in pieces:
        if isinstance(piece, CallBegin):
            assert name is None
            name, arguments = piece.name, ""
        elif isinstance(piece, CallArguments):
            assert name is not None
            arguments += piece.text
        elif isinstance(piece, CallEnd):
            assert name is not None
            calls.append((name, json.loads(arguments, parse_float=finite)))
            name = None
        elif isinstance(piece, CallBroken):
            assert name is not None
            name = None
        else:
            assert name is None
    assert name is None, "a call that neither ended nor broke"
    return calls


def shown_json(pieces: list[Piece]) -> list[str]:
    """What a stream has shown of the arguments of calls that broke."""
    shown: list[str] = []
    arguments = ""
    for piece in pieces:
        if isinstance(piece, CallBegin):
            arguments = ""
        elif isinstance(piece, CallArguments):
            arguments += piece.text
        elif isinstance(piece, CallBroken):
            shown.append(arguments)
    return shown


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def reasoning_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
