"""Parses the arguments of a call from their text.

A model may write JSON that RFC 8259 allows and clients read, but strict parsers refuse: numbers beyond a float's,
halves of characters. The server has sent it, so it must accept it when the conversation comes back.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

import msgspec

MAX_DIGITS = 4000  # of an integer that stays one; Python refuses 4,300


def parse_arguments(text: str) -> dict[str, Any]:
    """The object in `text`; empty text and null mean {}. Too large numbers become the largest ones, and half characters
    question marks.

    Raises:
        ValueError: it is not a JSON object; says why.
    """
    if text.strip() in ("", "null"):  # null: from clients that encode the missing arguments of a call
        return {}
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        value = _parse_leniently(text, error)
    if not isinstance(value, dict):
        raise ValueError(f"it is {text[:40]!r}, not a JSON object")
    return value


def _parse_leniently(text: str, refused: Exception) -> Any:
    try:
        value = json.loads(text, parse_float=_finite, parse_int=_integer, parse_constant=_refuse)
        return msgspec.json.decode(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        raise ValueError(f"it is not JSON: {refused}") from None


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else _finite(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
