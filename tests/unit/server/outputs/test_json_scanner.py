"""The scanner takes exactly the beginnings of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from phalanx.server.outputs.json_scanner import MAX_DEPTH, JsonScanner, is_json, is_json_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def scan(text: str, *cuts: int) -> tuple[int, bool]:
    scanner = JsonScanner()
    at = 0
    for end in (*cuts, len(text)):
        at = scanner.take(text[:end], at)
        if at < end:
            break
    return at, scanner.whole


def loads(text: str) -> bool:
    def refused(_: str) -> Any:
        raise ValueError

    try:
        json.loads(text, parse_constant=refused)
    except ValueError:
        return False
    return True


@examples(100, soak=5000)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.data())
def test_all_json(value: Any, ascii_only: bool, indent: int | None, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    cut = data.draw(st.integers(0, len(text)))
    assert scan(text, cut) == (len(text), True)
    assert scan(text[:cut])[0] == cut
    assert scan(f"[{text}]!") == (len(text) + 2, True)


@examples(150, soak=10000)
@given(VALUES, st.data())
def test_damaged_json(value: Any, data: st.DataObject) -> None:
    """What `json` reads is JSON, and nothing else."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    there = data.draw(st.sampled_from(["", ",", "]", "}", '"', "\\", "0", "-", ".", "e", " ", "\n", "x", "\x01", ":"]))
    damaged = text[:at] + there + text[at + data.draw(st.integers(0, 2)) :]
    assert is_json(damaged) == loads(damaged), damaged


NOT_JSON = ["01", "1.", ".5", "+1", "1e", "NaN", "Infinity", "tru", "nulls", "'a'", '"\\x"', "[1,]", "{,}", ""]


@pytest.mark.parametrize("text", NOT_JSON)
def test_no_json(text: str) -> None:
    assert not is_json(text)


def test_objects() -> None:
    assert is_json_object(' {"a": 1} ')
    assert is_json("1 ")
    assert not is_json_object("[]")
    assert not is_json_object('{"a": 1} {}')


def test_depth() -> None:
    assert is_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert scan("[" * (MAX_DEPTH + 1))[0] == MAX_DEPTH
