"""One TCP connection of the control channel: reads and writes messages, and never blocks longer than its caller allows.

The socket is non-blocking. One thread reads (`read`); several may write whole frames, in turn by a lock. Bytes that the
kernel does not take at once are kept and sent before the next frame, so that frames stay whole. Does not know the rank
at the other end, nor when a silent peer is lost.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from phalanx.dist.frames import MAX_FRAME, Splitter
from phalanx.dist.peers import Message, decode

_PIECE = 1 << 16  # bytes per system call; larger ones cost a memory mapping each
_PIECES = 16  # per read at most, so that one peer does not keep the others waiting


class Connection:
    """Owns a connected socket.

    Args:
        limit: the largest message accepted, in bytes.
    """

    def __init__(self, connected: socket.socket, *, limit: int = MAX_FRAME) -> None:
        self._socket = connected
        self._splitter = Splitter(limit)
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")
        self.ended = ""
        """How the connection ended; "" while it is open."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept_large_messages(self) -> None:
        """Accept messages up to the frame limit from now on. Called once the other end is authenticated."""
        self._splitter.limit = MAX_FRAME

    def read(self) -> list[Message]:
        """The messages that have arrived completely. Does not block. Sets `ended` at the end of the stream.

        Raises:
            FrameError: the other end sent something that is not a message.
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
            if not piece:
                self.ended = "closed its connection" + ("" if self._splitter.between_frames else " amid a message")
                break
            payloads += self._splitter.feed(piece)
            if len(piece) < _PIECE:
                break
        return [decode(payload) for payload in payloads]

    def wait_readable(self, timeout_s: float) -> None:
        """Wait until there is something to read, at most `timeout_s` seconds."""
        _wait(self._socket, select.POLLIN, timeout_s)

    def offer(self, data: bytes, *, wait_s: float = 0.0) -> bool:
        """Send a frame without blocking, or do not send it.

        Args:
            wait_s: seconds to wait for the lock while another thread is sending.

        Returns:
            Whether the frame will be delivered if the other end reads. A broken connection is not an error here: the
            next `read` reports it.
        """
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            self._push()
            if self._unsent:
                return False
            self._push(data)
            return True
        except OSError:
            return False
        finally:
            self._lock.release()

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send a frame.

        Raises:
            TimeoutError: the kernel did not take the whole frame within `timeout_s` seconds.
            OSError: the connection is broken.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._push(data)
            while self._unsent:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{len(self._unsent)} bytes not taken within {timeout_s:g} s")
                _wait(self._socket, select.POLLOUT, left)
                self._push()

    def _push(self, data: bytes = b"") -> None:
        """Write unsent bytes and then `data`, as far as the kernel takes them; keep the rest. The lock is held."""
        if data:
            self._unsent = memoryview(bytes(self._unsent) + data if self._unsent else data)
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass

    def finish(self) -> None:
        """Send nothing more: the other end gets the end of the stream after all frames."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. No thread may be reading or writing."""
        self._socket.close()


def _wait(connected: socket.socket, event: int, timeout_s: float) -> None:
    poll = select.poll()  # not select(): a process may have more than 1,024 files open
    poll.register(connected, event)
    poll.poll(max(0.0, timeout_s) * 1000)
