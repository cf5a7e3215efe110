"""Serves one handler at listening sockets, from accepting connections to an orderly stop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from signal import Signals

from aiohttp import web

from phalanx.http.acceptor import FLUSH_S, Acceptor, limits_within
from phalanx.http.connection import HttpConnection
from phalanx.http.connection_table import ConnectionLimits, ConnectionSlot, ConnectionTable, Deadlines

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
POLL_S = 0.01  # between two checks for unsent bytes, at the end


class HttpService:
    """See the module's docstring. Create it in the event loop that serves.

    Args:
        listeners: bound, listening, not blocking. All share the handler and the limits.
        deadlines: how long clients may keep a connection waiting.
        tls: the server's certificate; None for plain HTTP.
        is_gateway: see `HttpConnection`.
    """

    def __init__(
        self,
        handler: Handler,
        listeners: Sequence[socket.socket],
        limits: ConnectionLimits,
        *,
        deadlines: Deadlines = Deadlines(),
        tls: ssl.SSLContext | None = None,
        is_gateway: bool = False,
    ) -> None:
        self.table = ConnectionTable(limits_within(limits))
        self._server = web.Server(handler)  # handlers decide which work ends with their client

        def connect(slot: ConnectionSlot) -> HttpConnection:
            return HttpConnection(slot, self.table, deadlines, self._server, is_gateway=is_gateway)

        self.acceptors = [
            Acceptor(listener, self.table, connect, deadlines=deadlines, tls=tls) for listener in listeners
        ]

    def start(self) -> None:
        """Begin to accept."""
        for acceptor in self.acceptors:
            acceptor.start()

    async def stop(self) -> None:
        """Stop accepting, close idle connections at once, and others when their answers are sent or time is over."""
        for acceptor in self.acceptors:
            await acceptor.stop()
        self._server.pre_shutdown()
        for connection in self._server.connections:
            assert isinstance(connection, HttpConnection)
            connection.give_up_body()
        await self._server.shutdown(FLUSH_S)
        give_up = asyncio.get_running_loop().time() + FLUSH_S
        while any(acceptor.is_sending for acceptor in self.acceptors):
            if asyncio.get_running_loop().time() > give_up:
                return
            await asyncio.sleep(POLL_S)


@contextmanager
def handling(signals: Mapping[Signals, Callable[[], None]]) -> Iterator[None]:
    """Call these when their signals come. Does nothing outside the main thread."""
    loop = asyncio.get_running_loop()
    try:
        for number, handler in signals.items():
            loop.add_signal_handler(number, handler)
    except (RuntimeError, ValueError):  # not the main thread
        pass
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
