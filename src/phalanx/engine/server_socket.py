"""The leader's end of the socket to the server: messages arrive through a reader thread, events leave directly.

The reader thread only moves bytes and answers nothing, so that an answered ping proves that the engine loop runs. When
the server is gone, the reader thread ends the process at once, whatever the main thread is doing.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading

from phalanx.dist.frames import receive_frame
from phalanx.errors import ConfigError, EngineError, ExitCode
from phalanx.supervision.wire import engine_codec
from phalanx.types import FromEngine, Shutdown, ToEngine

EXIT_SEND_S = 0.5  # longest wait of an ending rank for the lock, and again for the socket, to send its error


class ServerSocket:
    """Connects to the server's socket; `drain` and `send` are for the engine's main thread.

    Raises:
        ConfigError: no server listens there.
    """

    def __init__(self, path: str) -> None:
        self._codec = engine_codec()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise ConfigError(
                f"--socket {path}: {error.strerror or error}.",
                remedy=f"Start the server first: `phalanx serve --attach {path}`.",
            ) from error
        self._queue: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._read, name="server_socket", daemon=True)

    def open(self) -> None:
        """Start reading."""
        self._thread.start()

    def send(self, message: FromEngine) -> None:
        """Send a message to the server. If the server is gone, the process ends."""
        frame = self._codec.encode(message)
        with self._lock:
            self._send(frame)

    def send_before_exit(self, message: FromEngine) -> None:
        """Send from another thread, before the process ends; gives up if the server or the engine thread is stuck."""
        if not self._lock.acquire(timeout=EXIT_SEND_S):
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if poll.poll(EXIT_SEND_S * 1000):
            self._send(self._codec.encode(message))
        self._lock.release()

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except ConnectionError:
            self._server_gone()

    def drain(self, *, block: bool) -> list[ToEngine]:
        """All messages that have arrived. With `block`, waits for the first, or until another thread calls `wake`."""
        messages: list[ToEngine | None] = []
        try:
            messages.append(self._queue.get(block=block))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return [message for message in messages if message is not None]

    def wake(self) -> None:
        """End a wait for messages. Any thread may call it."""
        self._queue.put(None)

    def _read(self) -> None:
        try:
            while (payload := receive_frame(self._socket)) is not None:
                message = self._codec.decode(payload)
                self._closing = self._closing or isinstance(message, Shutdown)
                self._queue.put(message)
        except EngineError as error:
            sys.stderr.write(f"engine: {error}\n")
            os._exit(ExitCode.CRASH)
        self._server_gone()

    def _server_gone(self) -> None:
        if not self._closing:
            sys.stderr.write("engine: the server process is gone; ending\n")
            sys.stderr.flush()
            os._exit(ExitCode.PEER_LOST)
