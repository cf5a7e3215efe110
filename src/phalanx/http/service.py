"""Serves one handler at listening sockets, and ends: a server's and a gateway's way from accepting to the last byte."""

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
from phalanx.http.connection_table import ConnectionLimits, ConnectionPlace, ConnectionTable, Deadlines

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
LOOK_S = 0.01  # between two looks at what is still to be sent, at the end


class HttpService:
    """See the module's docstring. Made in the event loop that it serves in.

    Args:
        listeners: bound, listening, not blocking. What is served at each, and within which limits, is the same.
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
        self._server = web.Server(handler)  # handlers say what of their work ends with their client

        def connect(place: ConnectionPlace) -> HttpConnection:
            return HttpConnection(place, self.table, deadlines, self._server, is_gateway=is_gateway)

        self.acceptors = [
            Acceptor(listener, self.table, connect, deadlines=deadlines, tls=tls) for listener in listeners
        ]

    def start(self) -> None:
        """Begin to accept."""
        for acceptor in self.acceptors:
            acceptor.start()

    async def stop(self) -> None:
        """Accept no more, close idle connections at once, and the others once their answers are sent, or too late."""
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
            await asyncio.sleep(LOOK_S)


@contextmanager
def handling(signals: Mapping[Signals, Callable[[], None]]) -> Iterator[None]:
    """Call these when their signals come. Outside of a main thread, nothing does."""
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
