"""JSON schemas of clients: how large they may be, which numbers they may have, and what keeps a small model from going
on for ever.

Does not know which keywords can be compiled (`text/grammar_process.py` finds that out).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

import msgspec

from phalanx.server.fields.refusals import invalid, show, show_place, too_deep
from phalanx.text.schema_places import definitions, reached, subschemas, with_parts

MAX_DEPTH = 100  # JSON values inside each other; llguidance reads 127, and OpenAI takes a fifth
MAX_ENUM = 4096  # values of one enum; OpenAI takes 1,000

EXACT = 1 << 53
"""Up to here a float of 64 bits is every integer; llguidance computes with such floats."""
LARGEST = 1 << 63  # its bounds of integers have 64 bits, and at the least of them it recurses until its stack ends
MOST_MULTIPLE = (1 << 32) // 10  # its remainders have 32 bits, and a digit is appended to them
LARGEST_POWER = 308  # of ten, by which its JSON library multiplies or divides a float's digits
EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
"""A bound, and the keyword by which it is exclusive: true before draft 6, a bound itself since."""

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
    level: list[tuple[str, Any]] = [(place, schema)]
    for _ in range(MAX_DEPTH):
        level = [inner for path, value in level for inner in _inner(path, value)]
        for path, value in level:
            if path.endswith(".enum") and isinstance(value, list) and len(value) > MAX_ENUM:
                raise invalid(place, f"{path} has {len(value)} values; at most {MAX_ENUM} are allowed.")
        if not level:
            return
    raise too_deep(place, MAX_DEPTH)


def check_numbers(schema: Mapping[str, Any], place: str, *within: str) -> None:
    """Refuse a schema with a number that its grammar would not hold exactly, in any part that is compiled.

    Args:
        place: the field, for errors.
        within: where the schema stands in it, for errors.

    Raises:
        InvalidRequest: names the number's place.
    """
    for keys, part in reached(schema):
        for inner, number, is_exact in _numbers(part):
            if not (is_exact and _is_read(number)):
                where = show_place(".".join([place, *within, *keys, *inner]))
                safe = f"one up to {MOST_MULTIPLE}" if inner == ["multipleOf"] else "numbers of up to 15 digits"
                raise invalid(place, f"{where} is {show(number)}, which cannot be compiled exactly; {safe} can.")


def _numbers(part: Mapping[str, Any]) -> Iterator[tuple[list[str], float, bool]]:
    """The numbers of a schema, but not of those inside it: with the keys that lead to each, and whether it is exact."""
    for keyword in ("const", "enum"):
        for keys, leaf in _leaves([keyword], part.get(keyword)):
            yield keys, leaf, _keeps(leaf, as_decimal=isinstance(leaf, float))
    for inclusive, exclusive in EXCLUSIVE.items():
        if _is_number(value := part.get(inclusive)):
            limit = EXACT if part.get(exclusive) is True else LARGEST
            yield [inclusive], value, (abs(value) < limit and _keeps(value)) or _is_int64(part, inclusive)
        if _is_number(value := part.get(exclusive)):
            yield [exclusive], value, abs(value) < EXACT  # 1 is added or subtracted
    if _is_number(value := part.get("multipleOf")):
        yield ["multipleOf"], value, _coefficient(value) <= MOST_MULTIPLE


def _leaves(keys: list[str], value: Any) -> Iterator[tuple[list[str], float]]:
    """The numbers anywhere inside a value."""
    if _is_number(value):
        yield keys, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _leaves([*keys, str(key)], inner)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keeps(number: float, *, as_decimal: bool = True) -> bool:
    """Whether a grammar says exactly this number.

    Args:
        as_decimal: it may be written as a float's shortest decimal: not of a constant integer.
    """
    if abs(number) <= EXACT:
        return True
    if abs(number) >= LARGEST or float(number) != number:
        return False
    return not as_decimal or Decimal(repr(float(number))) == int(number)


def _is_int64(part: Mapping[str, Any], keyword: str) -> bool:
    """Whether this is the largest integer of 64 bits as an integer's bound, which is exact by rounding twice."""
    return keyword == "maximum" and part.get("type") == "integer" and bool(part[keyword] == LARGEST - 1)


def _coefficient(number: float) -> int:
    """A number without its point: 25 of 0.25."""
    if abs(number) >= LARGEST:
        return LARGEST
    significand, exponent = _digits(Decimal(repr(number)).normalize())
    return int(significand * 10 ** max(0, exponent))


def _is_read(number: float) -> bool:
    """Whether llguidance's JSON library makes this float of its text, and not a neighbour. It rounds twice."""
    if isinstance(number, int) or (abs(number) < 1e6 and number == round(number, 6)):  # twelve digits: fast, and exact
        return True
    for text in (repr(number), msgspec.json.encode(number).decode()):
        significand, exponent = _digits(Decimal(text))
        if abs(exponent) > LARGEST_POWER:
            return False
        power = float(f"1e{abs(exponent)}")
        if abs(number) != (significand * power if exponent >= 0 else significand / power):
            return False
    return True


def _digits(number: Decimal) -> tuple[int, int]:
    """Digits and exponent, as the number is written."""
    _, digits, exponent = number.as_tuple()
    return int("".join(map(str, digits))), int(exponent)


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


def _inner(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}.{key}", inner) for key, inner in value.items())
    elif isinstance(value, list):
        yield from ((f"{path}[{i}]", inner) for i, inner in enumerate(value) if isinstance(inner, (dict, list)))
