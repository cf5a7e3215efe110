"""Writes answers of `/api/chat` and `/api/generate` (Ollama): one JSON object a line.

Calls are sent whole, since Ollama's clients read their arguments as an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from phalanx.http.error_responses import Failure, ollama_error
from phalanx.http.stream_records import LINES
from phalanx.server.answers.deltas import CallDelta, ChoiceEnding, Delta, ResponseHead, Usage, join_calls, moves_json
from phalanx.server.answers.event_framing import one_line
from phalanx.server.dialects.common.log_probabilities import scored_json
from phalanx.server.fields.call_arguments import parse_arguments
from phalanx.server.fields.timestamps import iso_time

NANOSECONDS = 1e9  # in a second


class OllamaAnswer(Struct, frozen=True):
    """The place of the text in an endpoint's answers."""

    place: Callable[[Mapping[str, Any], str], dict[str, Any]]  # (thinking and calls, text) -> fields of the object

    def loaded(self, model: str, created: int, reason: Literal["load", "unload"]) -> dict[str, Any]:
        """The answer to a request without a prompt, which only loads or unloads the model."""
        return {**_head(model, created), **self.place({}, ""), "done": True, "done_reason": reason}


def _in_message(others: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, **others}}


def _beside(others: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"response": text, **others}


CHAT_ANSWER = OllamaAnswer(_in_message)
GENERATE_ANSWER = OllamaAnswer(_beside)


class OllamaFormat:
    """Answers of one choice."""

    media_type = LINES
    next_number = 0
    keep_alive = b" "  # before the next object; an empty line would not be JSON

    def __init__(self, head: ResponseHead, answer: OllamaAnswer) -> None:
        self._answer = answer
        self._base = _head(head.model, head.created)
        self._logprobs = head.logprobs
        self._moves = moves_json(head)
        self._calls: list[CallDelta] = []  # parts of unfinished calls
        self._ending: ChoiceEnding | None = None

    def opening(self, n_choices: int, so_far: Usage | None) -> bytes:
        """Nothing."""
        return b""

    def events(self, deltas: Sequence[Delta], so_far: Usage | None) -> bytes:
        """A line per delta that has something to say."""
        return b"".join(map(self._event, deltas))

    def closing(self, usage: Usage, timing: Mapping[str, float] | None) -> bytes:
        """The line that is done, with counts and durations."""
        assert self._ending is not None, "every choice has ended"
        return _line({**self._base, **self._answer.place({}, ""), **_totals(self._ending, usage), **self._moves})

    def failure(self, failure: Failure) -> bytes:
        """The error."""
        return _line(ollama_error(failure))

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: Mapping[str, float] | None) -> dict[str, Any]:
        """All in one object."""
        (choice,) = choices
        assert choice.ending is not None
        fields = self._fields(choice, choice.calls)
        return {**self._base, **fields, **_totals(choice.ending, usage)}

    def _event(self, delta: Delta) -> bytes:
        self._ending = delta.ending or self._ending
        done = self._whole_calls(delta)
        if not (delta.text or delta.reasoning or done or (self._logprobs and delta.scored)):
            return b""
        return _line({**self._base, **self._fields(delta, done), "done": False})

    def _whole_calls(self, delta: Delta) -> Sequence[CallDelta]:
        """The calls that are complete now: a later one has begun, or the answer has ended."""
        self._calls += delta.calls
        last = max((part.index for part in self._calls), default=0)
        done = [part for part in self._calls if delta.ending is not None or part.index < last]
        self._calls = [] if delta.ending is not None else [part for part in self._calls if part.index == last]
        return join_calls(done)

    def _fields(self, delta: Delta, calls: Sequence[CallDelta]) -> dict[str, Any]:
        others: dict[str, Any] = {"thinking": delta.reasoning} if delta.reasoning else {}
        if whole := [_call(call) for call in calls if not call.broken]:
            others["tool_calls"] = whole
        scored = {"logprobs": [scored_json(entry) for entry in delta.scored]} if self._logprobs else {}
        return {**self._answer.place(others, delta.text), **scored}


def _head(model: str, created: int) -> dict[str, Any]:
    return {"model": model, "created_at": iso_time(created)}


def _line(payload: Mapping[str, Any]) -> bytes:
    return one_line(payload) + b"\n"


def _call(call: CallDelta) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name, "arguments": parse_arguments(call.arguments)}
    return {"id": call.id, "index": call.index, "function": function}  # litellm joins calls without this index


def _totals(ending: ChoiceEnding, usage: Usage) -> dict[str, Any]:
    """The model is loaded already, so `load_duration` is the wait for a place in the batch."""
    timing = ending.timing
    return {
        "done": True,
        "done_reason": "length" if ending.reason == "length" else "stop",
        "total_duration": _ns(timing.queue_s + timing.prefill_s + timing.decode_s),
        "load_duration": _ns(timing.queue_s),
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": _ns(timing.prefill_s),
        "eval_count": usage.completion,
        "eval_duration": _ns(timing.decode_s),
    }


def _ns(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, round(seconds * NANOSECONDS))
