"""h11's parser with bounds on what a client can make one call of it cost.

h11 parses on the event loop. A header of 250 KB is parsed whole if it arrives at once; a run of spaces costs its square
in h11's regular expressions, seconds for 15 KB; and each chunk of a body costs 10 us, also one of a single byte. So
data is handed on in pieces, and each head or chunk is looked at before h11 sees it.
"""

from __future__ import annotations

import re
from typing import Any

import h11

PIECE = 8 << 10  # bytes handed on at once; h11 refuses a head of more than 16 KiB once it sees it incomplete
HEAD_END = re.compile(rb"\n\r?\n")  # as h11's own
MAX_LINES = 256  # of a head; browsers behind proxies send 40
STRANGE = re.compile(rb"[ \t]{128}|\n[ \t]")
"""A long run of spaces, and a folded line, which has been invalid since RFC 7230 and can make such a run."""
MAX_CHUNK_LINE = 64  # bytes of a chunk's own line; with an extension, which no client is known to send
SMALL_CHUNK = 128  # bytes
MAX_SMALL_CHUNKS = 1024  # more than are made up for by larger ones; they take 10 to 20 ms


class BoundedConnection(h11.Connection):
    """A server's connection, which also counts the bytes of the answers.

    Raises:
        h11.RemoteProtocolError: of `next_event`: besides h11's own causes, a head with too many lines or long runs of
            spaces, a body with trailers or very many small chunks, and one whose length is given in two ways, which a
            proxy may understand differently.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self.sent = 0
        self._waiting = bytearray()  # received, but not handed on
        self._chunk_ended: bool | None = None  # None: no chunk's line comes next; True: behind the end of one before
        self._small_chunks = 0

    @property
    def has_more(self) -> bool:
        """Whether data waits behind the last event."""
        return bool(self._waiting or self.trailing_data[0])

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # h11 has an overload for each event
        data = super().send(event)
        self.sent += len(data or b"")
        return data

    def receive_data(self, data: bytes) -> None:
        self._waiting += data

    def next_event(self) -> Any:
        while (event := self._next_event()) is h11.NEED_DATA and self._waiting:
            super().receive_data(bytes(self._waiting[:PIECE]))
            del self._waiting[:PIECE]
        return event

    def _next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            _check_head(self.trailing_data[0])
        elif self._chunk_ended is not None:
            if not self._chunk_may_come(self.trailing_data[0]):
                return h11.NEED_DATA
            self._chunk_ended = None
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunk_ended, self._small_chunks = (False if _is_chunked(event) else None), 0
        elif isinstance(event, h11.Data) and (event.chunk_start or event.chunk_end):
            self._chunk_ended = event.chunk_end or None
            self._count_chunk(len(event.data))
        return event

    def _chunk_may_come(self, data: bytes) -> bool:
        """Whether the line of the next chunk is whole and right; with the last one, that nothing follows it."""
        start = 2 if self._chunk_ended else 0  # behind a chunk's data there is an end of line
        end = data.find(b"\r\n", start)
        if (end if end >= 0 else len(data)) - start > MAX_CHUNK_LINE:
            raise h11.RemoteProtocolError(f"a chunk's line of more than {MAX_CHUNK_LINE} bytes")
        if end < 0:
            return False
        if data[start:end].partition(b";")[0].strip(b"0 \t"):
            return True
        after = data[end + 2 : end + 4]
        if not b"\r\n".startswith(after):
            raise h11.RemoteProtocolError("trailers are not read")
        return len(after) == 2

    def _count_chunk(self, n_bytes: int) -> None:
        self._small_chunks = max(0, self._small_chunks + 1 - n_bytes // SMALL_CHUNK)
        if self._small_chunks > MAX_SMALL_CHUNKS:
            raise h11.RemoteProtocolError(f"more than {MAX_SMALL_CHUNKS} small chunks")


def _check_head(data: bytes) -> None:
    end = HEAD_END.search(data)
    head = data[: end.start()] if end else data
    if head.count(b"\n") > MAX_LINES:
        raise h11.RemoteProtocolError(f"a head of more than {MAX_LINES} lines", error_status_hint=431)
    if STRANGE.search(head):
        raise h11.RemoteProtocolError("a head with a long run of spaces or with a folded line")


def _is_chunked(request: h11.Request) -> bool:
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return False
    if b"content-length" in names or request.http_version < b"1.1":
        raise h11.RemoteProtocolError("the length of a body is given in two ways, or chunked before HTTP/1.1")
    return True
