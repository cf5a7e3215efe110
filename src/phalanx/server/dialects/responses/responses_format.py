"""`/v1/responses`: the response object and the events of its stream (OpenAI).

Decides the order in which items begin and end, and the response's status. `responses_items.py` writes the items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from phalanx.http.error_responses import Failure
from phalanx.server.answers.deltas import CallDelta, ChoiceEnding, Delta, ResponseHead, ScoredToken, Usage, moves_json
from phalanx.server.answers.event_framing import named_event
from phalanx.server.dialects.responses.responses_items import (
    CustomCall,
    Event,
    FunctionCall,
    Item,
    MessageItem,
    ReasoningItem,
    ToolItem,
)

ID_PREFIX = "resp_"


class ResponseOptions(Struct, frozen=True, kw_only=True):
    """A request's options for the form of its answer."""

    echoed: Mapping[str, Any]  # fields that the response object repeats
    tools: Mapping[str, ToolItem]  # by the names that the model sees
    summary: bool = False  # see `ReasoningItem`
    sealed: bool = False


class ResponsesFormat:
    """Writes one response."""

    media_type = "text/event-stream"

    def __init__(self, head: ResponseHead, options: ResponseOptions) -> None:
        self._head = head
        self._options = options
        self.next_number = 0
        self._n_items = 0
        self._item: Item | None = None  # open
        self._output: list[dict[str, Any]] = []  # finished items, without broken calls, which no client may run
        self._answers = False  # there is a message or a call
        self._ending: ChoiceEnding | None = None
        self._scored: list[ScoredToken] = []  # not sent yet, since no text was

    @property
    def keep_alive(self) -> bytes:
        """An event, since clients give up some minutes after the last event, and do not count comments."""
        return self._written([("keepalive", {})])

    def opening(self, n_choices: int, so_far: Usage | None) -> bytes:
        """`response.created` and `response.in_progress`"""
        response = self._response("in_progress")
        return self._written([(f"response.{name}", {"response": response}) for name in ("created", "in_progress")])

    def events(self, deltas: Sequence[Delta], so_far: Usage | None) -> bytes:
        """The events of the deltas."""
        return self._written([event for delta in deltas for event in self._delta(delta)])

    def closing(self, usage: Usage, timing: Mapping[str, float] | None) -> bytes:
        """The end of the last item, and `response.completed` or `response.incomplete`."""
        events = self._end()
        response = self._response(self._status, usage, timing)
        return self._written([*events, (f"response.{self._status}", {"response": response, **moves_json(self._head)})])

    def failure(self, failure: Failure) -> bytes:
        """`response.failed`, with the finished items."""
        error = {"code": _code(failure), "message": failure.message}
        return self._written([("response.failed", {"response": {**self._response("failed"), "error": error}})])

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: Mapping[str, float] | None) -> dict[str, Any]:
        """The response object."""
        for choice in choices:
            self._delta(choice)
        self._end()
        return self._response(self._status, usage, timing)

    # -- items -------------------------------------------------------------------------------------------------------

    def _delta(self, delta: Delta) -> list[Event]:
        """The rest of a call comes before everything else: its text follows it if it is broken."""
        self._ending = delta.ending or self._ending
        if self._head.logprobs:
            self._scored += delta.scored
        events: list[Event] = []
        for call in delta.calls:
            if not call.id:
                events += self._continue(call)
        if delta.reasoning:
            events += self._reason(delta.reasoning)
        if delta.text:
            events += self._say(delta.text)
        for call in delta.calls:
            if call.id and not call.broken:
                events += self._call(call)
        return events

    def _reason(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._item, ReasoningItem):
            item = ReasoningItem(self._next_id(), summary=self._options.summary, sealed=self._options.sealed)
            events = self._begin(item)
        return events + self._add(text)

    def _say(self, text: str) -> list[Event]:
        events = [] if isinstance(self._item, MessageItem) else self._begin(MessageItem(self._next_id()))
        return events + self._add(text)

    def _call(self, call: CallDelta) -> list[Event]:
        tool = self._options.tools.get(call.name) or ToolItem(name=call.name)
        kind = CustomCall if tool.custom else FunctionCall
        return self._begin(kind(self._next_id(), tool, call.id)) + self._add(call.arguments)

    def _continue(self, call: CallDelta) -> list[Event]:
        events = self._add(call.arguments)
        return events + self._close("incomplete") if call.broken else events

    def _begin(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self._item = item
        self._n_items += 1
        self._answers = self._answers or not isinstance(item, ReasoningItem)
        added: Event = ("response.output_item.added", {**self._place(), "item": item.json("in_progress")})
        return [*events, added, *self._placed(item.begin())]

    def _add(self, text: str) -> list[Event]:
        assert self._item is not None
        scored: list[ScoredToken] = []
        if isinstance(self._item, MessageItem):
            scored, self._scored = self._scored, []
        return self._placed(self._item.add(text, scored))

    def _close(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        if (item := self._item) is None:
            return []
        done = item.json(status)
        events = self._placed(item.finish())
        events.append(("response.output_item.done", {**self._place(), "item": done}))
        if status == "completed" or not isinstance(item, FunctionCall):
            self._output.append(done)
        self._item = None
        return events

    def _end(self) -> list[Event]:
        """End the last item. An answer without text becomes an empty message, since clients look for one."""
        events: list[Event] = []
        if not self._answers and self._status == "completed":
            events = self._begin(MessageItem(self._next_id()))
        is_call = isinstance(self._item, FunctionCall)  # whole, however the answer ended
        return events + self._close("completed" if is_call else self._status)

    def _next_id(self) -> str:
        return f"{self._head.id.removeprefix(ID_PREFIX)}_{self._n_items}"

    def _place(self) -> dict[str, Any]:
        return {"output_index": self._n_items - 1}

    def _placed(self, events: list[Event]) -> list[Event]:
        """The events of the open item."""
        assert self._item is not None
        place = {"item_id": self._item.id, **self._place()}
        return [(name, {**place, **fields}) for name, fields in events]

    # -- the response ------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        assert self._ending is not None, "every choice has ended"
        return "incomplete" if self._ending.reason == "length" else "completed"

    def _response(
        self, status: str, usage: Usage | None = None, timing: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        detail = self._ending.detail if self._ending else ""
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head.model,
            "output": list(self._output),
            **self._options.echoed,
            "usage": None if usage is None else usage_json(usage),
            **({"finish_detail": detail} if detail else {}),
            **({} if timing is None else {"timing": timing}),
        }

    def _written(self, events: Sequence[Event]) -> bytes:
        parts = []
        for name, fields in events:
            parts.append(named_event(name, {"type": name, "sequence_number": self.next_number, **fields}))
            self.next_number += 1
        return b"".join(parts)


def usage_json(usage: Usage) -> dict[str, Any]:
    """`usage` of a response."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _code(failure: Failure) -> str:
    """`error.code`: clients retry by it."""
    return failure.code or ("invalid_prompt" if failure.status < 500 else "server_error")
