"""Accepts TLS connections from known hosts, and bounds the time, sockets and log lines of all others.

A connection is a candidate until its TLS handshake is over. Beyond `MAX_CANDIDATES`, a new one closes an older one of
an unknown address (`http/connection_table.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Coroutine

from phalanx.http.connection_table import ConnectionLimits, ConnectionSlot, ConnectionTable
from phalanx.http.refused_keys import RefusedKeys
from phalanx.tls.failures import explain

MAX_CANDIDATES = 64  # the known host is one or two of them; each costs a file descriptor
HANDSHAKE_S = 5.0  # a handshake is two round trips, but this host may be busy
SHUTDOWN_S = 2.0  # for the other end to confirm that a connection closes
ACCEPT_RETRY_S = 0.5  # after a failed accept: no file descriptor is left, or no memory

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Coroutine[None, None, None]]
"""Called with a connection and the address it comes from."""


class TlsListener:
    """Listens on one address.

    Args:
        context: decides which certificates are accepted.
        handle: called in a task of its own for every connection whose handshake has succeeded.
    """

    def __init__(self, context: ssl.SSLContext, handle: Handle) -> None:
        self._context = context
        self._handle = handle
        self._table = ConnectionTable(ConnectionLimits(MAX_CANDIDATES, MAX_CANDIDATES))
        self._candidates: dict[socket.socket, ConnectionSlot] = {}
        self._refusals = RefusedKeys("A refused connection")
        self._handshakes: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None  # while it listens

    async def listen(self, host: str, port: int) -> None:
        """Accept connections from now on.

        Raises:
            OSError: the address is not this host's, or the port is taken.
        """
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        self._socket = socket.create_server(address[:2], family=family)
        self._socket.setblocking(False)
        self._wait(self._socket)

    async def close(self) -> None:
        """Accept no more connections, and end all handshakes. Connections whose handshake is over go on."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for candidate in self._candidates:
            _break(candidate)
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _wait(self, listener: socket.socket) -> None:
        if listener is self._socket:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, (address, *_) = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        except OSError as error:
            self._refusals.note("anywhere", time.monotonic(), error.strerror or str(error))
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_RETRY_S, self._wait, listener)
            return
        place = self._table.admit(address, lambda: _break(connection))
        assert place is not None, "candidates are idle: one makes way"
        self._candidates[connection] = place
        _start(self._shake_hands(connection, address), self._handshakes)

    async def _shake_hands(self, connection: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )  # fmt: skip
        except OSError as error:
            self._refusals.note(address, time.monotonic(), explain(error))
            return
        finally:
            self._table.remove(self._candidates.pop(connection))
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        _start(self._handle(reader, writer, address), self._connections)


def _start(work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
    """Start a task, and keep it among others until it is done."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _break(connection: socket.socket) -> None:
    """End a connection that a transport owns: its handshake then fails."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
