"""Converts the items of a response's input into messages for chat templates.

Consecutive reasoning, texts and calls were one answer of the model, and become one message again, so that the prompt
begins like the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.server.dialects.responses.responses_body import RECORDS, TEXT_PARTS, InputItem, InputPart
from phalanx.server.dialects.responses.responses_items import CUSTOM_INPUT, unseal
from phalanx.server.fields.refusals import invalid, unsupported
from phalanx.server.requests.conversation import CallsSoFar, arguments_of

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of a message -> its name in templates."""
UNSTORED = '"item_reference": nothing is stored; set store: false in the client, so that it sends the items themselves'
"""The remedy for a client that takes every response for a stored one, as Vercel's `ai` does by default."""


def shown_name(name: str, namespace: str | None) -> str:
    """The name that the model sees of a tool: every format of calls can write it."""
    return name if namespace is None else f"{namespace}__{name}"


def parse_input(instructions: str | None, given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages of a request.

    Raises:
        InvalidRequest: names the field.
    """
    history = _History()
    if instructions:
        history.say("system", instructions)
    if isinstance(given, str):
        history.say("user", given)
    elif not given:
        raise invalid("input", "input is empty; send a text, or at least one item.")
    else:
        for i, item in enumerate(given):
            history.add(item, f"input[{i}]")
    return history.finish()


class _Answer:
    """An answer of the model, to which further items may belong."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def message(self) -> dict[str, Any]:
        """The message for templates."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return {**message, "tool_calls": self.calls} if self.calls else message


class _History:
    """The messages so far."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._open: _Answer | None = None
        self._texted = False  # the last item was a text of the assistant's
        self._calls = CallsSoFar()

    def say(self, role: str, text: str, **more: str) -> None:
        """Append a message that is not an answer."""
        self._end_answer()
        self._messages.append({"role": role, "content": text, **more})

    def finish(self) -> list[dict[str, Any]]:
        """All messages."""
        self._end_answer()
        return self._messages

    def add(self, item: InputItem, where: str) -> None:
        """Append an item."""
        texted, self._texted = self._texted, False
        kind = item.type or ("message" if item.role is not None else None)
        match kind:
            case "message":
                self._message(item, where, texted)
            case "reasoning":
                if reasoning := _reasoning(item, where):
                    self._answer().reasoning.append(reasoning)
            case "function_call":
                self._call(item, where, arguments_of(item.arguments, f"{where}.arguments"))
            case "custom_tool_call":
                self._call(item, where, {CUSTOM_INPUT: item.input or ""})
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, where)
            case "item_reference":
                raise unsupported(f"{where}.type", UNSTORED)
            case None:
                raise invalid(f"{where}.type", f"{where}.type is missing, and so is {where}.role.")
            case _ if kind not in RECORDS:
                raise unsupported(f"{where}.type", f"{kind[:40]!r}")

    def _message(self, item: InputItem, where: str, texted: bool) -> None:
        role = ROLES.get(item.role or "")
        if role is None:
            known = ", ".join(ROLES)
            raise invalid(f"{where}.role", f"{where}.role is {str(item.role)[:40]!r}; known are {known}.")
        text = _text(item.content, f"{where}.content")
        if role != "assistant":
            self.say(role, text)
            return
        if texted:
            self._end_answer()
        self._answer().texts.append(text)
        self._texted = True

    def _call(self, item: InputItem, where: str, arguments: dict[str, Any]) -> None:
        for field in ("call_id", "name"):
            if not getattr(item, field):
                raise invalid(f"{where}.{field}", f"{where}.{field} is missing.")
        assert item.call_id and item.name
        name = shown_name(item.name, item.namespace)
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._answer().calls.append(call)

    def _output(self, item: InputItem, where: str) -> None:
        if not item.call_id:
            raise invalid(f"{where}.call_id", f"{where}.call_id is missing; which call does it answer?")
        self._end_answer()
        answered = self._calls.result(item.call_id, f"{where}.call_id")
        self.say("tool", _text(item.output, f"{where}.output"), **answered)

    def _answer(self) -> _Answer:
        """The answer of the items before, or a new one."""
        self._open = self._open or _Answer()
        return self._open

    def _end_answer(self) -> None:
        if self._open is not None:
            self._messages.append(self._open.message())
            self._calls.answer(self._open.calls)
            self._open = None


def _reasoning(item: InputItem, where: str) -> str:
    """The item's text, from one of three places; empty if another server sealed it."""
    if item.encrypted_content and (text := unseal(item.encrypted_content)) is not None:
        return text
    if item.content:
        return _text(item.content, f"{where}.content")
    return _text(item.summary, f"{where}.summary") if item.summary else ""


def _text(content: str | list[InputPart] | None, where: str) -> str:
    if content is None:
        raise invalid(where, f"{where} is missing.")
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise unsupported(f"{where}[{i}].type", f"{part.type[:40]!r}; only texts can be read by this model")
        name = "refusal" if part.type == "refusal" else "text"
        if (text := getattr(part, name)) is None:
            raise invalid(f"{where}[{i}].{name}", f"{where}[{i}].{name} is missing.")
        texts.append(text)
    return "\n".join(texts)
