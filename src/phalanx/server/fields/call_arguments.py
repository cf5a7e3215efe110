"""The arguments of a call, from their text.

A model may write what is JSON by RFC 8259 and what clients read, but no strict parser: numbers beyond those of a
computer, halves of characters. The server has sent it, so it has to take it back when the conversation comes again.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

import msgspec

MAX_DIGITS = 4000  # of an integer that stays one; Python refuses 4,300


def parse_arguments(text: str) -> dict[str, Any]:
    """The object that `text` says; empty text and null say {}. Numbers too large become the largest ones, and half
    characters question marks.

    Raises:
        ValueError: it is not JSON, or no object; says why.
    """
    if text.strip() in ("", "null"):  # null: clients that encode what they have of a call without arguments
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
