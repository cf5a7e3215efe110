"""Writes the JSON of large answers in short calls, so that none holds the interpreter's lock for long."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write
ITEMS = 1024  # of a list, written at once; of tokens with 20 likely ones each, in 5 ms

_encoder = msgspec.json.Encoder()


def finite(logprob: float) -> float:
    """A log-probability that JSON can write."""
    return max(logprob, MIN_LOGPROB)


def to_json(value: Any) -> bytes:
    """The JSON of dictionaries, lists and what they hold."""
    return _encoder.encode(_in_pieces(value))


def _in_pieces(value: Any) -> Any:
    """The value with its long lists already written."""
    if isinstance(value, dict):
        return {name: _in_pieces(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= ITEMS:
        return [_in_pieces(item) for item in value]
    pieces = (_encoder.encode(value[start : start + ITEMS])[1:-1] for start in range(0, len(value), ITEMS))
    return Raw(b"[" + b",".join(pieces) + b"]")
