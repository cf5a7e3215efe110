"""The pieces of a model's parsed text, and the parser's interface."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct


class TextPiece(Struct, frozen=True):
    """A further part of the answer's content."""

    text: str


class ReasoningPiece(Struct, frozen=True):
    """A further part of the reasoning before, or between parts of, the answer."""

    text: str


class CallBegin(Struct, frozen=True):
    """A call of an offered tool begins. Calls are numbered by the caller, in order."""

    name: str


class CallArguments(Struct, frozen=True):
    """A further fragment of the open call's arguments. All fragments of a whole call are one JSON object."""

    text: str


class CallEnd(Struct, frozen=True):
    """The open call is whole, and its arguments are a JSON object.

    `source` is the model's own text of the call with the marks around it. Marks around several calls belong to
    the first and the last one, text between two calls to the second.
    """

    source: str


class CallBroken(Struct, frozen=True):
    """The open call is invalid: its arguments are not JSON, or the text ended inside. Its text follows as `TextPiece`.

    An answer that is sent whole leaves the call out; a stream has sent the fragments so far and adds none.
    """


Piece = TextPiece | ReasoningPiece | CallBegin | CallArguments | CallEnd | CallBroken


class OutputParser(Protocol):
    """Parses one answer's text in order. The joined pieces do not depend on where the text is cut."""

    def add(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text."""

    def finish(self) -> list[Piece]:
        """The pieces of text that was held back. Call it once, at the end."""

    @property
    def detail(self) -> str:
        """Why a call became text, for the answer's `finish_detail`; "" if none did."""


class ToolDefinition(Struct, frozen=True):
    """A tool that a request offers."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}  # a JSON schema of the arguments' object
    field: str = "tools"  # of the body with the schema, for errors
