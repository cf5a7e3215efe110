"""The grammar of a stream of OpenAI's Responses, as a state machine, and the texts that a stream says.

Written after OpenAI's reference and what its clients need; does not know the code that writes streams.
"""

from __future__ import annotations

import json
from typing import Any

KINDS = {
    # type of an item -> prefix of its inner events, and whether it has a part around its text
    "message": ("response.output_text", "response.content_part", "content_index"),
    "reasoning": ("response.reasoning_text", "response.content_part", "content_index"),
    "summary": ("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index"),
    "function_call": ("response.function_call_arguments", None, None),
    "custom_tool_call": ("response.custom_tool_call_input", None, None),
}
ENDS = ("response.completed", "response.incomplete", "response.failed")
TEXT_OF_DONE = {"function_call": "arguments", "custom_tool_call": "input"}


def parse_stream(data: bytes | str) -> list[dict[str, Any]]:
    """The events of a stream, each checked to be an `event:` line and a `data:` line with the same name."""
    text = data if isinstance(data, str) else data.decode()
    assert text.endswith("\n\n"), "the last event is cut"
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            assert "\n" not in block
            continue
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}" and payload.startswith("data: ")
        found.append(event)
    return found


class StreamGrammar:
    """Takes the events of one stream in order, and fails at the first that may not come."""

    def __init__(self) -> None:
        self.ended: dict[str, Any] | None = None  # the last event
        self.done: list[dict[str, Any]] = []  # items, with those that are no part of the output
        self._n = 0
        self._began = 0  # of the two events that begin a stream
        self._id = ""
        self._item: dict[str, Any] | None = None
        self._text: list[str] = []
        self._state = ""  # of the open item: added, open, text done, part done

    def take(self, event: dict[str, Any]) -> None:
        """The next event."""
        assert self.ended is None, "an event after the end"
        assert event["sequence_number"] == self._n
        self._n += 1
        kind = event["type"]
        if kind == "keepalive":
            return
        if self._began < 2:
            assert kind == ("response.created", "response.in_progress")[self._began]
            self._began += 1
            self._response(event["response"], "in_progress")
        elif kind in ENDS:
            self._end(event)
        elif kind == "response.output_item.added":
            assert self._item is None and event["output_index"] == len(self.done)
            self._item, self._text = event["item"], []
            assert self._item["status"] == "in_progress"
            self._state = "added"
        elif kind == "response.output_item.done":
            self._item_done(event)
        else:
            self._inner(kind, event)

    def finish(self) -> dict[str, Any]:
        """The stream is over: its response."""
        assert self.ended is not None, "no end"
        response: dict[str, Any] = self.ended["response"]
        return response

    def _inner(self, kind: str, event: dict[str, Any]) -> None:
        assert self._item is not None
        assert event["item_id"] == self._item["id"] and event["output_index"] == len(self.done)
        sort = self._item["type"]
        if sort == "reasoning" and "summary" in kind:
            sort = "summary"
        text, part, index = KINDS[sort]
        if index is not None:
            assert event[index] == 0
        if kind == f"{part}.added":
            assert self._state == "added" and event["part"]["text"] == ""
            self._state = "open"
        elif kind == f"{text}.delta":
            assert self._state == ("open" if part else "added")
            self._text.append(event["delta"])
        elif kind == f"{text}.done":
            assert self._state == ("open" if part else "added")
            assert event[TEXT_OF_DONE.get(sort, "text")] == "".join(self._text)
            self._state = "text done" if part else "part done"
        else:
            assert kind == f"{part}.done" and self._state == "text done"
            assert event["part"]["text"] == "".join(self._text)
            self._state = "part done"

    def _item_done(self, event: dict[str, Any]) -> None:
        item = event["item"]
        assert self._item is not None and self._state == "part done" and event["output_index"] == len(self.done)
        assert item["id"] == self._item["id"] and item["type"] == self._item["type"]
        assert item["status"] in ("completed", "incomplete")
        assert text_of(item) == "".join(self._text)
        self.done.append(item)
        self._item = None

    def _end(self, event: dict[str, Any]) -> None:
        status = event["type"].removeprefix("response.")
        response = event["response"]
        self._response(response, status)
        assert (response["error"] is not None) == (status == "failed")
        assert (response["incomplete_details"] is not None) == (status == "incomplete")
        if status != "failed":
            assert self._item is None
            assert response["usage"]["total_tokens"] >= 0
        assert response["output"] == [
            item for item in self.done if item["status"] == "completed" or "call" not in item["type"]
        ]
        self.ended = event

    def _response(self, response: dict[str, Any], status: str) -> None:
        self._id = self._id or response["id"]
        assert response["id"] == self._id and response["object"] == "response" and response["status"] == status


def text_of(item: dict[str, Any]) -> str:
    """What an item says: text, reasoning, arguments or input."""
    if item["type"] in TEXT_OF_DONE:
        return str(item[TEXT_OF_DONE[item["type"]]])
    return "".join(part["text"] for part in [*item.get("summary", []), *item.get("content", [])])


def check_stream(data: bytes | str) -> StreamGrammar:
    """The grammar after a whole stream."""
    grammar = StreamGrammar()
    for event in parse_stream(data):
        grammar.take(event)
    grammar.finish()
    return grammar
