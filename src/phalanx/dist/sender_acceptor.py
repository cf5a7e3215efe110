"""Accepts the connection of a stage's sender. Any process may connect; the acceptor drops and logs the others.

A connection is a candidate until it has shown the sender's certificate, where there is TLS, and sent its rank and the
start's nonce. A candidate beyond `MAX_CANDIDATES` replaces an older one (`http/connection_table.py`); a sender that was
dropped connects again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import ssl
import threading
import time

from phalanx.http.connection_table import ConnectionLimits, ConnectionSlot, ConnectionTable
from phalanx.tls.failures import predicate_of

log = logging.getLogger("phalanx.channel")

HELLO_BYTES = 16  # nonce and rank of the sender
WELCOME = b"+"  # the answer, without which the sender could not notice that its connection was dropped
HANDSHAKE_S = 5.0  # two round trips, but this host may be busy
MAX_CANDIDATES = 16  # each is a thread
LOGGED_DROPS = 20  # further ones of a start are only counted, so that the log cannot fill a disk
POLL_S = 0.1  # between checks whether a candidate was the sender


class SenderAcceptor:
    """Accepts connections until one is the sender's.

    Args:
        listener: belongs to the caller.
        context: accepts the sender's certificate; None without TLS.
        hello: the sender's first bytes.
        name: names both ends, for the log.
    """

    def __init__(self, listener: socket.socket, context: ssl.SSLContext | None, hello: bytes, name: str) -> None:
        self._listener = listener
        self._context = context
        self._hello = hello
        self._name = name
        self._table = ConnectionTable(ConnectionLimits(MAX_CANDIDATES, MAX_CANDIDATES))
        self._candidates: dict[socket.socket, ConnectionSlot] = {}
        self._drops = 0
        self._lock = threading.Lock()
        self._found: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def accept(self, deadline: float) -> socket.socket | None:
        """The sender's connection; None if it did not come in time (monotonic seconds)."""
        self._listener.settimeout(POLL_S)
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    return self._found.get_nowait()
                with contextlib.suppress(OSError):  # no connection came, or it was closed at once
                    self._start_examining(*self._listener.accept())
            return None
        finally:
            if (more := self._drops - LOGGED_DROPS) > 0:
                log.warning("%s: %d more connections were dropped", self._name, more)

    def _start_examining(self, candidate: socket.socket, address: tuple[str, int] | str) -> None:
        """Examine a connection in a thread of its own."""
        source = address[0] if isinstance(address, tuple) else "this machine"
        candidate.settimeout(HANDSHAKE_S)
        if self._context is not None:
            candidate = self._context.wrap_socket(candidate, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            slot = self._table.admit(source, lambda: self._make_room(candidate))
            assert slot is not None, "an idle candidate makes room"
            self._candidates[candidate] = slot
        threading.Thread(target=self._examine, args=(candidate, source), name="stage candidate", daemon=True).start()

    def _make_room(self, candidate: socket.socket) -> None:
        del self._candidates[candidate]
        _shut_down(candidate)

    def _examine(self, candidate: socket.socket, source: str) -> None:
        """Welcome the sender; drop any other process."""
        why = self._why_stranger(candidate)
        if not self._forget(candidate):
            why = f"made room: {MAX_CANDIDATES} connections wait"
        if not why:
            try:
                candidate.settimeout(None)
                candidate.sendall(WELCOME)
                self._found.put(candidate)
                return
            except OSError:
                why = "lost its connection"
        self._log_drop(source, why)
        close(candidate)

    def _why_stranger(self, candidate: socket.socket) -> str:
        """Why this is not the sender, as a predicate; "" if it is."""
        received = b""
        try:
            if isinstance(candidate, ssl.SSLSocket):
                candidate.do_handshake()
            while len(received) < HELLO_BYTES and (piece := candidate.recv(HELLO_BYTES - len(received))):
                received += piece
        except TimeoutError:
            return f"sent no Hello within {HANDSHAKE_S:g} s"
        except OSError as error:
            return predicate_of(error) if isinstance(error, ssl.SSLError) else "lost its connection"
        if received == self._hello:
            return ""
        return "is not that rank of this start" if received else "closed its connection"

    def _log_drop(self, source: str, why: str) -> None:
        with self._lock:
            self._drops += 1
            if self._drops > LOGGED_DROPS:
                return
        log.warning("%s: a connection from %s was dropped: it %s", self._name, source, why)

    def _forget(self, candidate: socket.socket) -> bool:
        """Remove a candidate. Returns False if it was removed before, to make room."""
        with self._lock:
            if (slot := self._candidates.pop(candidate, None)) is not None:
                self._table.remove(slot)
            return slot is not None


def _shut_down(connected: socket.socket) -> None:
    """End a connection. Another thread may be waiting on it, and then closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # SSLSocket.shutdown would let that thread read plain text


def close(connected: socket.socket) -> None:
    """Close a socket on which another thread may be waiting."""
    _shut_down(connected)
    connected.close()
