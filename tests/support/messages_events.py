"""The grammar of Anthropic's event streams, as a reader that takes every event in order and builds the message."""

from __future__ import annotations

import json
from typing import Any

DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
"""Kind of block -> the deltas that it may have, and the field that each adds to."""
REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"}


class MessageReader:
    """Takes events; each assertion is a rule of the grammar."""

    def __init__(self) -> None:
        self.message: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.pings = 0
        self._open: dict[str, Any] | None = None
        self._stopped = False  # there was a message_delta
        self.ended = False

    def take(self, name: str, event: dict[str, Any]) -> None:
        assert not self.ended, f"{name} after the end"
        assert event["type"] == name
        getattr(self, f"_{name}")(event)

    def _ping(self, event: dict[str, Any]) -> None:
        assert event == {"type": "ping"}
        self.pings += 1

    def _error(self, event: dict[str, Any]) -> None:
        assert event["error"].keys() == {"type", "message"}
        self.error = event["error"]
        self.ended = True

    def _message_start(self, event: dict[str, Any]) -> None:
        assert self.message is None
        self.message = event["message"]
        assert self.message["type"] == "message" and self.message["role"] == "assistant"
        assert self.message["content"] == [] and self.message["stop_reason"] is None
        assert self.message["usage"]["input_tokens"] > 0 == self.message["usage"]["output_tokens"]

    def _content_block_start(self, event: dict[str, Any]) -> None:
        assert self.message is not None and self._open is None and not self._stopped
        assert event["index"] == len(self.message["content"])
        block = event["content_block"]
        empty = {"text": {"text"}, "thinking": {"thinking", "signature"}, "tool_use": {"input"}}[block["type"]]
        assert not any(block[field] for field in empty)
        assert block["type"] != "tool_use" or (block["id"] and block["name"])
        self._open = {**block, **({"input": ""} if "input" in empty else {})}
        self.message["content"].append(self._open)

    def _content_block_delta(self, event: dict[str, Any]) -> None:
        assert self.message is not None and self._open is not None
        assert event["index"] == len(self.message["content"]) - 1
        delta = event["delta"]
        field = DELTAS[self._open["type"]][delta["type"]]
        assert delta[field]
        assert not self._open.get("signature"), "the signature comes last"
        self._open["input" if field == "partial_json" else field] += delta[field]

    def _content_block_stop(self, event: dict[str, Any]) -> None:
        assert self.message is not None and self._open is not None
        assert event["index"] == len(self.message["content"]) - 1
        assert self._open["type"] != "thinking" or self._open["signature"]
        self._open = None

    def _message_delta(self, event: dict[str, Any]) -> None:
        assert self.message is not None and self._open is None and not self._stopped
        assert event["delta"]["stop_reason"] in REASONS
        assert (event["delta"]["stop_reason"] == "stop_sequence") == (event["delta"]["stop_sequence"] is not None)
        self.message |= event["delta"]
        self.message["usage"] |= event["usage"]
        self._stopped = True

    def _message_stop(self, event: dict[str, Any]) -> None:
        assert self._stopped and event == {"type": "message_stop"}
        self.ended = True


def read_message(stream: str | bytes) -> MessageReader:
    """Read a whole stream. The input of a call stays a text, because a stream may end inside of one."""
    text = stream.decode() if isinstance(stream, bytes) else stream
    assert text.endswith("\n\n")
    reader = MessageReader()
    for event in text[:-2].split("\n\n"):
        first, second = event.split("\n")
        assert first.startswith("event: ") and second.startswith("data: ")
        reader.take(first[7:], json.loads(second[6:]))
    assert reader.ended
    return reader
