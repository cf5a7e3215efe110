"""Limits the size of clients' JSON schemas, and bounds answers that a small model would otherwise never end.

`text/grammar_process.py` finds the keywords that cannot be compiled, `schema_numbers.py` the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.server.fields.refusals import invalid, show_place, too_deep
from phalanx.text.schema_places import definitions, subschemas, with_parts

MAX_DEPTH = 100  # JSON values inside each other; llguidance reads 127, and OpenAI takes a fifth
MAX_ENUM = 4096  # values of one enum; OpenAI takes 1,000

FORMAT_CHARS = {"date-time": 35, "time": 24, "duration": 40, "email": 64, "hostname": 63}
"""Most characters of a text of a format; otherwise a model may write digits for ever. Times have nine digits of a
second's fraction; email and hostname have the limits of RFC 5321 and RFC 1035 for the first part, which llguidance does
not count."""
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}.{{7}}[0-5]", "time": "^.{6}[0-5]"}
"""Exclude dates and times that llguidance allows beyond RFC 3339: a 29th of February in every year, and a leap second
in every minute. Allowing no leap second is stricter than the RFC, and enough."""
COMBINING = frozenset({"properties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"})
"""Keywords that describe one object together if a schema has two of them."""


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
    """A stricter schema, whose answers end sooner and also match `schema`.

    Objects with named properties have no others unless `schema` allows them. OpenAI's strict schemas require that
    themselves, and vLLM's other compilers add it as well. A schema that composes objects from several parts is left
    alone, because one part may name properties that another one does not. Texts of a format have their practical
    lengths, and dates exist in the calendar.
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
