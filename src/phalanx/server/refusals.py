"""Checks of single fields; every error names its field. Pure. Does not know what the fields mean."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.errors import InvalidRequest
from phalanx.server.schema import Body


def invalid(param: str, message: str) -> InvalidRequest:
    """The error for a field whose value is invalid."""
    return InvalidRequest(message, param=param)


def unsupported(param: str, detail: str = "") -> InvalidRequest:
    """The error for a field whose value would change the answer, but is not implemented."""
    reason = f" ({detail})" if detail else ""
    return InvalidRequest(f"{param} is not supported by this server{reason}.", param=param, code="unsupported_value")


def refuse_unknown(body: Body, where: str = "") -> None:
    """Refuse fields that the schema does not declare; null counts as absent."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            field = f"{where}{name[:80]}"
            raise InvalidRequest(f"Unrecognized request argument supplied: {field}", param=field)


def count(field: str, value: int | None, *, least: int) -> int | None:
    """Check a number of tokens: from `least` to 2**31 - 1."""
    if value is not None and not least <= value < 1 << 31:
        raise invalid(field, f"{field} must be at least {least} and below 2**31, not {show(value)}.")
    return value


def in_range(field: str, value: float, low: float, high: float) -> float:
    """Check a number in [low, high]; NaN is refused."""
    if not low <= value <= high:
        raise invalid(field, f"{field} must be from {low:g} to {high:g}, not {show(value)}.")
    return value


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids outside [0, vocab_size)."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise invalid(field, f"{field} has the token id {show(token)}; this model's ids are 0 to {vocab_size - 1}.")


def show(value: float) -> str:
    """The number for an error message; not its digits if it is an integer of 64 bits or more."""
    return repr(value) if isinstance(value, float) or abs(value) < 1 << 64 else "a huge number"
