"""`/v1/completions`: `text_completion` (OpenAI), streamed or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.server.answers.deltas import Delta, ScoredToken, TokenText, Usage
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody
from phalanx.server.dialects.openai.openai_objects import OpenAIStream, base, finish, totals
from phalanx.server.fields.json_pieces import finite
from phalanx.server.fields.openai_bodies import CompletionBody
from phalanx.server.requests.parsed import ApiModel
from phalanx.server.requests.validate import parse_completion


class CompletionFormat(OpenAIStream):
    """`/v1/completions`"""

    kind = "text_completion"

    def opening(self, n_choices: int, so_far: Usage | None) -> bytes:
        """Nothing."""
        return b""

    def events(self, deltas: Sequence[Delta], so_far: Usage | None) -> bytes:
        """A chunk per delta."""
        return b"".join(self._chunk(self._choice(delta), so_far) for delta in deltas)

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: Mapping[str, float] | None) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        done = [self._choice(choice) for choice in choices]
        return {**base(self._head, self.kind), "choices": done, **totals(usage, timing)}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.scored),
            **finish(delta.ending),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._head.logprobs or not scored:
            return None
        return {
            "tokens": [_plain(entry.token) for entry in scored],
            "token_logprobs": [None if entry.logprob is None else finite(entry.logprob) for entry in scored],
            "top_logprobs": [
                None if entry.logprob is None else {_plain(piece): finite(piece.logprob) for piece in _named(entry)}
                for entry in scored
            ],
            "text_offset": [entry.offset for entry in scored],
        }


def _named(entry: ScoredToken) -> list[TokenText]:
    """The most likely tokens and the chosen one (OpenAI: up to logprobs + 1 entries), least likely first.

    The caller makes a dictionary by text, in which the more likely of two tokens with the same text stays.
    """
    tokens = [*entry.top, entry.token]
    tokens.sort(key=lambda token: token.logprob)
    return tokens


def _plain(piece: TokenText) -> str:
    """The token's text, or "bytes:\\xe2\\x80" if it is a part of a character (as OpenAI's completions)."""
    try:
        return piece.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.data)


def _asked(body: CompletionBody, served: ApiModel) -> ParsedBody:
    return ParsedBody(parse_completion(body, served), CompletionFormat)


COMPLETIONS = Dialect(body=CompletionBody, parse=_asked, field="prompt", id_prefix="cmpl-")
