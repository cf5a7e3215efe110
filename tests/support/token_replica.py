"""Stand-ins for phalanx servers that tell records and continue each other's streams (`http/stream_records.py`).

They write words for tokens: the word of a token follows from the answer's seed, its choice and its number. So what one
begins another can go on with, and `undisturbed` says what a client must have got in the end, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from support.stub_replica import Call, StubReplica

from phalanx.http.stream_records import (
    MIGRATION,
    RESUME,
    ChoiceEnded,
    RecordedChoice,
    Resume,
    Start,
    StreamRecord,
    framed,
    split_body,
)

CREATED = 1_700_000_000
MEDIA = {"/api/chat": "application/x-ndjson"}
N_TOKENS = 6


class Piece(Struct):
    """What a server yields at once, and what it is made of."""

    data: bytes
    choices: list[RecordedChoice] = []


class Fault(Struct):
    """How a replica fails a stream where it comes to its piece number `at`; see `_fail`."""

    at: int
    how: str


def start_of(body: bytes, determinism_key: str) -> Start:
    """The beginning of the answer to a request."""
    crc = zlib.crc32(body)
    return Start(id=f"id-{crc:x}", created=CREATED, seed=crc * 3, determinism_key=determinism_key, prompts=crc)


class Writer:
    """Writes one answer, or the rest of one."""

    def __init__(self, path: str, body: bytes, start: Start, known: Resume | None, n_tokens: int = N_TOKENS) -> None:
        self.path, self.start = path, start
        asked = json.loads(body)
        self.n_choices, self.n_tokens = asked.get("n", 1), asked.get("tokens", n_tokens)
        self._number = known.next_number if known is not None else 0
        self._known = {choice.index: choice for choice in known.choices} if known is not None else {}
        self._is_begun = known is not None

    def pieces(self) -> Iterator[Piece]:
        """Two tokens at a time now and then, so that pieces, events and tokens are not the same."""
        if not self._is_begun:
            yield Piece(self._opening())
        done = {index: len(self._known[index].tokens) if index in self._known else 0 for index in range(self.n_choices)}
        for index in range(self.n_choices):
            if index in self._known and self._known[index].ended is not None:
                assert done.pop(index) == self.n_tokens
        while done:
            index = min(done, key=lambda i: (done[i], i))
            first = done[index]
            last = min(self.n_tokens, first + (2 if first % 3 == 1 else 1))
            done[index] = last
            ended = ChoiceEnded(reason="length", n_tokens=last) if last == self.n_tokens else None
            text = "".join(f"{self.start.seed % 997}.{index}.{i} " for i in range(first, last))
            yield Piece(
                self._word(index, text), [RecordedChoice(index=index, tokens=[*range(first, last)], ended=ended)]
            )
            if ended is not None:
                del done[index]
        yield Piece(self._closing())

    def _opening(self) -> bytes:
        if self.path == "/api/chat":
            return b" "
        if self.path == "/v1/responses":
            return self._event("response.created") + self._event("response.in_progress")
        return self._event("message_start" if self.path == "/v1/messages" else "", delta={"role": "assistant"})

    def _word(self, index: int, text: str) -> bytes:
        if self.path == "/v1/responses":
            return self._event("response.output_text.delta", delta=text)
        if self.path == "/v1/messages":
            return self._event("content_block_delta", delta={"text": text})
        return self._event("", choices=[{"index": index, "delta": {"content": text}}])

    def _closing(self) -> bytes:
        usage = {"prompt_tokens": 3, "completion_tokens": self.n_choices * self.n_tokens}
        if self.path == "/api/chat":
            return self._event("", done=True)
        if self.path == "/v1/responses":
            return self._event("response.completed", usage=usage)
        if self.path == "/v1/messages":
            return self._event("message_delta", usage=usage) + self._event("message_stop")
        return self._event("", usage=usage) + b"data: [DONE]\n\n"

    def _event(self, name: str, **fields: Any) -> bytes:
        if self.path == "/api/chat":
            return json.dumps({"id": self.start.id, "done": False, **fields}).encode() + b"\n"
        if self.path == "/v1/responses":
            fields["sequence_number"] = self._number
            self._number += 1
        if name:
            fields["type"] = name
        head = f"event: {name}\n" if name else ""
        return f"{head}data: {json.dumps({'id': self.start.id, **fields})}\n\n".encode()


def undisturbed(path: str, body: bytes) -> bytes:
    """What a client gets whose replica lives."""
    return b"".join(piece.data for piece in Writer(path, body, start_of(body, "n"), None).pieces())


class TokenReplica(StubReplica):
    """See the module's docstring.

    Args:
        faults: of the streams to come, one each; then it is sound.
        pause_s: before each piece.
        n_tokens: of an answer, unless its request says `tokens`.
    """

    def __init__(
        self,
        *faults: Fault,
        determinism_key: str = "n",
        admin_key: str = "adm",
        pause_s: float = 0.0,
        limit: int | None = 16,
        n_tokens: int = N_TOKENS,
    ) -> None:
        super().__init__(self._write, limit=limit)
        self.determinism_key = determinism_key
        self.admin_key = admin_key
        self.faults = list(faults)
        self.resumes: list[Resume] = []
        self.back = asyncio.Event()  # a paused stream goes on
        self.refusal: tuple[int, str] | None = None  # status and message with which it answers what it shall continue
        self._pause_s = pause_s
        self._n_tokens = n_tokens

    async def _write(self, call: Call) -> None:
        given = call.headers.get(MIGRATION)
        if given is not None and given != self.admin_key:
            await call.whole(403, {"error": {"message": f"{MIGRATION} is not this server's --admin-key."}})
            return
        known: Resume | None = None
        if RESUME in call.headers:
            assert given is not None
            if self.refusal is not None:
                await call.whole(self.refusal[0], {"error": {"message": self.refusal[1]}})
                return
            known, call.body = split_body(call.headers[RESUME], call.body)
            self.resumes.append(known)
            assert known.timeout_s > 0 and known.start.prompts == zlib.crc32(call.body)
        if not call.json.get("stream"):
            await call.whole(200, {"choices": [], "usage": {"total_tokens": 7}})
            return
        start = known.start if known is not None else start_of(call.body, self.determinism_key)
        writer = Writer(call.path, call.body, start, known, self._n_tokens)
        await call.begin(MEDIA.get(call.path, "text/event-stream"))
        fault = self.faults.pop(0) if self.faults else None
        for number, piece in enumerate(writer.pieces()):
            told = StreamRecord(start=start if number == 0 and known is None else None, choices=piece.choices)
            record = framed(told, lines=call.path in MEDIA) if given is not None else b""
            if fault is not None and number == fault.at and fault.how == "a pause":
                await call.piece(framed(StreamRecord(paused=True), lines=call.path in MEDIA))
                await self.back.wait()
                await call.piece(framed(StreamRecord(), lines=call.path in MEDIA))
            elif fault is not None and number == fault.at:
                await self._fail(call, fault.how, piece.data, record)
                return
            await asyncio.sleep(self._pause_s)
            await call.piece(piece.data + record)
        await call.end()

    async def _fail(self, call: Call, how: str, data: bytes, record: bytes) -> None:
        lines = call.path in MEDIA
        sent = {
            "reset": b"",
            "death": b"",
            "half a piece": data[: len(data) // 2],
            "without its record": data,
            "half a record": data + record[: len(record) // 2],
            "a malformed record": data + (b'{"phalanx":[]}\n' if lines else b": phalanx []\n\n"),
            "a failure": data + framed(StreamRecord(failed="The engine is gone."), lines=lines),
            "a malformed event": (b"{x\n" if lines else b"data: {x\n\n") + record,
            "an early end": data,
            "silence": data,
            "an open end": data + record,
        }[how]
        if sent:
            await call.piece(sent)
        if how == "silence":
            self.health = 0
            await asyncio.sleep(3600)
        elif how == "an open end":
            await asyncio.sleep(3600)
        elif how == "death":
            await self.close()
            call.break_off()
        elif how in ("reset", "half a piece", "without its record", "half a record"):
            call.break_off()
        else:
            await call.end()


async def _main(pause_s: float, n_tokens: int = N_TOKENS) -> None:
    async with TokenReplica(pause_s=pause_s, n_tokens=n_tokens) as stub:
        print(stub.port, flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1]), *map(int, sys.argv[2:])))
