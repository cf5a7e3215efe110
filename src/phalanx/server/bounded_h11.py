"""h11's parser with bounds on what a client can make one call of it cost.

h11 parses on the event loop. A header of 250 KB is parsed whole if it arrives at once; a run of spaces costs its square
in h11's regular expressions, seconds for 15 KB; and each chunk of a body costs 10 us, also one of a single byte. So
data is handed on in pieces, and each chunk is looked at before h11 sees it, as each head is (`http/request_head.py`).
"""

from __future__ import annotations

import re
from typing import Any

import h11

from phalanx.http.request_head import MAX_BYTES, fault_of

PIECE = 8 << 10  # bytes handed on at once
HEAD_END = re.compile(rb"\n\r?\n")  # as h11's own
MAX_CHUNK_LINE = 64  # bytes of a chunk's own line; with an extension, which no client is known to send
SMALL_CHUNK = 128  # bytes
MAX_SMALL_CHUNKS = 1024  # more than are made up for by larger ones; they take 10 to 20 ms


class BoundedConnection(h11.Connection):
    """A server's connection, which also counts the bytes of the answers.

    Raises:
        h11.RemoteProtocolError: of `next_event`: besides h11's own causes, a head that the common rule refuses, and a
            body with trailers or very many small chunks.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self.sent = 0
        self.fault = ""
        """What is wrong with the request's head, in words."""
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
            self._check_head(self.trailing_data[0])
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

    def _check_head(self, data: bytes) -> None:
        """Refuse a whole head by the common rule, and one that goes on as long as it is too large."""
        end = HEAD_END.search(data)
        if end is not None or len(data) > MAX_BYTES:
            self.fault = fault_of(data[: end.end()].removesuffix(b"\r\n\r\n") if end else data)
        if self.fault:
            raise h11.RemoteProtocolError(self.fault)

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


def _is_chunked(request: h11.Request) -> bool:
    return any(name == b"transfer-encoding" for name, _ in request.headers)
