"""Finds where a client's requests begin and end, and checks each, before aiohttp's parser sees a byte of it.

That parser accepts trailers, chunk extensions and upgrades to other protocols, and bodies that are mostly the framing
of their chunks. Here a head is held back until it is whole, checked (`request_head.py`), and handed on without its
offer of another protocol; a body's chunks are handed on while they are plain. So the bytes that the parser gets have
one meaning. A request waits here for the answer to the one before it, so that many small ones in one piece do not block
the event loop.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from phalanx.http.request_head import MAX_BYTES, fault_of

HEAD_END = re.compile(rb"\n\r?\n")
END = b"\r\n"
LENGTH = re.compile(rb"\r\n(?i:content-length):[ \t]*([0-9]+)")
CHUNKED = re.compile(rb"\r\n(?i:transfer-encoding):")
UPGRADE = re.compile(rb"\r\n(?i:upgrade):[^\r]*")
"""Java's HTTP client and some proxies offer `Upgrade: h2c`, and continue in HTTP/1.1 as the standard says."""
TLS_HANDSHAKE = b"\x16"
"""The first byte of a client that speaks TLS; the end of a head would never come."""
CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,12}")
MAX_CHUNK_LINE = 12  # bytes of a chunk's own line, which may have its size only
FRAMING_BYTES = 1 << 14  # of a body, beside an eighth of it: 3,276 chunks of one byte, which take some 10 ms


class Part(Enum):
    """The part that comes next from a client."""

    HEAD = auto()
    BODY = auto()  # of known length
    CHUNK_LINE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    LAST_END = auto()  # the end of a chunked body


class RequestFraming:
    """The bytes of one connection's client.

    Args:
        added: a gateway adds its own lines before it forwards a head.
    """

    def __init__(self, *, added: bool) -> None:
        self.fault = ""
        """What is wrong with the last request; nothing after it is handed on."""
        self.n_heads = 0
        """Heads that were handed on."""
        self.n_answered = 0
        """Answered requests; while fewer than `n_heads`, no further one is handed on."""
        self._added = added
        self._part = Part.HEAD
        self._held = b""  # of a head or a chunk's line that is not whole, or of requests that wait
        self._searched = 0  # bytes of it that were searched for the end of a head
        self._left = 0  # bytes of the body, or of its chunk
        self._framing = self._body = 0  # bytes of a chunked body, its chunks' own lines and the rest

    @property
    def in_body(self) -> bool:
        """Whether a body is under way."""
        return self._part is not Part.HEAD

    @property
    def in_head(self) -> bool:
        """Whether a part of a head has come."""
        return self._part is Part.HEAD and bool(self._held)

    @property
    def n_held(self) -> int:
        """Bytes that are held back."""
        return len(self._held)

    def feed(self, data: bytes) -> bytes:
        """The bytes that the parser may have, of these and of those held back."""
        seen, data, self._held, self._searched = self._searched, self._held + data, b"", 0
        passed: list[bytes] = []
        at = 0
        while at < len(data) and not self.fault and (self.in_body or self.n_heads == self.n_answered):
            end = self._end_of_part(data, at, max(at, seen - len(END) - 1))
            if end is None:
                self._searched = len(data) - at
                break
            piece = data[at:end]
            passed.append(UPGRADE.sub(b"", piece) if self._part is Part.HEAD else piece)
            self._go_on(piece)
            at = end
        self._held = b"" if self.fault else data[at:]
        return b"".join(passed)

    def _end_of_part(self, data: bytes, at: int, start: int) -> int | None:
        """Where the part that begins at `at` ends, or the bytes of it so far; None if it is wrong or too short.

        Args:
            start: where to continue the search for its end.
        """
        match self._part:
            case Part.HEAD:
                found = HEAD_END.search(data, start)
                if found is not None or len(data) - at > MAX_BYTES:
                    head = data[at : found.end()] if found else data[at:]
                    self.fault = fault_of(head.removesuffix(2 * END), added=self._added)
                elif data[at : at + 1] == TLS_HANDSHAKE:
                    self.fault = "it is TLS, and this port speaks plain HTTP"
                return found.end() if found and not self.fault else None
            case Part.BODY | Part.CHUNK:
                return min(at + self._left, len(data))
            case Part.CHUNK_LINE:
                end = data.find(END, at, at + MAX_CHUNK_LINE + len(END))
                line = data[at : end if end >= 0 else at + MAX_CHUNK_LINE + 1].removesuffix(b"\r")
                if not CHUNK_SIZE.fullmatch(line) and (line or end >= 0 or data[at : at + 1] == b"\r"):
                    self.fault = "a chunk of its body begins with more, or less, than its size"
                return end + len(END) if end >= 0 and not self.fault else None
        if not END.startswith(data[at : at + len(END)]):
            last = self._part is Part.LAST_END
            self.fault = "its body has trailers" if last else "a chunk of its body is longer than its size"
        return at + len(END) if len(data) >= at + len(END) and not self.fault else None

    def _go_on(self, piece: bytes) -> None:
        """A piece was handed on: set the next part."""
        match self._part:
            case Part.HEAD:
                self.n_heads += 1
                length = LENGTH.search(piece)
                self._left = int(length[1]) if length else 0
                self._framing = self._body = 0
                self._part = Part.BODY if self._left else Part.CHUNK_LINE if CHUNKED.search(piece) else Part.HEAD
                return
            case Part.BODY | Part.CHUNK:
                self._left -= len(piece)
                if not self._left:
                    self._part = Part.HEAD if self._part is Part.BODY else Part.CHUNK_END
                return
            case Part.CHUNK_LINE:
                self._left = int(piece, 16)
                self._body += self._left
                self._part = Part.CHUNK if self._left else Part.LAST_END
            case Part.CHUNK_END:
                self._part = Part.CHUNK_LINE
            case Part.LAST_END:
                self._part = Part.HEAD
        self._framing += len(piece)
        if self._framing > FRAMING_BYTES + self._body // 8:
            self.fault = "its body is mostly the framing of its chunks"
