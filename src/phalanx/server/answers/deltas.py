"""The parts of an answer, the same for every dialect: deltas, endings, usage.

A dialect (`dialects/`) writes them as JSON for its clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from phalanx.types import Timing


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


class ChoiceEnding(Struct, frozen=True, kw_only=True):
    """Why a choice ended, and its token counts and times (seconds)."""

    reason: Literal["stop", "length", "tool_calls"]
    detail: str = ""
    stop_string: str | None = None  # that ended the choice
    context_full: bool = False  # the context had no room for as many tokens as the client allowed
    n_tokens: int
    cached_tokens: int
    disk_tokens: int = 0  # of those, loaded from disk
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    timing: Timing
    ttft_s: float | None
    tpot_s: float | None  # mean seconds per token after the first


class CallDelta(Struct, frozen=True, kw_only=True):
    """The new part of a call: its id and name in the first delta, and a fragment of its arguments (JSON)."""

    index: int  # of the call, among those of its choice
    id: str = ""
    name: str = ""
    arguments: str = ""
    broken: bool = False  # the call is invalid; a stream has sent its fragments so far


class Delta(Struct, frozen=True, kw_only=True):
    """The new part of a choice: text, reasoning, calls, scored tokens and, in the last delta, the ending."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()  # at most one per call
    scored: tuple[ScoredToken, ...] = ()
    ending: ChoiceEnding | None = None

    @property
    def n_chars(self) -> int:
        """Characters of text, reasoning and calls."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.calls)
        return len(self.text) + len(self.reasoning) + calls


def join_calls(parts: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Join the consecutive parts of each call into one."""
    by_index: dict[int, list[CallDelta]] = {}
    for part in parts:
        by_index.setdefault(part.index, []).append(part)
    return tuple(
        CallDelta(
            index=index,
            id=parts[0].id,
            name=parts[0].name,
            arguments="".join(part.arguments for part in parts),
            broken=parts[-1].broken,
        )
        for index, parts in by_index.items()
    )


class Usage(Struct, frozen=True):
    """Token counts of the whole request."""

    prompt: int
    completion: int
    cached: int | None = None  # prompt tokens from the prefix cache; None: not known before the end
    predicted: tuple[int, int] | None = None  # accepted and rejected draft tokens, if the client asked for them
    reasoning: int | None = None  # output tokens of reasoning; None for a model without
    from_disk: int = 0  # of the cached prompt tokens, those loaded from disk


class ResponseHead(Struct, frozen=True):
    """Properties of an answer that are known before it begins."""

    id: str
    created: int
    model: str
    logprobs: bool
    usage_at_end: bool = False  # a stream's last chunk has the usage of the whole request
    null_usage: bool = False  # write `usage: null` into the chunks before that one
    moves: int = 0  # between servers, unless all compute the same tokens; reported at the stream's end


def moves_json(head: ResponseHead) -> dict[str, Any]:
    """The `phalanx` extension at the end of a stream that moved to a server of another determinism key."""
    return {"phalanx": {"moves": head.moves, "exact": False}} if head.moves else {}


def timing_json(ending: ChoiceEnding, first_byte_s: float | None) -> dict[str, float]:
    """The `timing` extension, in seconds, without unknown values. Only streams have a `first_byte`."""
    values = {
        "queue": ending.timing.queue_s,
        "prefill": ending.timing.prefill_s,
        "ttft": ending.ttft_s,
        "tpot": ending.tpot_s,
        "first_byte": first_byte_s,
    }
    return {name: value for name, value in values.items() if value is not None}
