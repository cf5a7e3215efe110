"""Shared parts of OpenAI's chat and text completions: usage, endings, events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.http.error_responses import Failure, openai_error
from phalanx.server.answers.deltas import ChoiceEnding, ResponseHead, Usage, moves_json
from phalanx.server.answers.event_framing import DONE, KEEP_ALIVE, event


class OpenAIStream:
    """The part of a stream that chat and text completions share."""

    media_type = "text/event-stream"
    keep_alive = KEEP_ALIVE
    next_number = 0
    kind: str  # `object` of a chunk

    def __init__(self, head: ResponseHead) -> None:
        self._head = head

    def closing(self, usage: Usage, timing: Mapping[str, float] | None) -> bytes:
        """A chunk with the usage if the client wants one, and the end of the stream."""
        if not self._head.usage_at_end:
            return DONE
        last = {**base(self._head, self.kind), "choices": [], **totals(usage, timing), **moves_json(self._head)}
        return event(last) + DONE

    def failure(self, failure: Failure) -> bytes:
        """The error, and the end of the stream."""
        return event(openai_error(failure)) + DONE

    def _chunk(self, choice: Mapping[str, Any], so_far: Usage | None) -> bytes:
        moves = moves_json(self._head) if choice["finish_reason"] is not None else {}
        return event({**base(self._head, self.kind), "choices": [choice], **_usage_so_far(self._head, so_far), **moves})


def base(head: ResponseHead, kind: str) -> dict[str, Any]:
    """The fields of every object of an answer."""
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def totals(usage: Usage, timing: Mapping[str, float] | None) -> dict[str, Any]:
    """`usage`, and our `timing` beside it."""
    return {"usage": usage_json(usage), **({} if timing is None else {"timing": timing})}


def finish(ending: ChoiceEnding | None) -> dict[str, Any]:
    """`finish_reason` and, where there is more to say, our `finish_detail`."""
    if ending is None:
        return {"finish_reason": None}
    detail = {"finish_detail": ending.detail} if ending.detail else {}
    return {"finish_reason": ending.reason, **detail}


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    details: dict[str, Any] = {}
    if usage.cached is not None:
        details["prompt_tokens_details"] = {"cached_tokens": usage.cached, **_cached_details(usage)}
    output = {} if usage.reasoning is None else {"reasoning_tokens": usage.reasoning}
    if usage.predicted is not None:
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        output |= dict(zip(names, usage.predicted, strict=True))
    if output:
        details["completion_tokens_details"] = output
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        **details,
    }


def _cached_details(usage: Usage) -> dict[str, Any]:
    """Our own field: where cached tokens were, if some were on disk."""
    if not usage.from_disk:
        return {}
    return {"cached_tokens_details": {"memory": (usage.cached or 0) - usage.from_disk, "disk": usage.from_disk}}


def _usage_so_far(head: ResponseHead, usage: Usage | None) -> dict[str, Any]:
    if usage is not None:
        return {"usage": usage_json(usage)}
    return {"usage": None} if head.null_usage else {}
