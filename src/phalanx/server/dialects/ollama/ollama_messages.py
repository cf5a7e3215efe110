"""Converts the messages of `/api/chat` (Ollama) for chat templates.

Most of Ollama's clients send no ids of calls: a tool's message answers the call of its name, or the next one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from phalanx.server.dialects.ollama.ollama_body import OllamaCall, OllamaMessage
from phalanx.server.fields.refusals import invalid, unsupported
from phalanx.server.requests.conversation import ROLES

NOTHING = ("", "")
"""Key of a result's call if the result names neither id nor tool."""


def conversation_of(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages, where every call has an id and every result the id of its call.

    Raises:
        InvalidRequest: names the field.
    """
    calls = _Calls()
    return [_message(message, f"messages[{i}]", calls) for i, message in enumerate(messages)]


class _Call(Struct, eq=False):
    id: str
    name: str
    answered: bool = False


class _Calls:
    """The calls of a history."""

    def __init__(self) -> None:
        self._n_unnamed = 0
        self._calls: defaultdict[tuple[str, str], deque[_Call]] = defaultdict(deque)
        """Id, name or `NOTHING` -> the calls that it may mean, in their order; some are answered."""

    def add(self, call: OllamaCall) -> dict[str, Any]:
        """A further call of an assistant's message."""
        one = _Call(call.id or self._new_id(), call.function.name)
        for known in (("id", one.id), ("name", one.name), NOTHING):
            self._calls[known].append(one)
        function = {"name": one.name, "arguments": call.function.arguments or {}}
        return {"id": one.id, "type": "function", "function": function}

    def answered_by(self, message: OllamaMessage) -> tuple[str, str | None]:
        """Id and name of the call that a tool's message answers: the first without an answer that it may mean."""
        known = NOTHING
        if message.tool_call_id:
            known = ("id", message.tool_call_id)
        elif message.tool_name:
            known = ("name", message.tool_name)
        calls = self._calls[known]
        while calls:  # each call is taken once: a body may have 300,000, and as many results that match none
            call = calls.popleft()
            if not call.answered:
                call.answered = True
                return call.id, call.name
        return message.tool_call_id or self._new_id(), message.tool_name

    def _new_id(self) -> str:
        """Nine letters and digits: Mistral's templates refuse every other id."""
        self._n_unnamed += 1
        return f"call{self._n_unnamed:05d}"


def _message(message: OllamaMessage, where: str, calls: _Calls) -> dict[str, Any]:
    role = message.role
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role is {role[:40]!r}; known are {', '.join(ROLES)}.")
    if message.images:
        raise unsupported(f"{where}.images", "only text can be read by this model")
    parsed: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.thinking:
        parsed["reasoning_content"] = message.thinking
    if message.tool_calls:
        if role != "assistant":
            raise invalid(f"{where}.tool_calls", f"{where}.tool_calls: only an assistant calls tools, not a {role}.")
        parsed["tool_calls"] = [calls.add(call) for call in message.tool_calls]
    if role == "tool":
        parsed["tool_call_id"], name = calls.answered_by(message)
        if name:
            parsed["name"] = name  # some templates write it
    return parsed
