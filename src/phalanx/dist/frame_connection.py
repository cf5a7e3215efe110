"""One control connection: reads and writes messages, with or without TLS, and blocks no longer than its caller allows.

The socket is non-blocking. One thread reads (`read`); several may write whole frames, in turn by a lock. Bytes that the
kernel does not take at once are kept and sent before the next frame, so that frames stay whole.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from phalanx.dist.frames import MAX_FRAME, Splitter
from phalanx.dist.peers import Message, decode
from phalanx.dist.tcp_figures import with_tcp_figures
from phalanx.errors import FrameError
from phalanx.tls.session import TlsSession
from phalanx.types import LinkStats

_PIECE = 1 << 16  # bytes per system call; larger ones cost a memory mapping each
_PIECES = 16  # per read at most, so that one peer does not keep the others waiting
_NOTHING = memoryview(b"")


class FrameConnection:
    """Owns a connected socket.

    Args:
        tls: the session of this end; None for plain text.
        stranger_bytes: limit of received bytes until `trust` is called; None for no limit.
    """

    def __init__(
        self, connected: socket.socket, tls: TlsSession | None = None, *, stranger_bytes: int | None = None
    ) -> None:
        self._socket = connected
        self._tls = tls
        self._stranger_bytes = stranger_bytes
        self._splitter = Splitter(MAX_FRAME if stranger_bytes is None else stranger_bytes)
        self._turn = threading.Lock()  # held by the thread that sends a frame, also while it waits
        self._lock = threading.Lock()  # guards the TLS session and the two below; no thread waits while it holds it
        self._frame = _NOTHING  # bytes left to encrypt
        self._sealed = _NOTHING  # bytes left to send
        self.ended = ""
        """How the connection ended, as a predicate; "" while it is open."""
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer()

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def established(self) -> bool:
        """Whether messages may be sent: a TLS handshake, if there is one, is over."""
        return self._tls is None or self._tls.established

    def with_figures(self, stats: LinkStats) -> LinkStats:
        """The connection's figures with those of the kernel."""
        return with_tcp_figures(stats, self._socket)

    def trust(self, limit: int = MAX_FRAME) -> None:
        """Accept messages of up to `limit` bytes from now on. Called once the other end is known."""
        self._stranger_bytes = None
        self._splitter.limit = limit

    def read(self) -> list[Message]:
        """The messages that have arrived completely. Does not block. Sets `ended` at the end of the stream.

        Raises:
            FrameError: the other end sent something that is not a message, or too much before it was known.
        """
        payloads: list[bytes] = []
        for _ in range(_PIECES):
            try:
                piece = self._socket.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError as error:
                self.ended = f"lost its connection: {error.strerror or error}"
                break
            self._count(piece)
            payloads += self._splitter.feed(self._unseal(piece))
            if self.ended and not self._splitter.between_frames:
                self.ended += " amid a message"
            if self.ended or len(piece) < _PIECE:
                break
        return [decode(payload) for payload in payloads]

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until there is something to read, at most `timeout_s` seconds. Returns whether there is."""
        return _wait(self._socket, select.POLLIN, timeout_s)

    def offer(self, data: bytes, *, wait_s: float = 0.0) -> bool:
        """Send a frame without blocking, or drop it.

        Args:
            wait_s: seconds to wait while another thread is sending.

        Returns:
            Whether the frame was taken. The next `read` reports a broken connection.
        """
        if not self._turn.acquire(timeout=wait_s):
            return False
        try:
            if not self._push():
                return False
            self._push(data)
            return True
        except OSError:
            return False
        finally:
            self._turn.release()

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send a frame. The connection must be `established`.

        Raises:
            TimeoutError: the kernel did not take the whole frame within `timeout_s` seconds.
            OSError: the connection is broken.
        """
        deadline = time.monotonic() + timeout_s
        with self._turn:
            sent = self._push(data)
            while not sent:
                left = deadline - time.monotonic()
                if left <= 0:
                    unsent = len(self._frame) + len(self._sealed)
                    raise TimeoutError(f"{unsent} bytes not taken within {timeout_s:g} s")
                _wait(self._socket, select.POLLOUT, left)
                sent = self._push()

    def finish(self) -> None:
        """End the stream after the frames that were sent."""
        if self._tls is not None:
            with self._lock:
                self._tls.finish()
            self._answer()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. No thread may be reading or writing."""
        self._socket.close()

    def _count(self, piece: bytes) -> None:
        if self._stranger_bytes is not None:
            self._stranger_bytes -= len(piece)
            if self._stranger_bytes < 0:
                raise FrameError("The peer sent too much before its Hello.")

    def _unseal(self, piece: bytes) -> bytes:
        """The bytes that the other end sent, decrypted; `piece` is empty at the end of the stream."""
        if self._tls is None:
            if not piece:
                self.ended = "closed its connection"
            return piece
        with self._lock:
            if piece:
                received = self._tls.receive(piece)
            else:
                received = b""
                self._tls.receive_end()
            self.ended = self._tls.ended
            answers = self._tls.has_answer
        if answers:
            self._answer()
        return received

    def _answer(self) -> None:
        """Send the TLS session's own bytes. If the connection is broken, the next `read` or `send` reports it."""
        with contextlib.suppress(OSError):
            self._push()

    def _push(self, data: bytes = b"") -> bool:
        """Send kept bytes and then `data`, as far as the kernel takes them; keep the rest.

        Returns:
            Whether all were sent.
        """
        with self._lock:
            if data:
                self._frame = memoryview(bytes(self._frame) + data if self._frame else data)
            try:
                while self._sealed or self._seal():
                    self._sealed = self._sealed[self._socket.send(self._sealed) :]
            except BlockingIOError:
                pass
            return not (self._sealed or self._frame)

    def _seal(self) -> bool:
        """Encrypt the next piece, if there is one. The caller holds the lock."""
        if self._tls is None:
            self._sealed, self._frame = self._frame[:_PIECE], self._frame[_PIECE:]
        elif self._tls.established:
            piece, self._frame = self._frame[:_PIECE], self._frame[_PIECE:]
            self._sealed = memoryview(self._tls.seal(piece))
        else:
            self._sealed = memoryview(self._tls.seal(_NOTHING))  # bytes of the handshake; frames wait for its end
        return bool(self._sealed)


def _wait(connected: socket.socket, event: int, timeout_s: float) -> bool:
    poll = select.poll()  # not select(): a process may have more than 1,024 files open
    poll.register(connected, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
