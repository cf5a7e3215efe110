"""Remembers, by the ids of calls, the tokens of a conversation up to and including the answer that made the calls.

A chat template writes a call in a form of its own: other blanks, another order of keys, no reasoning. When the
conversation comes back, its prompt would therefore differ from the computed one, and everything after the first
difference would be computed again. `CallMemory` finds the answer again, and `rendering.py` uses its tokens in place of
the template's text. Threads may call all methods.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.server.answers.answer_parts import Written
from phalanx.server.fields.call_arguments import parse_arguments

OWNER_BYTES = 16 << 20  # for one key: some hundred answers in conversations of 30,000 tokens
TURN_BYTES = 512  # of one answer besides tokens and texts
CHAR_BYTES = 4  # of a text, at most

Message = Mapping[str, Any]


class Turn(Struct, frozen=True):
    """An answer that called tools."""

    before: bytes  # hash of the conversation that it answers; see `digests`
    written: Written
    tokens: array[int]  # the prompt's and the answer's

    @property
    def id(self) -> str:
        """The id by which the answer is found: its first call's, which is unique."""
        return self.written.ids[0]

    @property
    def n_bytes(self) -> int:
        """Its size in the memory."""
        return TURN_BYTES + self.tokens.itemsize * len(self.tokens) + CHAR_BYTES * self.written.n_chars


class Recalled(Struct, frozen=True):
    """The remembered part of a conversation."""

    messages: list[dict[str, Any]]  # with the reasoning that clients do not send back
    last: tuple[int, Turn] | None  # (index, answer) of the last remembered answer to exactly the messages before it
    digest: bytes  # of the whole


class CallMemory:
    """The last answers with calls of each key.

    Args:
        owner_bytes: limit for the answers of one key; the oldest are dropped.
    """

    def __init__(self, owner_bytes: int = OWNER_BYTES) -> None:
        self._limit = owner_bytes
        self._lock = threading.Lock()
        self._turns: dict[str, OrderedDict[str, Turn]] = {}  # owner -> id of the first call -> answer, used last last
        self._bytes: dict[str, int] = {}

    def remember(self, owner: str, turn: Turn) -> None:
        """Keep an answer, unless it alone exceeds the limit."""
        if turn.n_bytes > self._limit:
            return
        with self._lock:
            turns = self._turns.setdefault(owner, OrderedDict())
            replaced = turns.pop(turn.id, None)
            turns[turn.id] = turn
            taken = self._bytes.get(owner, 0) + turn.n_bytes - (replaced.n_bytes if replaced else 0)
            while taken > self._limit:
                _, oldest = turns.popitem(last=False)
                taken -= oldest.n_bytes
            self._bytes[owner] = taken

    def recall(self, owner: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> Recalled:
        """The remembered part of a conversation that comes back."""
        turns = [self._find(owner, message) for message in messages]
        full = [_with_reasoning(message, turn) for message, turn in zip(messages, turns, strict=True)]
        stamps = digests(full, variables)
        known = [(i, turn) for i, turn in enumerate(turns) if turn is not None and turn.before == stamps[i]]
        return Recalled(full, known[-1] if known else None, stamps[-1])

    def _find(self, owner: str, message: Message) -> Turn | None:
        """The remembered answer that a message of the history repeats; None if it is unknown or was changed."""
        calls = message.get("tool_calls")
        if not calls:
            return None
        with self._lock:
            turns = self._turns.get(owner, OrderedDict[str, Turn]())
            turn = turns.get(calls[0]["id"])
            if turn is None or not _is_same(message, turn.written):
                return None
            turns.move_to_end(turn.id)
            return turn


def digests(messages: Sequence[Message], variables: Mapping[str, Any]) -> list[bytes]:
    """Entry i is a hash of the first i messages and the template's variables."""
    found = [_digest(b"", variables)]
    for message in messages:
        found.append(_digest(found[-1], message))
    return found


def _digest(before: bytes, value: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(before + msgspec.json.encode(value, enc_hook=repr), digest_size=16).digest()


def _is_same(message: Message, written: Written) -> bool:
    """Whether a message of a history is the remembered answer. Clients strip texts, and leave reasoning out."""
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    answered = [
        (id, name, parse_arguments(arguments)) for id, (name, arguments) in zip(written.ids, written.calls, strict=True)
    ]
    reasoning = message.get("reasoning_content", written.reasoning)
    return (
        calls == answered
        and message["content"].strip() == written.text.strip()
        and reasoning.strip() == written.reasoning.strip()
    )


def _with_reasoning(message: Message, turn: Turn | None) -> dict[str, Any]:
    if turn is None or not turn.written.reasoning:
        return dict(message)
    return {**message, "reasoning_content": turn.written.reasoning}
