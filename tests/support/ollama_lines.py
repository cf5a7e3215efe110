"""The grammar of Ollama's streams, as a reader that takes every line in order and joins the answer."""

from __future__ import annotations

import json
from typing import Any

HEAD = {"model", "created_at", "done"}
TOTALS = {
    "done_reason",
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


class Answer:
    """Takes lines; each assertion is a rule of the grammar.

    Args:
        chat: of `/api/chat`, not of `/api/generate`.
    """

    def __init__(self, *, chat: bool) -> None:
        self.text = ""
        self.thinking = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}  # the line that is done
        self.error: str | None = None
        self.ended = False
        self._chat = chat

    def take(self, line: dict[str, Any]) -> None:
        assert not self.ended, "a line after the last one"
        if "error" in line:
            assert line.keys() == {"error"}
            self.error, self.ended = line["error"], True
            return
        place = {"message"} if self._chat else {"response"}
        known = (
            HEAD | place | {"logprobs"} | (set() if self._chat else {"thinking"}) | (TOTALS if line["done"] else set())
        )
        assert HEAD | place <= line.keys() <= known, line
        assert line["created_at"].endswith("Z")
        self._add(line["message"] if self._chat else {**line, "content": line["response"]})
        self.logprobs += line.get("logprobs", [])
        if line["done"]:
            self.last, self.ended = line, True
            assert line.keys() >= TOTALS and line["done_reason"] in ("stop", "length")
            assert all(type(line[name]) is int and line[name] > 0 for name in TOTALS if "duration" in name)

    def _add(self, part: dict[str, Any]) -> None:
        assert not self._chat or ({"role", "content"} <= part.keys() <= {"role", "content", "thinking", "tool_calls"})
        self.text += part["content"]
        self.thinking += part.get("thinking", "")
        for call in part.get("tool_calls", []):
            function = call["function"]
            assert function["index"] >= len(self.calls) and function["name"] and isinstance(function["arguments"], dict)
            assert call["index"] == function["index"]
            assert call["id"] not in {one["id"] for one in self.calls}
            self.calls.append(call)


def read_lines(stream: str | bytes, *, chat: bool = True) -> Answer:
    """Read a whole stream."""
    text = stream.decode() if isinstance(stream, bytes) else stream
    assert text.endswith("\n")
    answer = Answer(chat=chat)
    for line in text.splitlines():  # as httpx cuts them
        answer.take(json.loads(line))
    assert answer.ended
    return answer
