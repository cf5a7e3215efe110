"""Writes grammars, for llguidance, of calls in a model's own format, and of an answer after reasoning.

`format_parser.py` parses every text that a grammar here allows into whole calls whose arguments follow the tool's
schema (except `format`, which is not enforced). Marks that are tokens of the vocabulary are written as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.server.outputs import harmony
from phalanx.server.outputs.formats import ReasoningFormat, ToolFormat
from phalanx.server.outputs.gemma_calls import GemmaCalls
from phalanx.server.outputs.harmony import HarmonyCalls
from phalanx.server.outputs.headed_calls import HeadedCalls
from phalanx.server.outputs.json_calls import JsonCalls
from phalanx.server.outputs.lark import Lark, literal, pattern
from phalanx.server.outputs.markup_calls import MarkupCalls
from phalanx.server.outputs.markup_grammar import call_in_gemma, call_in_markup, call_in_python
from phalanx.server.outputs.output_formats import OutputFormats
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.outputs.pythonic_calls import PythonicCalls


def tool_grammar(formats: OutputFormats, tools: Sequence[ToolDefinition], *, parallel: bool) -> dict[str, Any]:
    """An answer of one call of one of `tools`; with `parallel`, of one or more.

    Returns:
        An entry of llguidance's `{"grammars": [...]}`.

    Raises:
        GrammarUnsupported: the model's format cannot bind a call to a tool's schema.
        ValueError: the model has no format of calls, or there are no tools.
    """
    if formats.tools is None or not tools:
        raise ValueError("a grammar of calls needs tools and a model with a format for them")
    lark = Lark(formats.added_tokens)
    return lark.grammar(_calls(lark, formats.tools.format, tools, parallel))


def with_reasoning(
    answer: Mapping[str, Any], formats: OutputFormats, *, in_reasoning: bool, is_calls: bool = False
) -> str:
    """The whole output as llguidance's serialised grammar: reasoning if the model reasons, and then the answer.

    Args:
        answer: an entry of llguidance's list: of `tool_grammar` (`is_calls`), or of an answer's own grammar.
        in_reasoning: the prompt ends inside of reasoning, so that the output begins there.
    """
    lark = Lark(formats.added_tokens)
    tools = formats.tools.format if formats.tools else None
    if isinstance(tools, HarmonyCalls) or (formats.reasoning and formats.reasoning.open.startswith(harmony.CHANNEL)):
        start = _after_analysis(lark, is_calls)
    elif formats.reasoning:
        start = _after_reasoning(lark, formats.reasoning, tools, in_reasoning)
    else:
        return json.dumps({"grammars": [answer]})
    return json.dumps({"grammars": [lark.grammar(f"{start} @answer"), {**answer, "name": "answer"}]})


def _after_reasoning(lark: Lark, shape: ReasoningFormat, tools: ToolFormat | None, in_reasoning: bool) -> str:
    """The part before the answer: reasoning that the prompt began, or that the model may begin."""
    ends = (shape.close, *(tools.opens if tools and not isinstance(tools, HarmonyCalls) else ()))
    block = _text_until(lark, ends) + " " + lark.rule(r'"\n"? "\n"?')
    if in_reasoning:
        return block
    return lark.rule(f"{lark.text(shape.open)} {block}") + "?"


def _after_analysis(lark: Lark, is_calls: bool) -> str:
    """Harmony: an analysis message or none, and the header of the answer's message."""
    opening = lark.text(harmony.CHANNEL + "analysis" + harmony.MESSAGE)
    following = lark.text(harmony.START + "assistant")
    analysis = lark.rule(f"{opening} {_text_until(lark, (harmony.ENDS[0], *harmony.MARKS))} {following}")
    return f"{analysis}? " + ("" if is_calls else lark.text(harmony.CHANNEL + "final" + harmony.MESSAGE))


def _text_until(lark: Lark, marks: Sequence[str]) -> str:
    """A text without any of `marks`, and the first of them after it."""
    excluded = "|".join(literal(mark) for mark in dict.fromkeys(marks))
    body = lark.terminal(pattern("(?s:.*)") + " & ~" + pattern(f"(?s:.*)({excluded})(?s:.*)"))
    if lark.begins_with_token(marks[0]):
        return f"{body} {lark.text(marks[0])}"
    return lark.terminal(f"{body} {json.dumps(marks[0])}")


def _calls(lark: Lark, form: ToolFormat, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """An expression for all calls of an answer."""
    match form:
        case JsonCalls():
            return _between(lark, form, [_object(lark, form.arguments, tool) for tool in tools], parallel)
        case HeadedCalls():
            return _headed(lark, form, tools, parallel)
        case MarkupCalls():
            opening, closing = form.section if form.section else ("", "")
            gap = lark.rule(f"{json.dumps(form.gap)}?") if form.gap else '""'
            call = _one_of(lark, [call_in_markup(lark, form, tool) for tool in tools])
            inside = f"({call} {gap})+" if parallel and form.shared else f"{call} {gap}"
            section = lark.rule(f"{lark.text(opening)} {gap} {inside} {lark.text(closing)}") if opening else call
            return f"{section} ({gap} {section})*" if parallel and not form.shared else section
        case PythonicCalls():
            call = _one_of(lark, [call_in_python(lark, tool) for tool in tools])
            opening, closing = ("", "") if form.bare else (form.open, form.close)
            more = f'(", " {call})*' if parallel else ""
            return f"{lark.text(opening + '[')} {call} {more} {lark.text(']' + closing)}"
        case GemmaCalls():
            call = _one_of(lark, [call_in_gemma(lark, form, tool) for tool in tools])
            block = lark.rule(f"{lark.text(form.open)} {call} {lark.text(form.close)}")
            return f"{block}+" if parallel else block
        case HarmonyCalls():  # one call ends the answer
            json_follows = f" {harmony.CONSTRAIN}json{harmony.MESSAGE}"
            openings = [f"{harmony.CHANNEL}commentary to=functions.{tool.name}{json_follows}" for tool in tools]
            calls = zip(openings, tools, strict=True)
            return _one_of(lark, [f"{lark.text(opening)} {_arguments(lark, tool)}" for opening, tool in calls])


def _one_of(lark: Lark, expressions: Sequence[str]) -> str:
    return lark.rule(" | ".join(expressions))


def _arguments(lark: Lark, tool: ToolDefinition) -> str:
    """An expression for all arguments as one JSON object, without members that the schema does not name."""
    schema = {"type": "object", **(tool.parameters or {"properties": {}})}
    if schema.get("properties") == {} and not schema.get("required"):
        schema.setdefault("additionalProperties", False)
    return lark.json(schema)


def _object(lark: Lark, key: str, tool: ToolDefinition) -> str:
    """An expression for `{"name": ..., "arguments": ...}`."""
    opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
    return lark.rule(f'{json.dumps(opening)} {_arguments(lark, tool)} "}}"')


def _between(lark: Lark, form: JsonCalls, objects: Sequence[str], parallel: bool) -> str:
    call = _one_of(lark, objects)
    separator = json.dumps(f"{form.separator} ")
    if not form.bare:
        call = lark.rule(f'{lark.text(form.open)} "\\n" {call} "\\n" {lark.text(form.close)}')
        separator = r'"\n"'
    return f"{call} ({separator} {call})*" if parallel else call


def _headed(lark: Lark, form: HeadedCalls, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    if form.lists and form.arguments not in lark.tokens:  # a model of before the headers
        call = _one_of(lark, [_object(lark, "arguments", tool) for tool in tools])
        more = f'(", " {call})*' if parallel else ""
        return f'{lark.text(form.open)} "[" {call} {more} "]"'
    calls = []
    for tool in tools:
        name, _, after = form.header.partition("{index}")
        parts = [lark.text(form.open + name.format(name=tool.name))]
        parts += [lark.terminal("/[0-9]{1,3}/")] if "{index}" in form.header else []
        parts += [lark.text(after + form.arguments + form.before), _arguments(lark, tool)]
        calls.append(" ".join([*parts, lark.text(form.after + form.close)]))
    call = _one_of(lark, calls)
    opening, closing = form.section if form.section else ("", "")
    return f"{lark.text(opening)} {call}{'+' if parallel else ''} {lark.text(closing)}"
