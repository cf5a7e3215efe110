"""Cuts a replica's stream into whole events, and detects whether it ended or broke off.

It passes only whole events, so that an error event can follow at any time. If the replica sends records
(`http/stream_records.py`), it passes an event only once its record has come. So the client has exactly the tokens of
the transcript, and another replica can continue from there.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from phalanx.errors import MalformedAnswer
from phalanx.gateway.relay.api_kinds import MESSAGES_ENDS, OPAQUE, RESPONSES_ENDS, Dialect
from phalanx.gateway.relay.body_peek import AnswerCounts, usage_in
from phalanx.gateway.relay.first_text import shows_text
from phalanx.gateway.relay.transcript import Transcript
from phalanx.http.foreign_json import decoder
from phalanx.http.stream_records import StreamRecord, record_in

MAX_EVENT = 16 << 20  # bytes; the largest known have all log-probabilities of a long echoed prompt
MAX_LINES = 1 << 14  # of one event, read in 10 ms; known servers write two
BLANK_LINE = re.compile(rb"\n\r?\n|\r\n\r?\n|\r\r")  # with fixed first bytes, in a third of the time of (\r?\n){2}
NO_CR = re.compile(rb"\n\n")  # for a stream without \r, in a quarter of that time
LINE_END = re.compile(rb"\r\n|\n|\r")
FIELDS = frozenset((b"data", b"event", b"id", b"retry", b""))  # "" is a comment
DONE = b"[DONE]"
REASON_CHARS = 500  # of a replica's error that the client gets
MAX_PIECE = 2 * MAX_EVENT  # bytes of the events that wait for one record


class Head(AnswerCounts):
    """Fields the gateway acts on; other values pass unchecked."""

    type: Raw = Raw()
    error: Raw = Raw()
    response: Raw = Raw()  # the whole answer, in the last event of the Responses API
    done: Raw = Raw()
    sequence_number: Raw = Raw()


_decode = decoder(Head)


class Seen(Struct, frozen=True):
    """What one event means for its stream."""

    ends: bool = False
    has_data: bool = False
    has_text: bool = False  # or calls; not checked after the first
    usage: bytes = b""  # the counts of `AnswerCounts`; empty if it has none
    number: int | None = None


NOTHING = Seen()
PLAIN = Seen(has_data=True)  # nearly all events


class EventReader:
    """Reads one stream, possibly from several replicas in turn: call `begin_again` before the next one continues.

    Args:
        dialect: decides how the stream ends; an opaque one ends with the HTTP body.
        lines: the stream is lines of JSON instead of server-sent events.
        transcript: takes the replica's records; None if the gateway asked for none.
    """

    def __init__(self, dialect: Dialect, *, lines: bool = False, transcript: Transcript | None = None) -> None:
        self._dialect = dialect
        self._end = re.compile(rb"\n") if lines else NO_CR
        self.lines = lines
        self.transcript = transcript
        self._held = bytearray()  # the beginning of an event
        self._searched = 0  # bytes of it that were searched for its end
        self._unrecorded = bytearray()  # whole events and blanks that wait for their record
        self._unrecorded_seen: list[Seen] = []  # what these events mean
        self.is_paused = False
        """The replica's last record says that its engine is down."""
        self.ended = False
        """The event that ends a stream has passed."""
        self.has_text = False
        """A text, reasoning or a call has passed."""
        self.n_events = 0
        """Events with data, so far."""
        self.next_number = 0
        """Number of the next event, in dialects that number them."""
        self.fault = ""
        """The stream's error after the events that passed; empty without one."""
        self.usage = b""
        """Token counts of the last event that had any, as `AnswerCounts.as_json`; empty if there were none."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer so far if its events do not count them: by the records, or one per event."""
        return max(self.n_events, self.transcript.n_tokens if self.transcript is not None else 0)

    @property
    def can_go_on(self) -> bool:
        """Whether another replica can continue the stream after the events that passed."""
        return self.transcript is not None and self.transcript.is_kept and not self.ended

    def begin_again(self) -> None:
        """Drop the bytes held back from the last replica: another one continues the stream."""
        self.is_paused = False
        self._held.clear()
        self._searched = 0
        self._unrecorded.clear()
        self._unrecorded_seen.clear()
        self.fault = ""

    def feed(self, data: bytes) -> bytes:
        """Take in bytes. Returns the events that may pass now, unchanged; a malformed one sets `fault`."""
        self._held += data
        if self._end is NO_CR and b"\r" in data:
            self._end = BLANK_LINE
        passing = bytearray()
        last = 0
        at = max(0, self._searched - 3)
        try:
            while (found := self._end.search(self._held, at)) is not None:
                passing += self._pass(bytes(self._held[last : found.start()]), found[0])
                last = at = found.end()
        except MalformedAnswer as error:
            self.fault = error.message
        del self._held[:last]
        self._searched = len(self._held)
        if self._searched > MAX_EVENT:
            self.fault = f"an event is longer than {MAX_EVENT >> 20} MiB"
        elif len(self._unrecorded) > MAX_PIECE:
            self.fault = f"no record came for {MAX_PIECE >> 20} MiB of its stream"
        return bytes(passing)

    def close(self) -> bytes:
        """End the replica's body. Returns the events held back for records if the replica sends none."""
        if self.transcript is None or self.transcript.start is not None or self.fault:
            return b""
        return self._release()

    def finish(self) -> str:
        """Why the stream may not end here; empty if it may."""
        if self.fault:
            return self.fault
        if bytes(self._held).strip():
            return "its stream ended in the middle of an event"
        if self._unrecorded.strip():
            return "its stream ended without the last record"
        if self._dialect not in OPAQUE and not self.ended:
            return "its stream ended without the event that ends it"
        return ""

    def _pass(self, event: bytes, end: bytes) -> bytes:
        """Take in an event. Returns the bytes that may pass now."""
        if self.transcript is None:
            self._apply(self._read(event))
            return event + end
        text = event.lstrip(b" ") if self.lines else event  # a blank before a line is a keep-alive
        record = self._record(text)
        if record is None:
            self._unrecorded_seen.append(self._read(event))
            self._unrecorded += event + end
            return b""
        if record.failed:
            raise MalformedAnswer(record.failed[:REASON_CHARS].rstrip("."))
        self.transcript.note(record)
        self.is_paused = record.paused
        self._unrecorded += event[: len(event) - len(text)]
        return self._release()

    def _record(self, event: bytes) -> StreamRecord | None:
        try:
            return record_in(event, lines=self.lines)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise MalformedAnswer(f"a record of its stream cannot be read: {error}") from error

    def _release(self) -> bytes:
        for seen in self._unrecorded_seen:
            self._apply(seen)
        self._unrecorded_seen.clear()
        whole = bytes(self._unrecorded)
        self._unrecorded.clear()
        return whole

    def _apply(self, seen: Seen) -> None:
        """Count an event that passes."""
        self.ended = self.ended or seen.ends
        self.n_events += seen.has_data
        self.has_text = self.has_text or seen.has_text
        self.usage = seen.usage or self.usage
        if seen.number is not None:
            self.next_number = seen.number + 1

    def _read(self, event: bytes) -> Seen:
        if self.lines:
            return self._read_json(event) if event.strip() else NOTHING
        if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:  # nearly all
            return self._read_data(event[6:])
        values: dict[bytes, list[bytes]] = {}
        lines = LINE_END.split(event, MAX_LINES)
        if len(lines) > MAX_LINES:
            raise MalformedAnswer(f"an event of its stream has more than {MAX_LINES} lines")
        for line in lines:
            name, _, value = line.partition(b":")
            if line and name not in FIELDS:
                raise MalformedAnswer(f"a line of its stream is not part of an event: {line[:40]!r}")
            values.setdefault(name, []).append(value.removeprefix(b" "))
        if b"data" not in values:
            return NOTHING
        return self._read_data(b"\n".join(values[b"data"]))

    def _read_data(self, data: bytes) -> Seen:
        return Seen(ends=True) if data == DONE else self._read_json(data)

    def _read_json(self, data: bytes) -> Seen:
        if self._dialect in OPAQUE:
            return Seen(has_data=True, has_text=True)
        try:
            head = _decode(data)
            has_text = not self.has_text and shows_text(self._dialect, data)
        except msgspec.DecodeError as error:
            raise MalformedAnswer(f"an event of its stream is not JSON: {error}") from error
        if self._dialect == "chat" and not (has_text or head.error or head.usage):
            return PLAIN
        number = _given(head.sequence_number)
        ends = self._is_end(head)
        is_number = self._dialect == "responses" and number.isdigit() and len(number) < 16
        return Seen(
            ends=ends,
            has_data=True,
            has_text=has_text,
            usage=usage_in(bytes(head.response)) if ends and self._dialect == "responses" else head.as_json(),
            number=int(number) if is_number else None,
        )

    def _is_end(self, head: Head) -> bool:
        kind = _given(head.type).strip(b'"').decode("utf-8", "replace")
        if self._dialect == "chat":
            return bool(_given(head.error))
        if self._dialect == "ollama":
            return _given(head.done) == b"true" or bool(_given(head.error))
        return kind in (MESSAGES_ENDS if self._dialect == "messages" else RESPONSES_ENDS)


def _given(raw: Raw) -> bytes:
    """A value as JSON; empty if it is missing or null."""
    value = bytes(raw)
    return b"" if value == b"null" else value
