"""Refuses numbers of a JSON schema that a grammar would not represent exactly.

llguidance computes with 64-bit floats, 64-bit bounds of integers and 32-bit multiples, and crashes its process at the
least 64-bit integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

import msgspec

from phalanx.server.fields.refusals import invalid, show, show_place
from phalanx.text.schema_places import reached

EXACT = 1 << 53
"""Below this, llguidance's 64-bit floats represent every integer."""
INT64_LIMIT = 1 << 63  # of its 64-bit bounds of integers; at the least of them it recurses until its stack overflows
MAX_MULTIPLE = (1 << 32) // 10  # its remainders have 32 bits, and it appends a digit to them
MAX_POWER = 308  # of ten, by which its JSON library multiplies or divides a float's digits
EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
"""A bound, and the keyword by which it is exclusive: true before draft 6, a bound itself since."""
JOINING = frozenset({"$ref", "anyOf", "oneOf"})
"""Keywords, besides allOf, that make a number a multiple of several: of their least common multiple."""


def check_numbers(schema: Mapping[str, Any], place: str, *within: str) -> None:
    """Refuse a schema with a number that its grammar would not represent exactly, in any compiled part.

    Args:
        place: the field, for errors.
        within: the schema's place in the field, for errors.

    Raises:
        InvalidRequest: names the number's place.
    """
    parts = list(reached(schema))
    joins = any("allOf" in part or ("multipleOf" in part and not JOINING.isdisjoint(part)) for _, part in parts)
    multiples: set[float] = set()  # few, since their product is limited
    for keys, part in parts:
        for inner, number, is_exact in _numbers(part):
            safe = "numbers of up to 15 digits"
            if inner == ["multipleOf"]:
                safe = f"one up to {MAX_MULTIPLE}, beside others in one number as a product,"
                multiples |= {abs(number)} - {0}
                is_exact = is_exact and not (joins and _coefficient(*multiples) > MAX_MULTIPLE)
            if not (is_exact and _is_read(number)):
                where = show_place(".".join([place, *within, *keys, *inner]))
                raise invalid(place, f"{where} is {show(number)}, which cannot be compiled exactly; {safe} can.")


def _numbers(part: Mapping[str, Any]) -> Iterator[tuple[list[str], float, bool]]:
    """The numbers of a schema, but not of those inside it: with the keys that lead to each, and whether it is exact."""
    for keyword in ("const", "enum"):
        for keys, leaf in _leaves([keyword], part.get(keyword)):
            yield keys, leaf, _keeps(leaf, as_decimal=isinstance(leaf, float))
    for inclusive, exclusive in EXCLUSIVE.items():
        if _is_number(value := part.get(inclusive)):
            limit = EXACT if part.get(exclusive) is True else INT64_LIMIT
            yield [inclusive], value, (abs(value) < limit and _keeps(value)) or _is_int64(part, inclusive)
        if _is_number(value := part.get(exclusive)):
            yield [exclusive], value, abs(value) < EXACT  # 1 is added or subtracted
    if _is_number(value := part.get("multipleOf")):
        yield ["multipleOf"], value, _coefficient(value) <= MAX_MULTIPLE


def _leaves(keys: list[str], value: Any) -> Iterator[tuple[list[str], float]]:
    """The numbers anywhere inside a value."""
    if _is_number(value):
        yield keys, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _leaves([*keys, str(key)], inner)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keeps(number: float, *, as_decimal: bool = True) -> bool:
    """Whether a grammar represents exactly this number.

    Args:
        as_decimal: the shortest decimal of a float may stand for it; not for a constant integer.
    """
    if abs(number) <= EXACT:
        return True
    if abs(number) >= INT64_LIMIT or float(number) != number:
        return False
    return not as_decimal or Decimal(repr(float(number))) == int(number)


def _is_int64(part: Mapping[str, Any], keyword: str) -> bool:
    """Whether this is the largest integer of 64 bits as an integer's bound, which is exact by rounding twice."""
    return keyword == "maximum" and part.get("type") == "integer" and bool(part[keyword] == INT64_LIMIT - 1)


def _coefficient(*numbers: float) -> int:
    """A number without its decimal point: 25 for 0.25; for several, the product, scaled to equally many decimals."""
    if any(abs(number) >= INT64_LIMIT for number in numbers):
        return INT64_LIMIT
    digits = [_digits(Decimal(repr(number)).normalize()) for number in numbers]
    least = min(0, *(exponent for _, exponent in digits))
    return math.prod(significand * 10 ** (exponent - least) for significand, exponent in digits)


def _is_read(number: float) -> bool:
    """Whether llguidance's JSON library, which rounds twice, reads this float's text as this float."""
    if isinstance(number, int) or (abs(number) < 1e6 and number == round(number, 6)):  # twelve digits: fast, and exact
        return True
    for text in (repr(number), msgspec.json.encode(number).decode()):
        significand, exponent = _digits(Decimal(text))
        if abs(exponent) > MAX_POWER:
            return False
        power = float(f"1e{abs(exponent)}")
        if abs(number) != (significand * power if exponent >= 0 else significand / power):
            return False
    return True


def _digits(number: Decimal) -> tuple[int, int]:
    """Digits and exponent, as the number is written."""
    _, digits, exponent = number.as_tuple()
    return int("".join(map(str, digits))), int(exponent)
