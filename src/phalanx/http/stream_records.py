"""How a stream moves from one server to another: the records that a server sends, and the `Resume` for the next one.

If a gateway sends a request with the header MIGRATION, whose value is the server's admin key, the server sends a
*record* after each piece of the stream. It has the piece's tokens, and the gateway removes it:

    server-sent events    : phalanx {"choices":[{"index":0,"tokens":[17,4]}]}
    lines of JSON         {"phalanx":{"choices":[{"index":0,"tokens":[17,4]}]}}

The gateway forwards a piece only once its record has come, so that at any time the records describe exactly what its
client has. A record without a piece says that the server's engine is down or back: while it is down, the gateway may
move the stream. To continue it, the gateway sends the request to another server with a `Resume` before the client's
body, and its length in the header RESUME. That server computes the rest of each choice, passes the known tokens through
its decoders without output, and answers with the bytes that come next.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from phalanx.errors import InvalidRequest, RequestTooLarge
from phalanx.types import TokenLogprobs

MIGRATION = "x-phalanx-migration"
RESUME = "x-phalanx-resume"
RESUME_BYTES = 32 << 20  # limit of a `Resume`, besides the body's own limit
MAX_ITEMS = RESUME_BYTES >> 6  # tokens and log-probabilities that fit: one takes at most 40 bytes, choices a little
EVENT_MARK = b": phalanx "
LINES = "application/x-ndjson"  # the media type of lines of JSON
LINE_MARK = b'{"phalanx":'


class Start(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Properties of the whole answer, on every server that writes a part of it.

    Part of the first record. A server that continues the answer inexactly sends another one, which replaces it.
    """

    id: str  # of the answer; ids of its items and calls are derived from it
    created: int  # seconds since 1970
    seed: int  # of every choice, given by the client or drawn
    determinism_key: str  # of the server; servers with equal keys compute equal tokens
    prompts: int  # CRC-32 of the prompts' token ids
    prompt: list[int] = []  # a chat's, if the server's memory of calls changed the template's
    exact: bool = True  # False once a server with another determinism_key or prompts has continued it


class ChoiceEnded(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a choice; see `types.Finished`."""

    reason: Literal["stop", "length", "timeout"]
    n_tokens: int  # of the answer: a stop string may have cut some off
    detail: str = ""
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    disk_tokens: int = 0


class RecordedChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice: its new tokens in a record, all of them in a `Resume`."""

    index: int
    tokens: list[int] = []  # that the server has decoded; their text may be held back
    logprobs: list[TokenLogprobs] = []  # one per token, if the request wants them
    echoed: bool = False  # the client has the prompt that it asked to be echoed
    ended: ChoiceEnded | None = None


class StreamRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sent after each piece of a stream."""

    start: Start | None = None  # in the first one; see `Start`
    choices: list[RecordedChoice] = []  # those with new tokens or an end
    failed: str = ""  # if the piece is an error that another server may not have: its text
    paused: bool = False  # the server's engine is down, for seconds or minutes


class Resume(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state that a server needs to continue a stream."""

    start: Start  # the last one
    choices: list[RecordedChoice]  # those with any record
    next_number: int  # of the next event, in dialects that number them
    timeout_s: float  # left of the request's time
    moves: int  # how often the stream has moved, this time included


_encode = msgspec.json.Encoder().encode
_decode_record = msgspec.json.Decoder(StreamRecord).decode
_decode_resume = msgspec.json.Decoder(Resume).decode


def framed(record: StreamRecord, *, lines: bool) -> bytes:
    """A record as a part of the stream.

    Args:
        lines: the stream is lines of JSON, not server-sent events.
    """
    data = _encode(record)
    return LINE_MARK + data + b"}\n" if lines else EVENT_MARK + data + b"\n\n"


def record_in(event: bytes, *, lines: bool) -> StreamRecord | None:
    """The record in a whole event (or line) without its terminator; None for an event of the client's.

    A line may begin with blanks, which are keep-alives.

    Raises:
        msgspec.DecodeError: it is marked as a record but cannot be read.
    """
    mark = LINE_MARK if lines else EVENT_MARK
    if lines:
        event = event.lstrip(b" ")
    if not event.startswith(mark):
        return None
    return _decode_record(event[len(mark) : -1] if lines else event[len(mark) :])


def resume_body(resume: Resume, body: bytes) -> tuple[int, bytes]:
    """(value of RESUME, body) of a request that continues a stream.

    Args:
        body: of the client's request.
    """
    data = _encode(resume)
    return len(data), data + body


def resume_size(header: str) -> int:
    """The value of RESUME; -1 if it is not a number of bytes.

    Raises:
        RequestTooLarge: more than a `Resume` may have.
    """
    if not (header.isascii() and header.isdigit() and len(header) < 12):
        return -1
    if (size := int(header)) > RESUME_BYTES:
        raise RequestTooLarge(f"{RESUME}: the body's first part has {size} bytes; it may have {RESUME_BYTES}.")
    return size


def split_body(header: str, body: bytes) -> tuple[Resume, bytes]:
    """The inverse of `resume_body`.

    Raises:
        InvalidRequest: the header is not a length within the body, or the first part of the body is not a `Resume`.
    """
    if not 0 <= resume_size(header) <= len(body):
        raise InvalidRequest(f"{RESUME}: {header[:20]!r} is not the length of the body's first part.")
    try:
        return _decode_resume(body[: int(header)]), body[int(header) :]
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{RESUME}: the body's first {header} bytes: {error}.") from error
