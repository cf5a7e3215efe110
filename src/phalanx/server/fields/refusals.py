"""Checks of single fields; every error names its field."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from phalanx.errors import InvalidRequest

ONLY_FUNCTIONS = 'only "function"'
ONLY_TEXT = "only text parts can be read by this model"
ANSWER_FORMATS = "only text, json_object and json_schema"
MAX_PLACE = 400  # characters of a schema's place that an error repeats; names in a schema may be long
MAX_DEPTH = 300  # objects and lists inside each other; a model's call has 257, and templates write some 450


def invalid(param: str, message: str) -> InvalidRequest:
    """The error for a field whose value is invalid."""
    return InvalidRequest(message, param=param)


def unsupported(param: str, detail: str = "") -> InvalidRequest:
    """The error for a field whose value would change the answer, but is not implemented."""
    reason = f" ({detail})" if detail else ""
    return InvalidRequest(f"{param} is not supported by this server{reason}.", param=param, code="unsupported_value")


def foreign_type(where: str, kind: str, detail: str) -> InvalidRequest:
    """The error for an object of a `type` that this server does not support."""
    return unsupported(f"{where}.type", f"{kind[:40]!r}; {detail}")


def count(field: str, value: int | None, *, least: int) -> int | None:
    """Check a number of tokens: from `least` to 2**31 - 1."""
    if value is not None and not least <= value < 1 << 31:
        raise invalid(field, f"{field} must be at least {least} and below 2**31, not {show(value)}.")
    return value


def token_limit(field: str, value: int | None, *, least: int = 1) -> int | None:
    """Check a limit of output tokens; -1, which clients of llama.cpp and LM Studio send, means no limit."""
    return None if value == -1 else count(field, value, least=least)


def in_range(field: str, value: float, low: float, high: float) -> float:
    """Check a number in [low, high]; NaN is refused."""
    if not low <= value <= high:
        raise invalid(field, f"{field} must be from {low:g} to {high:g}, not {show(value)}.")
    return value


def check_depth(field: str, value: dict[str, Any] | list[Any]) -> None:
    """Refuse a value that is nested too deeply for encoders, chat templates and clients, which recurse over it."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return
    raise too_deep(field, MAX_DEPTH)


def too_deep(field: str, most: int) -> InvalidRequest:
    """The error for a value with more than `most` levels."""
    return invalid(field, f"{field} is nested too deeply; at most {most} objects and lists may be inside each other.")


def check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Refuse token ids outside [0, vocab_size)."""
    for token in (min(ids, default=0), max(ids, default=0)):  # loops in C, since there may be many
        if not 0 <= token < vocab_size:
            raise invalid(field, f"{field} has the token id {show(token)}; this model's ids are 0 to {vocab_size - 1}.")


def show_place(where: str) -> str:
    """The place of a part of a schema for an error message."""
    return where if len(where) <= MAX_PLACE else f"{where[:MAX_PLACE]}..."


def show(value: float) -> str:
    """The number for an error message; without digits for an integer of 64 bits or more."""
    return repr(value) if isinstance(value, float) or abs(value) < 1 << 64 else "a huge number"
