"""Splits one choice's text into content, reasoning and calls, and keeps the calls for `CallMemory`.

Numbers the calls, gives each an id, and counts the tokens of the reasoning. `outputs/` parses the formats of models.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from phalanx.server.answers.deltas import CallDelta
from phalanx.server.outputs.pieces import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    OutputParser,
    Piece,
    ReasoningPiece,
    TextPiece,
)

ALPHANUMERIC = string.ascii_letters + string.digits
ID_CHARS = 9  # Mistral's templates refuse every other id; 10**16 of them


class AnswerPart(Struct, frozen=True, kw_only=True):
    """The new part of a choice."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class Written(Struct, frozen=True, kw_only=True):
    """A choice that called tools, as a client may send it back."""

    ids: tuple[str, ...]  # of its calls, in order
    calls: tuple[tuple[str, str], ...]  # (name, arguments as JSON) of each
    text: str
    reasoning: str

    @property
    def n_chars(self) -> int:
        """Characters of text, reasoning and calls."""
        return len(self.text) + len(self.reasoning) + sum(len(name) + len(given) for name, given in self.calls)


def call_id(answer: str, choice: int, number: int) -> str:
    """The id of a choice's call; a server that continues the answer derives the same one.

    Args:
        answer: its id, which clients cannot guess.
        number: of the call in its choice.
    """
    digest = hashlib.blake2b(f"{answer}/{choice}/{number}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest)
    return "".join(ALPHANUMERIC[value // len(ALPHANUMERIC) ** i % len(ALPHANUMERIC)] for i in range(ID_CHARS))


class AnswerParts:
    """Takes the text of one choice in order.

    Args:
        parser: fresh.
        one_call: ignore everything after the first call.
        id_of: makes the id of the call with this number.
    """

    def __init__(self, parser: OutputParser, *, one_call: bool, id_of: Callable[[int], str]) -> None:
        self.ended = False  # `one_call`, and there was a call
        self.reasoning_tokens = 0
        self._parser = parser
        self._one_call = one_call
        self._id_of = id_of
        self._uncounted = 0  # tokens since the last piece
        self._n_begun = 0
        self._whole: list[CallDelta] = []
        self._call = CallDelta(index=-1)  # the last one that began
        self._arguments: list[str] = []  # of that call
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, text: str, n_tokens: int) -> AnswerPart:
        """The parts that are certain with this text, of `n_tokens` further tokens."""
        self._uncounted += n_tokens
        return self._take(self._parser.add(text) if text else [])

    def finish(self) -> AnswerPart:
        """The rest. Call it once, unless `ended`."""
        return self._take(self._parser.finish())

    @property
    def detail(self) -> str:
        """See `OutputParser.detail`."""
        return self._parser.detail

    @property
    def called(self) -> bool:
        """Whether there was a whole call."""
        return bool(self._whole)

    def written(self) -> Written | None:
        """The choice so far; None without a whole call, or with a broken one."""
        if not self._whole or len(self._whole) < self._n_begun:
            return None
        return Written(
            ids=tuple(call.id for call in self._whole),
            calls=tuple((call.name, call.arguments) for call in self._whole),
            text="".join(self._text),
            reasoning="".join(self._reasoning),
        )

    def _take(self, pieces: Sequence[Piece]) -> AnswerPart:
        self._count(pieces)
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[CallDelta] = []
        for piece in pieces:
            match piece:
                case TextPiece():
                    text.append(piece.text)
                case ReasoningPiece():
                    reasoning.append(piece.text)
                case CallBegin():
                    calls.append(self._begin(piece.name))
                case CallArguments():
                    calls.append(CallDelta(index=self._n_begun - 1, arguments=piece.text))
                    self._arguments.append(piece.text)
                case CallBroken():
                    calls.append(CallDelta(index=self._n_begun - 1, broken=True))
                case CallEnd():
                    self._end()
            if self.ended:
                break
        self._text += text
        self._reasoning += reasoning
        return AnswerPart(text="".join(text), reasoning="".join(reasoning), calls=tuple(calls))

    def _begin(self, name: str) -> CallDelta:
        self._call = CallDelta(index=self._n_begun, id=self._id_of(self._n_begun), name=name)
        self._arguments = []
        self._n_begun += 1
        return self._call

    def _end(self) -> None:
        self._whole.append(replace(self._call, arguments="".join(self._arguments)))
        self.ended = self._one_call

    def _count(self, pieces: Sequence[Piece]) -> None:
        """Tokens belong to the piece that they complete: an opening mark to the piece after it."""
        if pieces:
            if isinstance(pieces[0], ReasoningPiece):
                self.reasoning_tokens += self._uncounted
            self._uncounted = 0
