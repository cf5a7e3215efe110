"""Shared by the parsers of all formats: the pieces of calls, and errors in broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from phalanx.server.outputs.json_scanner import JsonScanner, is_json_object
from phalanx.server.outputs.pieces import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Piece,
    ReasoningPiece,
    TextPiece,
    ToolDefinition,
)
from phalanx.server.outputs.reader import Marks, Reader, Steps

MAX_NAME = 256  # characters of a call's header; a longer text is not one
ENDED = "the answer ended inside."
CLOSING = ("}", "]", ")")


class Broken(Exception):
    """The text is not a call. The message is for people: a sentence, or, in lower case, a reason."""


class Calls:
    """The pieces of one answer: calls of offered tools, and the text and the reasoning around them.

    White space between marks, and between reasoning and the text after it, belongs to the format, not to the content.
    """

    def __init__(self, reader: Reader, tools: Sequence[ToolDefinition]) -> None:
        self.pieces: list[Piece] = []
        self.detail = ""
        self._reader = reader
        self._tools = {tool.name: tool for tool in tools}
        self._begun = ""  # the name of the open call
        self._shown = False  # a part of it was sent
        self._brace = ""  # a closing brace of its arguments that is held back: it may be the last one
        self._has_marks = False
        self._after_mark = True  # no content yet since the last mark, or since the beginning
        self._keeps_space = True  # white space after the last mark is content if other text follows it
        self._spaces: list[str] = []  # white space that waits for other text
        self._in_block = False  # of reasoning
        self._reasoned = False  # there is reasoning, in an earlier block or this one

    def text(self, text: str) -> None:
        """A part of the content."""
        if self._after_mark:
            body = text.lstrip()
            if self._keeps_space:
                self._spaces.append(text[: len(text) - len(body)])
            if not body:
                return
            text = "".join(self._spaces) + body
            self._spaces = []
            self._after_mark = False
        if text:
            self.pieces.append(TextPiece(text))

    def mark(self, *, keeps_space: bool = True) -> None:
        """Content is interrupted by a mark."""
        self._has_marks = self._after_mark = True
        self._keeps_space = keeps_space
        self._spaces = []

    def reasoning(self, text: str) -> None:
        """A part of the reasoning. White space around a block of reasoning is left out."""
        body = text.rstrip()
        if not body and not self._in_block:
            return
        if not self._in_block:
            body = ("\n" if self._reasoned else "") + body.lstrip()
            self._in_block = self._reasoned = True
        if body:
            self.pieces.append(ReasoningPiece("".join(self._spaces) + body))
            self._spaces = []
        self._spaces.append(text[len(text.rstrip()) :])

    def end_reasoning(self) -> None:
        """A block of reasoning ended, by its closing mark or by a call."""
        self._in_block = False
        self.mark(keeps_space=False)

    def finish(self) -> None:
        """The text ended. White space is the answer if there is nothing else."""
        if not self._has_marks and (text := "".join(self._spaces)):
            self.pieces.append(TextPiece(text))

    @property
    def sending(self) -> bool:
        """A call is open."""
        return bool(self._begun)

    def offered(self, name: str) -> ToolDefinition:
        """The tool of this name.

        Raises:
            Broken: the request does not offer it, so no client could run it.
        """
        if name not in self._tools:
            raise Broken(f"The model called {name[:64]!r}, a tool that the request does not offer.")
        return self._tools[name]

    def offers(self, name: str) -> bool:
        """Whether the request offers a tool of this name."""
        return name in self._tools

    def begin(self, name: str) -> ToolDefinition:
        """Begin a call of this tool. It is sent with its first `arguments`."""
        tool = self.offered(name)
        self._begun = name
        self._shown = False
        self._brace = ""
        return tool

    def arguments(self, text: str) -> None:
        """A further fragment of the open call's arguments, JSON.

        A brace at the end is held back: clients of a stream must not have the whole JSON of a call that turns out
        broken.
        """
        if not text:
            return
        if not self._shown:
            self._shown = True
            self.pieces.append(CallBegin(self._begun))
        text = self._brace + text
        body = text.removesuffix("}")
        self._brace = text[len(body) :]
        if body:
            self.pieces.append(CallArguments(body))

    def end(self) -> None:
        """The call is whole; the reader has recorded its text."""
        self._begun = ""
        self.pieces += [CallArguments(self._brace), CallEnd(self._reader.recorded())]
        self._reader.record()

    def broken(self, why: str, marks: Marks) -> None:
        """The text is not a call: without the marks around it, it becomes content."""
        if why[:1].islower():
            subject = f"The call of {self._begun!r}" if self._begun else "A call"
            why = f"{subject} is not whole: {why}"
        if self._begun and self._shown:
            self.pieces.append(CallBroken())
        self._begun = ""
        self.detail = self.detail or why
        self.text(marks.pattern.sub("", self._reader.recorded()))
        self._reader.stop_recording()


def json_value(reader: Reader, emit: Callable[[str], object]) -> Steps[None]:
    """Take one JSON value, white space before it included.

    Raises:
        Broken: the text is not JSON, or ends inside the value.
    """
    scanner = JsonScanner()
    more = yield from reader.through(scanner.take, emit)
    if not scanner.whole:
        raise Broken("its arguments are not JSON." if more else ENDED)


def json_text(reader: Reader) -> Steps[str]:
    """Take one JSON value; its text."""
    parts: list[str] = []
    yield from json_value(reader, parts.append)
    return "".join(parts)


def json_string(reader: Reader) -> Steps[str]:
    """Take one JSON string; its value."""
    text = yield from json_text(reader)
    if not text.startswith('"'):
        raise Broken("its name is not a string.")
    value: str = json.loads(text)
    return value


def arguments_object(reader: Reader, calls: Calls, *ends: str) -> Steps[None]:
    """Send the arguments of the open call, a JSON object, as they come; {} if a mark of `ends` follows."""
    if (yield from reader.after_space(*ends)):
        calls.arguments("{}")
        return
    if (char := (yield from reader.next_nonspace())) != "{":
        raise Broken("its arguments are not a JSON object." if char else ENDED)
    yield from json_value(reader, calls.arguments)


def after_surplus(reader: Reader, bracket: str) -> Steps[str]:
    """Skip superfluous closing brackets; the next character, not taken."""
    while (char := (yield from reader.next_nonspace())) == bracket:
        yield from reader.accept(bracket)
    return char


def end_call(reader: Reader, calls: Calls, *marks: str) -> Steps[None]:
    """End the call, whose JSON is whole. Those of `marks` that follow in this order close it; superfluous brackets are
    skipped.
    """
    if not marks:
        calls.end()
    left = marks
    while mark := (yield from reader.after_space(*CLOSING, *left)):
        yield from reader.next_nonspace()
        yield from reader.accept(mark)
        if mark in left and not (left := left[left.index(mark) + 1 :]):
            break
    if marks:
        calls.end()


def unwrapped(text: str) -> str:
    """The JSON object of arguments in a JSON string, null or an empty string.

    Raises:
        Broken: they are not an object.
    """
    inner = text
    if text.startswith('"'):
        inner = json.loads(text) or "{}"
    elif text == "null":
        inner = "{}"
    if not is_json_object(inner):
        raise Broken("its arguments are not a JSON object.")
    return inner.encode(errors="replace").decode()  # an escape sequence may have made half a character
