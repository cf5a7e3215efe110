"""Streams that move from one server to another: an engine that waits for its reader, and a gateway's bookkeeping."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from phalanx.http.stream_records import (
    MIGRATION,
    RESUME,
    RecordedChoice,
    Resume,
    Start,
    StreamRecord,
    record_in,
    resume_body,
)
from phalanx.server.sequences.output_queue import Event, OutputQueue
from phalanx.supervision.fake_engine import FAKE_INFO, FakeEngine
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Finished, SequenceRequest, Tokens

Piece = tuple[bytes, StreamRecord]
"""What the client gets, and the record after it."""
KEY = "the gateway's"


def request_of(body: dict[str, Any], resume: Resume | None = None) -> tuple[bytes, dict[str, str]]:
    """Content and headers of a gateway's request for a stream that begins, or goes on."""
    content, headers = json.dumps({**body, "stream": True}).encode(), {MIGRATION: KEY}
    if resume is not None:
        length, content = resume_body(resume, content)
        headers[RESUME] = str(length)
    return content, {**headers, "content-type": "application/json"}


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], resume: Resume | None = None
) -> list[Piece]:
    """The pieces of a stream."""
    content, headers = request_of(body, resume)
    response = await client.post(path, content=content, headers=headers)
    assert response.status_code == 200, response.text
    return pieces_of(response.content, lines="ndjson" in response.headers["content-type"])


class PacedEngine(FakeEngine):
    """Says a text for each choice, and computes a step only when all that it said before was read.

    So the pieces of a stream are those of the steps, however busy the machine is.

    Args:
        said: the text of a sequence, with its end; special tokens stand in it as text.
        ends: numbers of output tokens after which a step of a sequence ends; None: each step is one token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        said: Callable[[SequenceRequest], str],
        ends: Callable[[int], bool] | None = None,
        **info: Any,
    ) -> None:
        facts = {"vocab_size": tokenizer.vocab_size, "max_model_len": 1 << 20, **info}
        super().__init__(replace(FAKE_INFO, **facts), script=self._next, clock=lambda: 0.0)
        self._tokenizer = tokenizer
        self._text_of = said
        self._ends = ends or (lambda n: True)
        self._said: dict[str, list[int]] = {}  # by sequence
        self.idle = asyncio.Event()  # somebody began to wait

    def _next(self, request: SequenceRequest, position: int) -> int:
        if request.id not in self._said:
            self._said[request.id] = self._tokenizer.encode(self._text_of(request), add_special_tokens=False)
        said = self._said[request.id]
        return said[position] if position < len(said) else min(self._tokenizer.eos_ids)

    async def _run(self) -> None:
        _engines.add(self)
        try:
            while True:
                await self.idle.wait()
                self.idle.clear()
                while _waiting and (self._rows or self._outbox):
                    self.step()
                    await asyncio.sleep(0)
        finally:
            _engines.discard(self)

    def _advance(self, row: Any, now: float) -> list[Any]:
        events = super()._advance(row, now)
        while not isinstance(events[-1], Finished) and not self._ends(row.produced):
            (new, *rest) = super()._advance(row, now)
            events = [*events[:-1], _joined(events[-1], new), *rest]
        return events


def _joined(one: Tokens, other: Tokens) -> Tokens:
    scored = None if one.logprobs is None else [*one.logprobs, *(other.logprobs or ())]
    return replace(one, tokens=[*one.tokens, *other.tokens], logprobs=scored)


_engines: set[PacedEngine] = set()
_waiting: set[OutputQueue] = set()
"""Queues that somebody reads and that are empty."""


@contextmanager
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets paced engines know who waits for them."""
    read, push = OutputQueue.read, OutputQueue.push

    async def reading(queue: OutputQueue) -> list[tuple[int, Event]]:
        if not queue._events and queue._error is None:
            _waiting.add(queue)
            for engine in _engines:
                engine.idle.set()
        try:
            return await read(queue)
        finally:
            _waiting.discard(queue)

    def pushing(queue: OutputQueue, index: int, event: Event) -> bool:
        _waiting.discard(queue)
        return push(queue, index, event)

    with monkeypatch.context() as patch:
        patch.setattr(OutputQueue, "read", reading)
        patch.setattr(OutputQueue, "push", pushing)
        yield


def pieces_of(stream: bytes, *, lines: bool) -> list[Piece]:
    """A stream with records, taken apart: the client's bytes and the record after them."""
    end = b"\n" if lines else b"\n\n"
    found: list[Piece] = []
    piece = b""
    events = stream.split(end)
    assert events.pop() == b"", "the stream does not end with a whole event"
    for event in events:
        if (record := record_in(event, lines=lines)) is None:
            piece += event + end
        else:
            blanks = event[: len(event) - len(event.lstrip(b" "))]
            found.append((piece + blanks, record))
            piece = b""
    assert not piece, "the last piece has no record"
    return found


def shown(pieces: Sequence[Piece]) -> bytes:
    """What the client gets of these pieces."""
    return b"".join(piece for piece, _ in pieces)


def resume_after(pieces: Sequence[Piece], *, moves: int = 1, timeout_s: float = 1e6) -> Resume:
    """What a gateway knows of a stream after these pieces."""
    start: Start | None = None
    choices: dict[int, RecordedChoice] = {}
    for _, record in pieces:
        start = record.start or start
        for new in record.choices:
            old = choices.get(new.index, RecordedChoice(index=new.index))
            choices[new.index] = RecordedChoice(
                index=new.index,
                tokens=old.tokens + new.tokens,
                logprobs=old.logprobs + new.logprobs,
                echoed=old.echoed or new.echoed,
                ended=new.ended or old.ended,
            )
    assert start is not None
    numbers = re.findall(rb'"sequence_number":(\d+)', shown(pieces))
    return Resume(
        start=start,
        choices=list(choices.values()),
        next_number=int(numbers[-1]) + 1 if numbers else 0,
        timeout_s=timeout_s,
        moves=moves,
    )
