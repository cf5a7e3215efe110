"""The items of a response, and the events of each (OpenAI's Responses).

An item collects its text, and makes the events that begin, continue and finish it. `responses_format.py` orders items.
"""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from phalanx.server.answers.deltas import ScoredToken
from phalanx.server.dialects.common.log_probabilities import scored_json
from phalanx.server.fields.call_arguments import parse_arguments

Event = tuple[str, dict[str, Any]]
"""Name and fields of an event, without those of every event of an item."""

SEAL = "phalanx-1:"
"""Begins reasoning that a client keeps as `encrypted_content`: base64 of the text, and no secret."""
CUSTOM_INPUT = "input"
"""A custom tool takes a text. The model sees it as a function with this one argument."""


class ToolItem(Struct, frozen=True, kw_only=True):
    """How a request names a tool; the model may see another name."""

    name: str
    namespace: str | None = None
    custom: bool = False


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`."""
    return SEAL + base64.b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str | None:
    """The sealed reasoning; None if another server sealed it."""
    if not content.startswith(SEAL):
        return None
    try:
        return base64.b64decode(content.removeprefix(SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


class Item(ABC):
    """An open item.

    Args:
        id: of the response and the item's number; the item's own has its kind in front.
    """

    prefix: str

    def __init__(self, id: str) -> None:
        self.id = f"{self.prefix}_{id}"
        self._parts: list[str] = []

    @abstractmethod
    def begin(self) -> list[Event]:
        """The events after the item was added."""

    @abstractmethod
    def add(self, text: str, scored: Sequence[ScoredToken] = ()) -> list[Event]:
        """The events that carry a further part of the item."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The events before the item is done."""

    @abstractmethod
    def json(self, status: str) -> dict[str, Any]:
        """The item: empty if `status` is in_progress, else with all its text."""

    @property
    def _text(self) -> str:
        return "".join(self._parts)


class _TextItem(Item):
    """An item of one part, which is a text."""

    part_events = "response.content_part"
    text_events: str
    place: Mapping[str, int] = {"content_index": 0}

    def begin(self) -> list[Event]:
        return [(f"{self.part_events}.added", {**self.place, "part": self._part("")})]

    def add(self, text: str, scored: Sequence[ScoredToken] = ()) -> list[Event]:
        self._parts.append(text)
        return [(f"{self.text_events}.delta", {**self.place, "delta": text})]

    def finish(self) -> list[Event]:
        part = self._part(self._text)
        return [
            (f"{self.text_events}.done", {**self.place, "text": self._text}),
            (f"{self.part_events}.done", {**self.place, "part": part}),
        ]

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]:
        """The part with this text."""


class MessageItem(_TextItem):
    """The answer's text."""

    prefix = "msg"
    text_events = "response.output_text"

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, scored: Sequence[ScoredToken] = ()) -> list[Event]:
        logprobs = [scored_json(entry) for entry in scored]
        self._logprobs += logprobs
        (delta,) = super().add(text)
        return [_with_logprobs(delta, logprobs)]

    def finish(self) -> list[Event]:
        text, part = super().finish()
        return [_with_logprobs(text, self._logprobs), part]

    def json(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part(self._text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": list(self._logprobs), "text": text}


class ReasoningItem(_TextItem):
    """The reasoning before, or between parts of, the answer.

    Args:
        summary: put the text into the item's summary, which more clients show than its content.
        sealed: the item has `encrypted_content`.
    """

    prefix = "rs"
    text_events = "response.reasoning_text"

    def __init__(self, id: str, *, summary: bool, sealed: bool) -> None:
        super().__init__(id)
        self._sealed = sealed
        self._field, self._type = "content", "reasoning_text"
        if summary:
            self._field, self._type = "summary", "summary_text"
            self.part_events, self.text_events = "response.reasoning_summary_part", "response.reasoning_summary_text"
            self.place = {"summary_index": 0}

    def json(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        if status == "in_progress":
            return item
        sealed = {"encrypted_content": seal(self._text)} if self._sealed else {}
        return {**item, self._field: [self._part(self._text)], **sealed}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self._type, "text": text}


class FunctionCall(Item):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, id: str, tool: ToolItem, call_id: str) -> None:
        super().__init__(id)
        self._tool = tool
        self._call_id = call_id

    def begin(self) -> list[Event]:
        return []

    def add(self, text: str, scored: Sequence[ScoredToken] = ()) -> list[Event]:
        self._parts.append(text)
        return [("response.function_call_arguments.delta", {"delta": text})] if text else []

    def finish(self) -> list[Event]:
        return [("response.function_call_arguments.done", {"name": self._tool.name, "arguments": self._text})]

    def json(self, status: str) -> dict[str, Any]:
        arguments = "" if status == "in_progress" else self._text
        return {**self._head("function_call", status), "arguments": arguments}

    def _head(self, kind: str, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": kind, "status": status, "call_id": self._call_id, "name": self._tool.name}
        return head if self._tool.namespace is None else {**head, "namespace": self._tool.namespace}


class CustomCall(FunctionCall):
    """A call of a tool that takes a text, which is sent when its JSON is whole."""

    prefix = "ctc"

    def add(self, text: str, scored: Sequence[ScoredToken] = ()) -> list[Event]:
        self._parts.append(text)
        return []

    def finish(self) -> list[Event]:
        text = self._input()
        delta: list[Event] = [("response.custom_tool_call_input.delta", {"delta": text})] if text else []
        return [*delta, ("response.custom_tool_call_input.done", {"input": text})]

    def json(self, status: str) -> dict[str, Any]:
        text = "" if status == "in_progress" else self._input()
        return {**self._head("custom_tool_call", status), "input": text}

    def _input(self) -> str:
        """The function's argument; if the model wrote something else, all of it, for a clear error of the tool."""
        try:
            given = parse_arguments(self._text).get(CUSTOM_INPUT)
        except ValueError:  # the answer ended inside
            return self._text
        return given if isinstance(given, str) else self._text


def _with_logprobs(event: Event, logprobs: list[dict[str, Any]]) -> Event:
    name, fields = event
    return name, {**fields, "logprobs": list(logprobs)}
