"""Writes answers of `/v1/messages` (Anthropic): blocks of thinking, text and calls, streamed or whole."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Raw

from phalanx.http.error_responses import Failure, messages_error
from phalanx.server.answers.deltas import CallDelta, ChoiceEnding, Delta, ResponseHead, Usage, moves_json
from phalanx.server.answers.event_framing import named_event

Thinking = Literal["shown", "omitted", "hidden"]
"""Whether an answer has its reasoning in blocks of thinking, blocks without their text, or no such blocks."""


class MessagesFormat:
    """Writes one answer.

    A block opens with its first non-blank character, so that blanks between reasoning and a call make no block.

    A call becomes a block once it is certain: when something follows it, or the answer ends. An invalid call is never
    sent, since clients run every block of a call that they get, whatever `stop_reason` says.
    """

    media_type = "text/event-stream"
    next_number = 0
    keep_alive = named_event("ping", {"type": "ping"})  # clients end a stream without events

    def __init__(self, head: ResponseHead, thinking: Thinking) -> None:
        self._head = head
        self._thinking = thinking
        self._index = -1  # of the block that was opened last
        self._open = ""  # "thinking", "text" or "tool_use"; empty: none
        self._call: list[CallDelta] = []  # the parts of the last call, which has no block yet
        self._blanks = {"thinking": "", "text": ""}  # not sent, since no block of that kind is open
        self._signature = _Signature()
        self._ending: ChoiceEnding | None = None

    def opening(self, n_choices: int, so_far: Usage | None) -> bytes:
        """`message_start`, with the length of the prompt."""
        usage = _usage(so_far or Usage(prompt=0, completion=0))
        return _event("message_start", message=self._message([], None, usage))

    def events(self, deltas: Sequence[Delta], so_far: Usage | None) -> bytes:
        """Parts of blocks; empty while there are none to show."""
        return b"".join(event for delta in deltas for event in self._delta(delta))

    def closing(self, usage: Usage, timing: Mapping[str, float] | None) -> bytes:
        """The end of the last block, `message_delta` and `message_stop`."""
        end = _event("message_delta", delta=_stop(self._ending), usage=_usage(usage), **moves_json(self._head))
        return b"".join((*self._send_call(), *self._close())) + end + _event("message_stop")

    def failure(self, failure: Failure) -> bytes:
        """The error, which ends the stream."""
        return named_event("error", messages_error(failure))

    def whole(self, choices: Sequence[Delta], usage: Usage, timing: Mapping[str, float] | None) -> dict[str, Any]:
        """`message`"""
        (choice,) = choices
        return self._message(list(self._blocks(choice)), choice.ending, _usage(usage))

    def _message(
        self, content: list[dict[str, Any]], ending: ChoiceEnding | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **_stop(ending),
            "usage": usage,
        }

    def _blocks(self, choice: Delta) -> Iterator[dict[str, Any]]:
        if choice.reasoning.strip() and self._thinking != "hidden":
            self._signature.add(choice.reasoning)
            shown = choice.reasoning if self._thinking == "shown" else ""
            yield {"type": "thinking", "thinking": shown, "signature": self._signature.take()}
        if choice.text.strip():
            yield {"type": "text", "text": choice.text}
        for call in choice.calls:
            if not call.broken:
                yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _json(call.arguments)}

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        """The last call continues first: the rest of the delta was written after it."""
        going_on = [call for call in delta.calls if self._call and call.index == self._call[0].index]
        for call in going_on:
            self._call = [] if call.broken else [*self._call, call]
        if delta.reasoning and self._thinking != "hidden":
            yield from self._text_part("thinking", delta.reasoning)
        if delta.text:
            yield from self._text_part("text", delta.text)
        for call in delta.calls:
            if call.name and not call.broken and call not in going_on:
                yield from self._send_call()
                self._call = [call]
        self._ending = delta.ending or self._ending

    def _text_part(self, kind: Literal["thinking", "text"], text: str) -> Iterator[bytes]:
        is_open = self._open == kind and not self._call
        text = self._blanks[kind] + text
        self._blanks[kind] = "" if is_open or text.strip() else text
        if self._blanks[kind]:
            return
        if not is_open:
            yield from self._send_call()
            empty = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin(kind, {"type": kind, kind: "", **empty})
        if kind == "thinking":
            self._signature.add(text)
        if kind == "text" or self._thinking == "shown":
            yield self._part({"type": f"{kind}_delta", kind: text})

    def _send_call(self) -> Iterator[bytes]:
        """The block of the last call, if it has none yet."""
        if not self._call:
            return
        head, arguments = self._call[0], "".join(call.arguments for call in self._call)
        self._call = []
        yield from self._begin("tool_use", {"type": "tool_use", "id": head.id, "name": head.name, "input": {}})
        if arguments:
            yield self._part({"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._index += 1
        self._open = kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._part({"type": "signature_delta", "signature": self._signature.take()})
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _part(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


class _Signature:
    """The signature of a block of thinking: a hash of its text. Clients send it back; it is not checked."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=24)

    def add(self, text: str) -> None:
        self._hash.update(text.encode())

    def take(self) -> str:
        """The signature of the text added since the last one."""
        signature = b64encode(self._hash.digest()).decode()
        self._hash = hashlib.blake2b(digest_size=24)
        return signature


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _stop(ending: ChoiceEnding | None) -> dict[str, str | None]:
    if ending is None:
        return {"stop_reason": None, "stop_sequence": None}
    if ending.reason == "tool_calls":
        reason = "tool_use"
    elif ending.reason == "length":
        reason = "model_context_window_exceeded" if ending.context_full else "max_tokens"
    else:
        reason = "end_turn" if ending.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": ending.stop_string if reason == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, int]:
    """Tokens of the prompt that were computed, those that were found in the cache, and tokens of the answer."""
    cached = usage.cached or 0
    return {
        "input_tokens": usage.prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
    }


def _json(arguments: str) -> Raw:
    """The arguments of a call, as they are: a JSON object."""
    return Raw((arguments or "{}").encode())
