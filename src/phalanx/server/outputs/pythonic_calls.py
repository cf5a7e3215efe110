"""Calls written as Python: Llama 4, LFM2.

    [get_weather(city="Oslo", days=2), get_time()]

Each argument is sent when it is whole. JSON's `true`, `false` and `null` are accepted beside Python's.
"""

from __future__ import annotations

import re

from msgspec import Struct

from phalanx.server.outputs import values
from phalanx.server.outputs.calls import ENDED, MAX_NAME, Broken, Calls, after_surplus, end_call
from phalanx.server.outputs.json_scanner import is_json
from phalanx.server.outputs.reader import Reader, Steps, marks_of

_NAME = r"\s*([\w.-]+)\s*"


class PythonicCalls(Struct, frozen=True):
    """A list of calls with keyword arguments, between marks or bare."""

    open: str
    close: str
    bare: bool = False  # an answer that begins with the list is calls too

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.open, self.close)

    @property
    def texts(self) -> tuple[str, ...]:
        return self.marks

    @property
    def begins_bare(self) -> str:
        return "[" if self.bare else ""

    def read(self, reader: Reader, calls: Calls, opened: str) -> Steps[None]:
        """Read the list after `opened`, which is "" for an answer that begins with it."""
        if (yield from reader.next_nonspace()) != "[":
            raise Broken("The text of the model's calls is not a list.")
        yield from reader.accept("[")
        following = ","
        while following == ",":
            yield from self._call(reader, calls)
            following = yield from after_surplus(reader, ")")
            if following not in (",", "]"):
                raise Broken("the list of calls is not closed.")
            yield from reader.accept(following)
            if following == "," and (yield from reader.next_nonspace()) == "]":  # Python allows it
                following = "]"
                yield from reader.accept("]")
            if following == ",":
                calls.end()
        yield from end_call(reader, calls, self.close)

    def _call(self, reader: Reader, calls: Calls) -> Steps[None]:
        """Read `name(key=value, ...)`."""
        head: list[str] = []
        opened = yield from reader.until(marks_of("("), head.append, most=MAX_NAME)
        name = re.fullmatch(_NAME, "".join(head))
        if not opened or not name:
            raise Broken("The model's call has no name.")
        calls.begin(name.group(1))
        calls.arguments("{")
        before = ""
        while (yield from reader.next_nonspace()) != ")":
            key: list[str] = []
            found = yield from reader.until(marks_of("="), key.append, most=MAX_NAME)
            word = re.fullmatch(r"\s*(\w+)\s*", "".join(key))
            if not found or not word:
                raise Broken("one of its arguments has no name.")
            text = yield from _expression(reader)
            calls.arguments(f"{before}{values.to_json(word.group(1))}: {_json_of(text)}")
            before = ", "
            if (yield from reader.peek()) == ",":
                yield from reader.accept(",")
        yield from reader.accept(")")
        calls.arguments("}")


def _expression(reader: Reader) -> Steps[str]:
    """Take an argument's value, up to the comma or bracket after it."""
    parts: list[str] = []
    if not (yield from reader.through(ExpressionScanner().take, parts.append)):
        raise Broken(ENDED)
    return "".join(parts).strip()


def _json_of(text: str) -> str:
    """The JSON of an argument: a Python constant, JSON or a mixture; bare words are a string.

    Raises:
        Broken: it is none of these.
    """
    if is_json(text):
        return text
    try:
        return values.python_json(text)
    except ValueError:
        if not text or re.search(r"[\"'\[\](){}]", text):
            raise Broken("one of its arguments is not a Python constant.") from None
    return values.to_json(text)


class ExpressionScanner:
    """Finds the end of a Python expression: the comma or closing bracket outside its strings and brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""  # of the open string: one character or three
        self._run = ""  # quotes in a row that may open or close a string
        self._escaped = False

    def take(self, text: str, at: int) -> int:
        """The place in `text`, from `at` on, where the expression ends; the text's end if it continues."""
        while at < len(text):
            char = text[at]
            if self._quote:
                self._in_string(char)
            elif self._run and not self._opening(char):
                continue  # an empty string ended before this character
            elif not self._run and not self._quote:
                if char in ",)]}" and not self._depth:
                    return at
                self._depth += (char in "[({") - (char in "])}")
                if self._depth > values.MAX_DEPTH:
                    return at
                self._run = char if char in "\"'" else ""
            at += 1
        return at

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
            return
        self._escaped = char == "\\"
        self._run = self._run + char if char == self._quote[0] else ""
        if self._run == self._quote:
            self._quote = self._run = ""

    def _opening(self, char: str) -> bool:
        """The character after quotes that open a string; False if they were an empty string."""
        if char == self._run[0]:
            self._run += char
            if len(self._run) == 3:
                self._quote, self._run = self._run, ""
            return True
        if len(self._run) == 2:
            self._run = ""
            return False
        self._quote, self._run = self._run, ""
        self._in_string(char)
        return True
