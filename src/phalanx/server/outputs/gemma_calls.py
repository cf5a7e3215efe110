"""Calls of Gemma: JSON without quotes around keys, and with a mark of its own around strings.

    <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>

A call is sent when it is whole, because only then the ends of values are known.
"""

from __future__ import annotations

import json
import re

from msgspec import Struct

from phalanx.server.outputs.calls import Broken, Calls
from phalanx.server.outputs.json_scanner import is_json_object
from phalanx.server.outputs.reader import Reader, Steps, marks_of
from phalanx.server.outputs.values import convert_guessed, to_json

_CALL = re.compile(r"\s*call:([\w.-]+)(?=\{)")
_KEY = re.compile(r"(?<=[{,])\s*([\w-]+)\s*:")
_WORD = re.compile(r"(?<=:)([^\s\"\[{\]},:][^\"\[{\]},:]*)")


class GemmaCalls(Struct, frozen=True):
    """`open`, one or more `call:name{key:value,...}`, `close`."""

    open: str
    close: str
    quote: str  # around strings

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.open, self.close)

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.marks, self.quote)

    @property
    def begins_bare(self) -> str:
        return ""

    def read(self, reader: Reader, calls: Calls, opened: str) -> Steps[None]:
        """Read the calls after the opening mark."""
        parts: list[str] = []
        marks = marks_of(self.close, self.quote, '"')
        while (mark := (yield from reader.until(marks, parts.append))) != self.close:
            parts.append(mark)
            if not mark or not (yield from self._string(reader, mark, parts)):
                raise Broken("A call is not whole: the answer ended inside.")
        written = self._split("".join(parts))
        for name, _ in written:
            calls.offered(name)
        source = reader.recorded()
        for i, (name, arguments) in enumerate(written):
            calls.begin(name)
            calls.arguments(arguments)
            reader.record("" if i else source)
            calls.end()

    def _string(self, reader: Reader, quote: str, parts: list[str]) -> Steps[bool]:
        """Take the rest of a string, which may hold marks; False if the text ends inside."""
        marks = marks_of(quote) if quote == self.quote else marks_of(quote, "\\")
        while (mark := (yield from reader.until(marks, parts.append))) == "\\":
            escaped = yield from reader.peek()
            yield from reader.accept(escaped)
            parts.append(mark + escaped)
        parts.append(mark)
        return bool(mark)

    def _split(self, text: str) -> list[tuple[str, str]]:
        """Names and the JSON of the arguments.

        Raises:
            Broken: the text is not calls.
        """
        strings: list[str] = []  # their JSON

        def kept(found: re.Match[str]) -> str:
            strings.append(found.group(2) or to_json(found.group(1)))
            return f"\x00{len(strings) - 1}\x00"

        mark = re.escape(self.quote)
        plain = re.sub(rf'{mark}(.*?){mark}|("(?:[^"\\]|\\.)*")', kept, text.replace("\x00", ""), flags=re.DOTALL)
        written: list[tuple[str, str]] = []
        at = 0
        plain = plain.rstrip()
        while at < len(plain) and not (written and not plain[at:].strip(" \t\r\n})]")):  # superfluous brackets
            head = _CALL.match(plain, at)
            end = _closing(plain, head.end()) if head else 0
            if not head or not end:
                raise Broken("The model's call cannot be parsed.")
            arguments = _KEY.sub(lambda key: json.dumps(key.group(1)) + ":", plain[head.end() : end])
            arguments = _WORD.sub(lambda word: _value(word.group(1)), arguments)
            arguments = re.sub(r"\x00(\d+)\x00", lambda at: strings[int(at.group(1))], arguments)
            if not is_json_object(arguments):
                raise Broken("its arguments are not a JSON object.")
            written.append((head.group(1), arguments))
            at = end
        if not written:
            raise Broken("The model's call cannot be parsed.")
        return written


def _value(word: str) -> str:
    """The JSON of a value without quotes."""
    return word if "\x00" in word else convert_guessed(word.strip())


def _closing(text: str, at: int) -> int:
    """The place after the bracket that closes the one at `at`; 0 if none does."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if not depth:
            return i + 1
    return 0
