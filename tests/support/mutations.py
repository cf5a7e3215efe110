"""Requests near right ones: what odd, broken and hostile clients send. Chance comes from the caller's `Random`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

Place = tuple[Any, Any]
"""A container of a body, and the key or index of a value in it."""

NUMBERS = [0, -1, 1, 7, 2**31, 2**63, 2**64, -(2**64), 10**40, 1e308, 1e-320, -0.0, 0.5, float("nan"), float("inf")]
TEXTS = [
    "",
    " ",
    "\n\n",
    "x",
    "auto",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "\u2028\x85",
    "\u202e\ufeff\u200d",
    "🏳️‍🌈é",
    "<|im_end|>",
    "<tool_call>\n{",
    "</think>",
    "{{ 7*7 }}{% raise %}",
    "../../etc/passwd",
    "a" * 3000,
]
ODD: list[Any] = [None, True, False, [], {}, [[]], [None], [{}], {"type": None}, {"type": "image"}, {"": {}}]
"""Values of every kind, none of which is the one that was there."""
PARTS: list[Any] = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
    {"type": "text", "text": "hi"},
    {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
    {"type": "tool_use", "id": "strange", "name": "f", "input": {"a": [1]}},
    {"type": "tool_result", "tool_use_id": "nobody", "content": [{"type": "text", "text": "x"}], "is_error": True},
    {"role": "tool", "tool_call_id": "nobody", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "", "function": {"name": "", "arguments": "{oh"}}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1e999}'},
    {"type": "function_call_output", "call_id": "nobody", "output": [{"type": "input_image"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "phalanx-1:AAA"},
    {"type": "item_reference", "id": "msg_1"},
]
"""Parts of histories, of whatever dialect."""


def mutated(rng: Random, body: dict[str, Any]) -> Any:
    """A copy of a body with one to three changes anywhere inside of it."""
    body = _copy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(body))
        if not places:
            break
        rng.choice(CHANGES)(rng, places)
    return rng.choice(ODD) if rng.random() < 0.005 else body


def _places(value: Any) -> Iterator[Place]:
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _odd(rng: Random, places: list[Place]) -> None:
    _set(rng.choice(places), rng.choice([rng.choice(NUMBERS), rng.choice(TEXTS), _copy(rng.choice(ODD))]))


def _part(rng: Random, places: list[Place]) -> None:
    """A part of another dialect's history, or of this one's at a wrong place."""
    lists = [box[key] for box, key in places if isinstance(box[key], list)]
    if lists:
        chosen = rng.choice(lists)
        chosen.insert(rng.randint(0, len(chosen)), _copy(rng.choice(PARTS)))


def _drop(rng: Random, places: list[Place]) -> None:
    box, key = rng.choice(places)
    del box[key]


def _twin(rng: Random, places: list[Place]) -> None:
    box, key = rng.choice(places)
    if isinstance(box, list):
        box.insert(rng.randint(0, len(box)), _copy(box[key]))
    else:
        box[rng.choice((f"{key}s", key.upper(), f"{key}\x00", "", "type", "id"))] = _copy(box[key])


def _transplant(rng: Random, places: list[Place]) -> None:
    box, key = rng.choice(places)
    _set(rng.choice(places), _copy(box[key]))


def _text(rng: Random, places: list[Place]) -> None:
    """A text with something odd in it."""
    texts = [(box, key) for box, key in places if isinstance(box[key], str)]
    if texts:
        box, key = rng.choice(texts)
        at = rng.randint(0, len(box[key]))
        box[key] = box[key][:at] + rng.choice(TEXTS) + box[key][at:]


def _deep(rng: Random, places: list[Place]) -> None:
    """A value inside of many others."""
    box, key = rng.choice(places)
    value = _copy(box[key])
    for _ in range(rng.choice((1, 2, 40, 120))):
        value = [value] if rng.random() < 0.5 else {"properties": value}
    _set((box, key), value)


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _set(place: Place, value: Any) -> None:
    box, key = place
    box[key] = value


CHANGES: list[Callable[[Random, list[Place]], None]] = [_odd, _odd, _part, _drop, _twin, _transplant, _text, _deep]


# Requests ----------------------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """One request, as bytes."""

    content: bytes
    headers: dict[str, str]
    valid: bool = True  # as HTTP
    pieces: list[bytes] = field(default_factory=list)  # of a chunked body; empty: it has a Content-Length


def to_bytes(rng: Random, body: Any) -> bytes:
    """JSON, with letters as they are or escaped; half characters become what no UTF-8 has."""
    if rng.random() < 0.7:
        return json.dumps(body).encode()
    return json.dumps(body, ensure_ascii=False, indent=rng.choice((None, 1))).encode("utf-8", "surrogatepass")


def damaged(rng: Random, data: bytes) -> bytes:
    """What is no JSON any more, or hardly."""
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        (
            data[:at],
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            data[:at] + rng.choice((b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\x00", b"NaN", b"1e999")) + data[at:],
            b"\xef\xbb\xbf" + data,
            data + rng.choice((b"x", b"{}", b" \n", b"\x00")),
            data.decode("utf-8", "replace").encode("utf-16"),
            b'{"model": "x", ' + data[1:],
            b"",
            b"[" * 5000,
            b'{"a":' * 5000 + b"1" + b"}" * 5000,
            b'{"max_tokens": ' + b"9" * 5000 + b"}",
        )
    )


def dressed(rng: Random, content: bytes, headers: dict[str, str]) -> Sent:
    """A body with headers and an encoding that may be odd, whole or in chunks."""
    headers = {"content-type": "application/json", **headers}
    odd = rng.random()
    if odd < 0.1:
        headers |= rng.choice(HEADERS)
    elif odd < 0.2:
        packed = gzip.compress(content, 1)
        cut = rng.choice((len(packed), len(packed), len(packed) // 2, len(packed) - 1))
        content = packed[:cut] + rng.choice((b"", b"", b"", b"x"))
        headers["content-encoding"] = rng.choice(("gzip", "gzip", "GZIP", "br", "identity", "gzip, gzip"))
    pieces = _pieces(rng, content) if rng.random() < 0.15 else []
    return Sent(content, headers, pieces=pieces)


HEADERS: list[dict[str, str]] = [
    {"content-type": "application/json; charset=latin-1"},
    {"content-type": "APPLICATION/JSON"},
    {"content-type": "application/x-ndjson"},
    {"content-type": "text/plain"},
    {"content-type": ""},
    {"content-type": "application/problem+json;;;"},
    {"accept": "image/png"},
    {"accept-encoding": "br, zstd;q=0"},
    {"authorization": "Basic \xff\xfe"},
    {"authorization": "Bearer"},
    {"x-api-key": "none"},
    {"x-request-id": "<script>"},
    {"anthropic-version": "1066-10-14"},
    {"anthropic-beta": "a," * 1000},
    {"expect": "100-continue"},
    {"range": "bytes=0-1"},
    {"upgrade": "h2c"},
    {"x-large": "y" * 8000},
]


def _pieces(rng: Random, content: bytes) -> list[bytes]:
    size = rng.choice((1, 3, 100, 5000)) if len(content) < 900 else rng.choice((100, 5000))
    return [content[i : i + size] for i in range(0, len(content), size)]
