"""Arguments of calls in histories: strict JSON, and what models write besides."""

from __future__ import annotations

import sys

import pytest

from phalanx.server.fields.call_arguments import parse_arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (" null\n", {}),
        ('{"a": [1, 2.5, "\\u00e9"]}', {"a": [1, 2.5, "\u00e9"]}),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ('{"n": [1e400, -1e400]}', {"n": [sys.float_info.max, -sys.float_info.max]}),
        ('{"n": -' + "9" * 5000 + "}", {"n": -sys.float_info.max}),
        ('{"s": "a\\ud800b"}', {"s": "a?b"}),
        ('{"s": "\\ud83d\\ude00"}', {"s": "\N{GRINNING FACE}"}),
    ],
)
def test_the_object(text, value):
    assert parse_arguments(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [("[1]", "not a JSON object"), ('"null"', "not a JSON object"), ("{", "not JSON"), ('{"a": NaN}', "not JSON")],
)
def test_no_object(text, why):
    with pytest.raises(ValueError, match=why):
        parse_arguments(text)


def test_too_deep():
    with pytest.raises(ValueError, match="not JSON"):
        parse_arguments('{"a":' * 5000 + "1" + "}" * 5000)
