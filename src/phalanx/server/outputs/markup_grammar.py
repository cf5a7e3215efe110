"""Grammars of calls with single parameters: in markup, as Python, in Gemma's format.

Parameters come in the order of the schema, also optional ones. A string is free text that the format's parser returns
unchanged; a value of another type is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.server.outputs import values
from phalanx.server.outputs.gemma_calls import GemmaCalls
from phalanx.server.outputs.lark import GrammarUnsupported, Lark, literal, pattern
from phalanx.server.outputs.markup_calls import MarkupCalls
from phalanx.server.outputs.pieces import ToolDefinition

_COMBINED = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentRequired", "dependentSchemas")


class CallParameter:
    """A parameter of a tool: its schema, and whether a call must have it."""

    def __init__(self, tool: ToolDefinition, name: str, schema: Any, *, required: bool) -> None:
        self.tool = tool
        self.name = name
        self.required = required
        self.root = tool.parameters
        self.schema: dict[str, Any] = {}
        if isinstance(found := values.resolved(schema, self.root), dict):
            self.schema = found
        self.types = values.types_of(self.schema, self.root)

    def with_definitions(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A part of the schema, with the definitions that it refers to."""
        return {**{key: self.root[key] for key in ("$defs", "definitions") if key in self.root}, **schema}


def parameters_of(tool: ToolDefinition) -> list[CallParameter]:
    """The parameters of a tool, in the order of its schema.

    Raises:
        GrammarUnsupported: the set of parameters depends on their values.
    """
    schema = values.resolved(tool.parameters, tool.parameters)
    if not isinstance(schema, dict):
        return []
    for keyword in _COMBINED:
        if keyword in schema:
            raise GrammarUnsupported(f"tool {tool.name!r}: calls of this model cannot be bound to {keyword!r}")
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    extra: dict[str, Any] = {name: {} for name in required if isinstance(name, str) and name not in properties}
    return [
        CallParameter(tool, name, part, required=name in required)
        for name, part in [*properties.items(), *extra.items()]
    ]


def call_in_markup(lark: Lark, form: MarkupCalls, tool: ToolDefinition) -> str:
    """An expression for one call, from its opening to its closing mark."""
    gap = lark.rule(f"{json.dumps(form.gap)}?") if form.gap else ""
    parts = [lark.text(form.call[0] + _head(form.written_call, tool.name, index="1") + form.call_head), gap]
    for parameter in parameters_of(tool):
        written = _head(form.written_key, parameter.name, type=next(iter(sorted(parameter.types)), "object"))
        opening = [lark.text(form.parameter[0] + written + form.key_head[0])]
        for mark in form.key_head[1:]:
            opening += [gap, lark.text(mark)]
        rule = lark.rule(" ".join([*opening, _value(lark, form, parameter), gap]))
        parts.append(rule if parameter.required else f"{rule}?")
    return lark.rule(" ".join(filter(None, [*parts, lark.text(form.call[1])])))


def call_in_python(lark: Lark, tool: ToolDefinition) -> str:
    """An expression for `name(key=value, ...)`."""
    members = []
    for parameter in parameters_of(tool):
        if not re.fullmatch(r"\w+", parameter.name):
            raise GrammarUnsupported(f"tool {tool.name!r}: parameter {parameter.name!r} is not a name in Python")
        value = lark.json(parameter.with_definitions(parameter.schema))
        members.append((lark.rule(f"{lark.text(parameter.name + '=')} {value}"), parameter.required))
    return lark.rule(f"{lark.text(tool.name + '(')} {_listed(lark, members, ', ')} {lark.text(')')}")


def call_in_gemma(lark: Lark, form: GemmaCalls, tool: ToolDefinition) -> str:
    """An expression for `call:name{key:value,...}`."""
    members = []
    for parameter in parameters_of(tool):
        if not re.fullmatch(r"[\w-]+", parameter.name):
            raise GrammarUnsupported(
                f"tool {tool.name!r}: parameter {parameter.name!r} cannot be written by this model"
            )
        value = lark.json(parameter.with_definitions(parameter.schema))
        if parameter.types == {"string"}:
            texts = _choices(parameter) if _has_choices(parameter) else None
            value = " ".join([lark.text(form.quote), _free_text(lark, parameter, (form.quote,), texts)])
        members.append((lark.rule(f"{lark.text(parameter.name + ':')} {value}"), parameter.required))
    return lark.rule(f"{lark.text(f'call:{tool.name}' + '{')} {_listed(lark, members, ',')} {lark.text('}')}")


def _head(written: str, name: str, **more: str) -> str:
    if re.search(r"[\s\"<>]", name):
        raise GrammarUnsupported(f"the name {name!r} cannot be written in this model's calls")
    return written.format(name=name, **more)


def _listed(lark: Lark, members: Sequence[tuple[str, bool]], separator: str) -> str:
    """Members in order, with or without optional ones, with separators between them."""
    following = begins = '""'
    for member, required in reversed(members):
        begins = lark.rule(f"{member} {following}" + ("" if required else f" | {begins}"))
        following = lark.rule(f"{json.dumps(separator)} {member} {following}" + ("" if required else f" | {following}"))
    return begins


def _value(lark: Lark, form: MarkupCalls, parameter: CallParameter) -> str:
    """An expression for a parameter's value and its closing mark."""
    close = lark.text(form.pad + form.parameter[1])
    schema = parameter.schema
    as_text = "string" in parameter.types or (not parameter.types and form.rule in ("qwen", "minimax", "minicpm"))
    if form.rule == "muse" or (form.rule == "kimi" and parameter.types != {"string"}):
        as_text = False
    if not as_text:
        value = lark.json(parameter.with_definitions(schema))
        return f"{lark.text(form.pad)} {value} {close}".strip()
    if _has_choices(parameter):
        texts = [text for text in _choices(parameter) if _survives(form, text, parameter)]
        return f"{lark.text(form.pad)} {_free_text(lark, parameter, form.ends, texts, form.pad)}".strip()
    value = _free_text(lark, parameter, form.ends, None, form.pad, form)
    others = [lark.json(parameter.with_definitions(part)) for part in _other_types(parameter)]
    alternatives = [value, *(f"{other} {close}" for other in others)]
    return f"{lark.text(form.pad)} ({' | '.join(alternatives)})".strip()


def _has_choices(parameter: CallParameter) -> bool:
    return "enum" in parameter.schema or "const" in parameter.schema


def _choices(parameter: CallParameter) -> list[str]:
    """All texts of a parameter with a fixed set of values."""
    allowed = parameter.schema.get("enum", [parameter.schema.get("const")])
    return [value if isinstance(value, str) else json.dumps(value) for value in allowed]


def _survives(form: MarkupCalls, text: str, parameter: CallParameter) -> bool:
    """Whether the format's parser turns this text into one of the allowed values."""
    if form.is_string(parameter.schema, parameter.root):
        string = values.StreamedString(form.pad, may_be_null=form.rule in ("qwen", "minimax"))
        read = string.add(form.pad + text + form.pad) + string.finish(form.pad)
    else:
        read = form.convert(form.pad + text + form.pad, parameter.schema, parameter.root)
    allowed = parameter.schema.get("enum", [parameter.schema.get("const")])
    return json.loads(read) in allowed


def _other_types(parameter: CallParameter) -> Iterator[dict[str, Any]]:
    """Schemas for the other types of a parameter that may be a string."""
    if isinstance(declared := parameter.schema.get("type"), list):
        yield from ({**parameter.schema, "type": name} for name in declared if name != "string")
    for several in ("anyOf", "oneOf"):
        for part in parameter.schema.get(several, ()):
            if "string" not in values.types_of(part, parameter.root):
                yield part


def _free_text(
    lark: Lark,
    parameter: CallParameter,
    marks: Sequence[str],
    texts: Sequence[str] | None,
    pad: str = "",
    form: MarkupCalls | None = None,
) -> str:
    """An expression for a text without any of `marks`, or for one of `texts`, and the first mark after it."""
    close = marks[0]
    if texts is not None:
        texts = [text for text in texts if not any(mark in text for mark in marks)]
        if not texts:
            raise GrammarUnsupported(f"tool {parameter.tool.name!r}: no value of {parameter.name!r} can be written")
        return "(" + " | ".join(lark.text(text + pad + close) for text in texts) + ")"
    excluded = "|".join(map(literal, marks))
    conditions = [pattern("(?s:.*)"), "~" + pattern(f"(?s:.*)({excluded})(?s:.*)"), *_conditions(parameter)]
    if form and form.rule in ("qwen", "minimax", "minicpm"):
        conditions.append("~" + pattern(r"\s*(?i:null)\s*"))
    if form and form.rule == "minicpm":
        conditions.append(pattern(r"[^<]*"))
    if form and parameter.types != {"string"}:  # the parser would read a text like another type's value as that
        conditions.append(pattern(r"[A-Za-z](?s:.*)"))
    body = lark.terminal(" & ".join(conditions))
    if lark.begins_with_token(close):
        text = lark.terminal(f"{body} {json.dumps(pad)}") if pad else body
        return f"{text} {lark.text(close)}"
    return lark.terminal(f"{body} {json.dumps(pad + close)}")


def _conditions(parameter: CallParameter) -> Iterator[str]:
    """The schema's constraints on a string, as regular expressions."""
    schema = parameter.schema
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if low or high != "":
        yield pattern(f"(?s:.){{{low},{high}}}")
    if isinstance(wanted := schema.get("pattern"), str):
        before = "" if wanted.startswith("^") else "(?s:.*)"
        after = "" if wanted.endswith("$") and not wanted.endswith("\\$") else "(?s:.*)"
        inner = wanted.removeprefix("^").removesuffix("" if after else "$")
        yield pattern(f"{before}({inner}){after}")
