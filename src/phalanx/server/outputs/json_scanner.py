"""Checks, character by character, whether a text is the beginning of a JSON value. Strict: RFC 8259, bounded depth.

Builds no values and keeps no text: text that it took can be sent at once, because it can be completed to JSON.
"""

from __future__ import annotations

import re

MAX_DEPTH = 256  # brackets inside each other; the parsers of clients recurse

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_DIGITS = dict.fromkeys("0123456789")
_AFTER_INTEGER = {".": "point", "e": "exponent", "E": "exponent"}
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {**dict.fromkeys("123456789", "integer"), "0": "zero"},
    "zero": _AFTER_INTEGER,
    "integer": {**dict.fromkeys(_DIGITS, "integer"), **_AFTER_INTEGER},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(_DIGITS, "fraction"), "e": "exponent", "E": "exponent"},
    "exponent": {**dict.fromkeys(_DIGITS, "power"), "+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
"""State inside a number -> character -> next state."""
_WHOLE_NUMBER = ("zero", "integer", "fraction", "power")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class JsonScanner:
    """Takes one JSON value. Stops at its end, and at the first character that cannot be part of it."""

    def __init__(self) -> None:
        self._closers: list[str] = []  # of the open brackets
        self._state = "value"  # or key, first_key, first_value, colon, after, string, escape, hex, number, literal, end
        self._is_key = False  # the string is a key
        self._number = ""
        self._literal = ""  # rest of a literal
        self._hex = 0  # hexadecimal digits that are missing

    @property
    def whole(self) -> bool:
        """The text taken so far is a JSON value (a number may continue)."""
        return self._state == "end" or (self._state == "number" and not self._closers and self._number in _WHOLE_NUMBER)

    def take(self, text: str, at: int) -> int:
        """The place in `text`, from `at` on, after the last character that was taken."""
        while at < len(text) and self._state != "end":
            if self._state == "string":
                taken = self._string(text, at)
            elif self._state in ("escape", "hex", "literal"):
                taken = self._within(text[at])
            elif space := _SPACE.match(text, at):
                if self._state == "number" and not self._end_number():
                    return at
                taken = len(space.group()) if self._state != "end" else 0
            else:
                taken = self._structure(text[at])
            if taken == 0:
                return at
            at += taken
        return at

    def _string(self, text: str, at: int) -> int:
        if plain := _PLAIN.match(text, at):
            return len(plain.group())
        if text[at] == '"':
            self._state = "colon" if self._is_key else self._after_value()
            return 1
        if text[at] == "\\":
            self._state = "escape"
            return 1
        return 0

    def _within(self, char: str) -> int:
        """A character of an escape sequence or of a literal."""
        if self._state == "literal":
            if char != self._literal[0]:
                return 0
            self._literal = self._literal[1:]
            if not self._literal:
                self._state = self._after_value()
            return 1
        if self._state == "escape":
            if char == "u":
                self._state, self._hex = "hex", 4
            elif char in '"\\/bfnrt':
                self._state = "string"
            else:
                return 0
            return 1
        if char not in "0123456789abcdefABCDEF":
            return 0
        self._hex -= 1
        if not self._hex:
            self._state = "string"
        return 1

    def _structure(self, char: str) -> int:
        """A character outside of strings and literals."""
        if self._state == "number":
            if following := _NUMBER[self._number].get(char):
                self._number = following
                return 1
            if not self._end_number() or self._state == "end":
                return 0
        if self._closers and char == self._closers[-1] and self._state in ("after", "first_key", "first_value"):
            self._closers.pop()
            self._state = self._after_value()
            return 1
        if self._state == "after" and char == ",":
            self._state = "key" if self._closers[-1] == "}" else "value"
            return 1
        if self._state == "colon" and char == ":":
            self._state = "value"
            return 1
        if self._state in ("key", "first_key") and char == '"':
            self._state, self._is_key = "string", True
            return 1
        if self._state in ("value", "first_value"):
            return self._value(char)
        return 0

    def _value(self, char: str) -> int:
        if char == '"':
            self._state, self._is_key = "string", False
        elif char in "{[":
            if len(self._closers) == MAX_DEPTH:
                return 0
            self._closers.append("}" if char == "{" else "]")
            self._state = "first_key" if char == "{" else "first_value"
        elif char in _LITERALS:
            self._state, self._literal = "literal", _LITERALS[char][1:]
        elif char == "-":
            self._state, self._number = "number", "minus"
        elif following := _NUMBER["minus"].get(char):
            self._state, self._number = "number", following
        else:
            return 0
        return 1

    def _end_number(self) -> bool:
        if self._number not in _WHOLE_NUMBER:
            return False
        self._state = self._after_value()
        return True

    def _after_value(self) -> str:
        return "after" if self._closers else "end"


def is_json(text: str) -> bool:
    """Whether the text is one JSON value, with white space around it or not."""
    scanner = JsonScanner()
    text = text.rstrip(" \t\n\r")
    return scanner.take(text, 0) == len(text) and scanner.whole


def is_json_object(text: str) -> bool:
    """Whether the text is one JSON object."""
    return text.lstrip(" \t\n\r").startswith("{") and is_json(text)
