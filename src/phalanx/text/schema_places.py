"""Walks the parts of a JSON schema, and finds the part that a compiler refuses.

llguidance names its reason, such as `Unimplemented keys: ["not"]`, but not the place. That is the part of the schema
that alone is refused for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
MAPS = ("properties", "patternProperties", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
NESTING = frozenset({*ONE, *LISTS, *MAPS})
MAX_TRIED = 1000  # parts of a schema


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The schemas directly inside a schema, each with the keys that lead to it; definitions are left out."""
    if NESTING.isdisjoint(schema):  # most are leaves, and a body may hold thousands
        return
    for key in ONE:
        if isinstance(schema.get(key), dict):
            yield [key], schema[key]
    for key in LISTS:
        if isinstance(schema.get(key), list):
            yield from (([key, str(i)], part) for i, part in enumerate(schema[key]) if isinstance(part, dict))
    for key in MAPS:
        yield from _in_map(schema, key)


def definitions(schema: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The schemas that a schema defines for references, each with the keys that lead to it."""
    for key in DEFINITIONS:
        if key in schema:
            yield from _in_map(schema, key)


def reached(schema: Mapping[str, Any]) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    """The schema and every part that a compiler reaches from it, once each, with the keys that lead to it.

    A reference may lead to any place, for instance into a group of definitions.
    """
    seen: set[int] = set()
    todo: list[tuple[list[str], Mapping[str, Any]]] = [([], schema)]
    while todo:
        keys, part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield keys, part
        todo += (([*keys, *inner], found) for inner, found in (*subschemas(part), *definitions(part)))
        if isinstance(reference := part.get("$ref"), str) and reference.startswith("#/"):
            path = [unquote(key).replace("~1", "/").replace("~0", "~") for key in reference[2:].split("/")]
            if isinstance(target := _at(schema, path), dict):
                todo.append((path, target))


def _at(value: Any, path: list[str]) -> Any:
    """The value that these keys lead to; None if they lead nowhere."""
    for key in path:
        if isinstance(value, list) and key.isdecimal() and len(key) < 9 and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def with_parts(schema: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A copy of a schema in which `change` was applied to the schemas directly inside it and to its definitions."""
    copy = dict(schema)
    for keys, part in (*subschemas(schema), *definitions(schema)):
        if len(keys) == 1:
            copy[keys[0]] = change(part)
            continue
        outer, inner = keys
        if copy[outer] is schema[outer]:
            copy[outer] = schema[outer].copy()
        copy[outer][int(inner) if isinstance(copy[outer], list) else inner] = change(part)
    return copy


def place_of(schema: dict[str, Any], reason: str, refused: Callable[[dict[str, Any]], str]) -> list[str]:
    """The keys that lead to the smallest part that is refused for this reason; empty if no part alone is.

    Args:
        refused: schema -> the reason why it is refused, or "".
    """
    known = {key: schema[key] for key in DEFINITIONS if key in schema}
    named = dict(_named_definitions(schema))
    tried = 0

    def same(part: dict[str, Any]) -> bool:
        nonlocal tried
        tried += 1
        return tried <= MAX_TRIED and refused({**known, **part}) == reason

    place: list[str] = []
    part = schema
    followed: set[str] = set()
    while True:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference in named and reference not in followed:
            followed.add(reference)
            keys, target = named[reference]
            if same(target):
                place, part = keys, target
                continue
        parts = (found for found in subschemas(part) if found[1].get("$ref") not in followed)
        inner = next((found for found in parts if same(found[1])), None)
        if inner is None:
            return place
        place, part = place + inner[0], inner[1]


def _named_definitions(schema: Mapping[str, Any]) -> Iterator[tuple[str, tuple[list[str], dict[str, Any]]]]:
    for keys, part in definitions(schema):
        yield "#/" + "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys), (keys, part)


def _in_map(schema: Mapping[str, Any], key: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    if isinstance(schema.get(key), dict):
        yield from (([key, name], part) for name, part in schema[key].items() if isinstance(part, dict))
