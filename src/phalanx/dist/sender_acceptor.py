"""Accepts the one connection of a stage's sender, among strangers: each is examined, dropped and named in the log.

A connection is a candidate until it has shown the sender's certificate, where there is TLS, and said which rank of
which start it is. When there are `MAX_CANDIDATES`, one more ends an older one (`http/connection_table.py`). A sender
that is dropped all the same connects again. Does not know frames.
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
WELCOME = b"+"  # the answer to it: the sender would not notice else that its connection was given up
HANDSHAKE_S = 5.0  # two round trips, but this host may be busy
MAX_CANDIDATES = 16  # each is a thread
LOGGED_DROPS = 20  # further ones of a start are counted, so that strangers cannot fill a disk
LOOK_S = 0.1  # between looks at whether the sender is there


class SenderAcceptor:
    """Accepts connections until one is the sender's.

    Args:
        listener: belongs to the caller.
        context: accepts the sender's certificate; None without TLS.
        hello: what the sender says first.
        name: of both ends, for the log.
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
        self._listener.settimeout(LOOK_S)
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    return self._found.get_nowait()
                with contextlib.suppress(OSError):  # none came meanwhile, or it has gone again
                    self._take(*self._listener.accept())
            return None
        finally:
            if (more := self._drops - LOGGED_DROPS) > 0:
                log.warning("%s: %d more connections were dropped", self._name, more)

    def _take(self, candidate: socket.socket, address: tuple[str, int] | str) -> None:
        """Examine a connection in a thread of its own."""
        source = address[0] if isinstance(address, tuple) else "this machine"
        candidate.settimeout(HANDSHAKE_S)
        if self._context is not None:
            candidate = self._context.wrap_socket(candidate, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            place = self._table.admit(source, lambda: self._make_room(candidate))
            assert place is not None, "candidates are idle: one makes way"
            self._candidates[candidate] = place
        threading.Thread(target=self._examine, args=(candidate, source), name="stage candidate", daemon=True).start()

    def _make_room(self, candidate: socket.socket) -> None:
        del self._candidates[candidate]
        _end(candidate)

    def _examine(self, candidate: socket.socket, source: str) -> None:
        """Welcome the sender; drop anything else."""
        why = self._stranger(candidate)
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

    def _stranger(self, candidate: socket.socket) -> str:
        """Why this is not the sender, as a predicate; "" if it is."""
        said = b""
        try:
            if isinstance(candidate, ssl.SSLSocket):
                candidate.do_handshake()
            while len(said) < HELLO_BYTES and (piece := candidate.recv(HELLO_BYTES - len(said))):
                said += piece
        except TimeoutError:
            return f"did not say who it is within {HANDSHAKE_S:g} s"
        except OSError as error:
            return predicate_of(error) if isinstance(error, ssl.SSLError) else "lost its connection"
        if said == self._hello:
            return ""
        return "is not that rank of this start" if said else "closed its connection"

    def _log_drop(self, source: str, why: str) -> None:
        with self._lock:
            self._drops += 1
            if self._drops > LOGGED_DROPS:
                return
        log.warning("%s: a connection from %s was dropped: it %s", self._name, source, why)

    def _forget(self, candidate: socket.socket) -> bool:
        """Remove a candidate. Returns False if it was removed before, to make room."""
        with self._lock:
            if (place := self._candidates.pop(candidate, None)) is not None:
                self._table.remove(place)
            return place is not None


def _end(connected: socket.socket) -> None:
    """End a connection on which another thread may wait, which closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # TLS's own one would let that thread read plain text


def close(connected: socket.socket) -> None:
    """Close a socket on which another thread may wait."""
    _end(connected)
    connected.close()
