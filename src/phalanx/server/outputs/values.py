"""Converts parameters that models write as plain text to JSON, by the tool's schema.

Follows mlx-lm's parsers of whole texts (`mlx_lm/tool_parsers/`), except that a parameter of several types is read as
one of its types.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from phalanx.server.outputs.json_scanner import is_json

MAX_REFERENCES = 8  # that lead from one schema to the next
MAX_CHOICES = 256  # of one schema that are searched for types
MAX_PYTHON = 2**15  # characters of a value that is read as Python; it takes some 40 ms
MAX_DEPTH = 50  # brackets inside each other in a value that is read as Python

_STRINGS = ("string", "str", "text", "varchar", "char", "enum")
_BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), "true") | dict.fromkeys(("false", "0", "no", "off"), "false")
_INTEGERS = ("int", "uint", "long", "short", "unsigned")


def to_json(value: Any) -> str:
    """The value's JSON.

    Raises:
        ValueError: it has none (infinite numbers, sets).
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a character can only be sent as an escape sequence
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return text


def string_json(text: str) -> str:
    """The JSON of a string, without its quotes; the JSON of parts joins to that of the whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a local reference leads to; any other schema itself."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for name in reference[2:].split("/"):
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that values of a schema may have, by `type`, `enum`, `const`, `anyOf`, `oneOf` and `allOf`."""
    types: set[str] = set()
    found = [schema]
    for schema in found:  # grows in the loop, up to MAX_CHOICES
        schema = resolved(schema, root)
        if not isinstance(schema, dict):
            continue
        declared = schema.get("type")
        names = declared if isinstance(declared, list) else [declared]
        types |= {name.lower() for name in names if isinstance(name, str)}
        if declared is None:
            types |= {_type_of(value) for value in _list(schema.get("enum"))}
            types |= {_type_of(schema["const"])} if "const" in schema else set()
        for several in ("anyOf", "oneOf", "allOf"):
            found += _list(schema.get(several))[: MAX_CHOICES - len(found)]
    return frozenset(types)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def convert_typed(text: str, types: Collection[str], *, containers: bool) -> str:
    """The JSON of a value as Qwen3-Coder and MiniMax write it: a string is not quoted, null is one word.

    `containers`: a value without a declared type that is a JSON object or list becomes one.
    """
    if not set(types) & set(_STRINGS) and types:
        text = text.strip()
    if text.lower() == "null":
        return "null"
    if not types:
        is_container = containers and text.lstrip().startswith(("{", "[")) and is_json(text)
        return text.strip() if is_container else to_json(text)
    if len(types) > 1 and "null" in types and text.lower() in ("none", "nil"):
        return "null"
    for kind in sorted(types, key=_specific):
        try:
            return _of_type(text, kind)
        except (ValueError, OverflowError):
            continue
    return convert_guessed(text) if not set(types) & set(_STRINGS) else to_json(text)


def _specific(kind: str) -> int:
    """Rank of a type in the order of tries; a string comes last, since every text is one."""
    order = ("null", "int", "num", "float", "bool", "obj", "dict", "arr", "list")
    return next((i for i, start in enumerate(order) if kind.startswith(start)), len(order) + (kind in _STRINGS))


def _of_type(text: str, kind: str) -> str:
    """The JSON of a text as one type.

    Raises:
        ValueError, OverflowError: the text is of another type.
    """
    if kind in _STRINGS:
        return to_json(text)
    if kind.startswith(_INTEGERS):
        return to_json(_integer(text))
    if kind.startswith(("num", "float")):
        number = float(text)
        return to_json(_integer(text) if number.is_integer() else number)
    if kind in ("boolean", "bool", "binary"):
        if (word := text.strip().lower()) not in _BOOLEANS:
            raise ValueError(text)
        return _BOOLEANS[word]
    if kind == "null":
        raise ValueError(text)
    found = _constant(text)
    opening = "{" if kind.startswith(("obj", "dict")) else "[" if kind.startswith(("arr", "list")) else ""
    if found is None or not found.startswith(opening):
        raise ValueError(text)
    return found


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def convert_guessed(text: str) -> str:
    """The JSON of a value that is written as JSON or as Python, and of any other text as a string (GLM)."""
    found = _constant(text)
    return to_json(text) if found is None else found


def convert_json(text: str) -> str:
    """The JSON of a value that is written as JSON, and of any other text as a string (Muse, Kimi K3)."""
    return text.strip() if is_json(text) else to_json(text)


def python_json(text: str) -> str:
    """The JSON of a Python constant. JSON's true, false and null are accepted, too.

    Raises:
        ValueError: the text is not one.
    """
    if len(text) > MAX_PYTHON:
        raise ValueError("too long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on escape sequences and the like in a model's text
            tree = ast.parse(text.strip(), mode="eval").body
        return to_json(ast.literal_eval(_Constants().visit(tree)))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


class _Constants(ast.NodeTransformer):
    """Accepts JSON's true, false and null, which models write inside lists and dictionaries."""

    _values = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._values:
            return node
        return ast.copy_location(ast.Constant(self._values[node.id]), node)


def _constant(text: str) -> str | None:
    """The JSON of a text that is JSON, newlines in strings allowed, or a Python constant; None for other texts."""
    if is_json(text):
        return text.strip()
    depth = deepest = 0
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return None
    try:
        return to_json(json.loads(text, strict=False))
    except ValueError:
        pass
    try:
        return python_json(text)
    except ValueError:
        return None


class StreamedString:
    """A string's JSON, as its text comes.

    Args:
        before: white space that the format puts before a value: one character, or none.
        may_be_null: the text `null` means null.
    """

    def __init__(self, before: str, *, may_be_null: bool) -> None:
        self._before = before
        self._may_be_null = may_be_null
        self._newline = ""  # a newline that may belong to the format, after the value
        self._held = ""  # a beginning of null
        self._begun = False  # the opening quote was sent

    def add(self, text: str) -> str:
        """JSON that is certain with this text."""
        if not text:
            return ""
        text = self._newline + text.removeprefix(self._before)
        self._before = ""
        body = text.removesuffix("\n")
        self._newline = text[len(body) :]
        return self._certain(self._held + body)

    def finish(self, after: str) -> str:
        """The rest of the JSON, with the closing quote. `after`: white space that the format may put after the text."""
        rest = self._held + self._newline.removesuffix(after)
        if self._may_be_null and not self._begun and rest.lower() == "null":
            return "null"
        return self._quoted(rest) + '"'

    def _certain(self, text: str) -> str:
        if self._may_be_null and not self._begun and "null".startswith(text.lower()):
            self._held = text
            return ""
        self._held = ""
        return self._quoted(text)

    def _quoted(self, text: str) -> str:
        opening = "" if self._begun else '"'
        self._begun = True
        return opening + string_json(text)
