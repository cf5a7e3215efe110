"""OpenAI's response objects: the JSON of a response body or of an SSE chunk. Pure.

Each endpoint has one `ResponseFormat`, so that `routes.py` streams and collects answers of every endpoint alike.
Does not know how tokens become text, the engine or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from phalanx.types import Timing

LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write


class TokenText(Struct, frozen=True):
    """A token as text. `data` holds its bytes, which may be only a part of a UTF-8 character."""

    text: str
    data: bytes
    logprob: float


class ScoredToken(Struct, frozen=True):
    """A token with its log-probability; None for the first prompt token, which the model does not predict."""

    token: TokenText
    logprob: float | None
    top: tuple[TokenText, ...]  # the most likely tokens at this position
    offset: int  # characters of the choice's text before this token


class Ending(Struct, frozen=True, kw_only=True):
    """Why a choice ended, and its token counts and times (seconds)."""

    reason: Literal["stop", "length"]
    detail: str = ""
    n_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    timing: Timing
    ttft_s: float | None
    tpot_s: float | None  # mean seconds per token after the first


class Delta(Struct, frozen=True, kw_only=True):
    """The new part of a choice: text, scored tokens and, in the last delta, the ending."""

    index: int
    text: str = ""
    scored: tuple[ScoredToken, ...] = ()
    ending: Ending | None = None


class Usage(Struct, frozen=True):
    """Token counts of the whole request."""

    prompt: int
    completion: int
    cached: int
    predicted: tuple[int, int] | None = None  # accepted and rejected draft tokens, if the client asked for them

    def json(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        details = {}
        if self.predicted is not None:
            names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
            details["completion_tokens_details"] = dict(zip(names, self.predicted, strict=True))
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **details,
        }


class ResponseHead(Struct, frozen=True):
    """The fields that every chunk of a response repeats."""

    id: str
    created: int
    model: str
    logprobs: bool
    null_usage: bool  # write `usage: null` into the chunks before the usage chunk


class ResponseFormat(Protocol):
    """How one endpoint writes its response objects."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice; None if the endpoint has no such chunk."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """The chunk that carries a delta."""

    def usage_chunk(self, usage: Usage, timing: dict[str, float] | None) -> dict[str, Any]:
        """The chunk after the last choice ended."""

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: dict[str, float] | None) -> dict[str, Any]:
        """The body of a response that is not streamed; each delta is a complete choice."""


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk([self._choice(index, {"role": "assistant", "content": ""}, (), None)])

    def chunk(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or not delta.ending else {}
        return self._chunk([self._choice(delta.index, content, delta.scored, delta.ending)])

    def usage_chunk(self, usage: Usage, timing: dict[str, float] | None) -> dict[str, Any]:
        return {**_base(self._head, "chat.completion.chunk"), "choices": [], **_totals(usage, timing)}

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: dict[str, float] | None) -> dict[str, Any]:
        done = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.scored),
                **_finish(choice.ending),
            }
            for choice in choices
        ]
        return {**_base(self._head, "chat.completion"), "choices": done, **_totals(usage, timing)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._head.null_usage else {}
        return {**_base(self._head, "chat.completion.chunk"), "choices": choices, **usage}

    def _choice(
        self, index: int, content: dict[str, str], scored: Sequence[ScoredToken], ending: Ending | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(scored) if scored else None
        return {"index": index, "delta": content, "logprobs": logprobs, **_finish(ending)}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._head.logprobs:
            return None
        content = [{**_token(entry.token), "top_logprobs": [_token(piece) for piece in entry.top]} for entry in scored]
        return {"content": content, "refusal": None}


class CompletionFormat:
    """`text_completion`, streamed or not."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        usage = {"usage": None} if self._head.null_usage else {}
        return {**_base(self._head, "text_completion"), "choices": [self._choice(delta)], **usage}

    def usage_chunk(self, usage: Usage, timing: dict[str, float] | None) -> dict[str, Any]:
        return {**_base(self._head, "text_completion"), "choices": [], **_totals(usage, timing)}

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: dict[str, float] | None) -> dict[str, Any]:
        done = [self._choice(choice) for choice in choices]
        return {**_base(self._head, "text_completion"), "choices": done, **_totals(usage, timing)}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.scored),
            **_finish(delta.ending),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._head.logprobs or not scored:
            return None
        return {
            "tokens": [_plain(entry.token) for entry in scored],
            "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in scored],
            "top_logprobs": [
                None if entry.logprob is None else {_plain(piece): _finite(piece.logprob) for piece in _named(entry)}
                for entry in scored
            ],
            "text_offset": [entry.offset for entry in scored],
        }


def timing_json(ending: Ending, first_byte_s: float | None) -> dict[str, float]:
    """The `timing` extension, in seconds, without unknown values. Only streams have a `first_byte` (G3)."""
    values = {
        "queue": ending.timing.queue_s,
        "prefill": ending.timing.prefill_s,
        "ttft": ending.ttft_s,
        "tpot": ending.tpot_s,
        "first_byte": first_byte_s,
    }
    return {name: value for name, value in values.items() if value is not None}


def _base(head: ResponseHead, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _totals(usage: Usage, timing: dict[str, float] | None) -> dict[str, Any]:
    return {"usage": usage.json(), **({} if timing is None else {"timing": timing})}


def _finish(ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"finish_reason": None}
    detail = {"finish_detail": ending.detail} if ending.detail else {}
    return {"finish_reason": ending.reason, **detail}


def _token(piece: TokenText) -> dict[str, Any]:
    return {"token": piece.text, "logprob": _finite(piece.logprob), "bytes": list(piece.data)}


def _named(entry: ScoredToken) -> list[TokenText]:
    """The most likely tokens and the chosen one (OpenAI: up to logprobs + 1 entries), least likely first.

    The caller makes a dictionary by text: of two tokens with the same text the more likely one stays.
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


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
