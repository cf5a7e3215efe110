"""JSON schemas of clients: how large they may be, and what keeps a small model from going on for ever.

Does not know which keywords can be compiled (`text/grammar_process.py` finds that out), nor which numbers
(`schema_numbers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.server.fields.refusals import invalid, show_place, too_deep
from phalanx.text.schema_places import definitions, subschemas, with_parts

MAX_DEPTH = 100  # JSON values inside each other; llguidance reads 127, and OpenAI takes a fifth
MAX_ENUM = 4096  # values of one enum; OpenAI takes 1,000

FORMAT_CHARS = {"date-time": 35, "time": 24, "duration": 40, "email": 64, "hostname": 63}
"""The most that a text of a format has; else a model may write digits for ever. Nine digits of a second's fraction; and
what RFC 5321 and RFC 1035 allow the first part alone, which llguidance does not count."""
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}.{{7}}[0-5]", "time": "^.{6}[0-5]"}
"""What llguidance lets through besides RFC 3339's dates and times: a 29th of February in every year, and a leap second
in every minute. No leap second at all is less than the RFC allows, and enough."""
COMBINING = frozenset({"properties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"})
"""Keywords of which two describe one object together."""


def check_size(schema: Mapping[str, Any], place: str) -> None:
    """Refuse a schema that is nested too deeply, or has an enum that is too long.

    Raises:
        InvalidRequest: names the place.
    """
    level: list[tuple[str, str, Any]] = [(place, "", schema)]
    for _ in range(MAX_DEPTH):
        level = [inner for path, _, value in level for inner in _inner(path, value)]
        for path, key, value in level:
            if key == "enum" and isinstance(value, list) and len(value) > MAX_ENUM:
                raise invalid(place, f"{path} has {len(value)} values; at most {MAX_ENUM} are allowed.")
        if not level:
            return
    raise too_deep(place, MAX_DEPTH)


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema to which the answers end sooner; each is an answer to `schema` as well.

    Objects with named properties have no others unless `schema` says so. OpenAI's strict schemas say it themselves, and
    vLLM's other compilers add it as well. A schema that puts objects together from several parts is left alone, because
    one part may name what another one does not. Texts of a format are not longer than any that is in use, and dates are
    in the calendar.
    """
    if any(_combines(part) for part in _all_parts(schema)):
        return _exact(schema)
    return _exact(_bounded(schema))


def _exact(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose dates and times are valid."""
    copy, form = with_parts(schema, _exact), schema.get("format")
    others = copy.get("allOf", [])
    if isinstance(form, str) and form in FORMAT_PATTERNS and isinstance(others, list):
        copy["allOf"] = [*others, {"pattern": FORMAT_PATTERNS[form]}]
    return copy


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    copy = with_parts(schema, _bounded)
    properties, required, form = schema.get("properties"), schema.get("required", []), schema.get("format")
    if (
        isinstance(properties, dict)
        and properties
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and not schema.keys() & {"additionalProperties", "minProperties", "unevaluatedProperties"}
    ):
        copy["additionalProperties"] = False
    if isinstance(form, str) and form in FORMAT_CHARS and not schema.keys() & {"minLength", "maxLength"}:
        copy["maxLength"] = FORMAT_CHARS[form]
    return copy


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether an object is described in more than one place."""
    parts = schema.keys() & COMBINING
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or (len(parts) > 1 and bool({"properties", "allOf"} & parts))


def _all_parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for _, part in (*subschemas(schema), *definitions(schema)):
        yield from _all_parts(part)


def _inner(path: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """The values directly inside a value: place, shortened since each has all names above it, key in an object."""
    if isinstance(value, dict):
        yield from ((show_place(f"{path}.{key}"), key, inner) for key, inner in value.items())
    elif isinstance(value, list):
        parts = ((i, inner) for i, inner in enumerate(value) if isinstance(inner, (dict, list)))
        yield from ((show_place(f"{path}[{i}]"), "", inner) for i, inner in parts)
