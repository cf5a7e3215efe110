"""`/v1/chat/completions`: `chat.completion` and `chat.completion.chunk` (OpenAI)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from phalanx.server.answers.deltas import CallDelta, ChoiceEnding, Delta, ResponseHead, ScoredToken, Usage
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody
from phalanx.server.dialects.common.log_probabilities import scored_json
from phalanx.server.dialects.openai.openai_objects import OpenAIStream, base, finish, totals
from phalanx.server.fields.openai_bodies import ChatBody
from phalanx.server.requests.parsed import ApiModel
from phalanx.server.requests.validate import parse_chat


class ChatFormat(OpenAIStream):
    """`/v1/chat/completions`

    Args:
        shows_reasoning: without it, chunks of reasoning are empty.
    """

    kind = "chat.completion.chunk"

    def __init__(self, head: ResponseHead, *, shows_reasoning: bool = True) -> None:
        super().__init__(head)
        self._shows_reasoning = shows_reasoning
        self._streamed: dict[int, list[int]] = {}  # by choice: its calls that were streamed, at least in part

    def opening(self, n_choices: int, so_far: Usage | None) -> bytes:
        """A chunk with the role per choice."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(self._choice(index, role, (), None), so_far) for index in range(n_choices))

    def events(self, deltas: Sequence[Delta], so_far: Usage | None) -> bytes:
        """A chunk per delta."""
        return b"".join(self._delta(delta, so_far) for delta in deltas)

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: Mapping[str, float] | None) -> dict[str, Any]:
        """`chat.completion`"""
        done = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": self._logprobs(choice.scored),
                **finish(choice.ending),
            }
            for choice in choices
        ]
        return {**base(self._head, "chat.completion"), "choices": done, **totals(usage, timing)}

    def _message(self, choice: Delta) -> dict[str, Any]:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
            if not call.broken
        ]
        content = choice.text or None if calls else choice.text
        message = {"role": "assistant", "content": content, "refusal": None, **self._reasoning(choice)}
        return {**message, "tool_calls": calls} if calls else message

    def _reasoning(self, delta: Delta) -> dict[str, Any]:
        """Under both names that clients read: DeepSeek's, and OpenRouter's, which vLLM writes as well."""
        if not (delta.reasoning and self._shows_reasoning):
            return {}
        return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}

    def _delta(self, delta: Delta, so_far: Usage | None) -> bytes:
        new = self._reasoning(delta)
        if calls := [_call(call, self._number(delta, call)) for call in delta.calls if not call.broken]:
            new["tool_calls"] = calls
        if delta.text or not (delta.ending or new):
            new["content"] = delta.text
        return self._chunk(self._choice(delta.index, new, delta.scored, delta.ending), so_far)

    def _number(self, delta: Delta, call: CallDelta) -> int:
        """The call's number among those that the client sees, which count without gaps."""
        streamed = self._streamed.setdefault(delta.index, [])
        if call.index not in streamed:
            streamed.append(call.index)
        return streamed.index(call.index)

    def _choice(
        self, index: int, content: dict[str, Any], scored: Sequence[ScoredToken], ending: ChoiceEnding | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(scored) if scored else None
        return {"index": index, "delta": content, "logprobs": logprobs, **finish(ending)}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._head.logprobs:
            return None
        return {"content": [scored_json(entry) for entry in scored], "refusal": None}


def _call(call: CallDelta, number: int) -> dict[str, Any]:
    """A part of a call; the first one has its id and name."""
    if not call.name:
        return {"index": number, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": number, "id": call.id, "type": "function", "function": function}


def _asked(body: ChatBody, served: ApiModel) -> ParsedBody:
    is_excluded = body.reasoning is not None and bool(body.reasoning.exclude)
    return ParsedBody(parse_chat(body, served), partial(ChatFormat, shows_reasoning=not is_excluded))


CHAT = Dialect(body=ChatBody, parse=_asked, field="messages", id_prefix="chatcmpl-")
