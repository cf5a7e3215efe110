"""Accepts connections within limits, and closes those that miss a deadline.

`Acceptor` accepts, asks the table for a slot (`connection_table.py`) and hands the socket to an `HttpConnection`.
Once a second it checks every connection, and logs at most one line in ten seconds on those it closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from phalanx.http.connection import HttpConnection
from phalanx.http.connection_table import (
    RESERVE,
    ConnectionLimits,
    ConnectionSlot,
    ConnectionTable,
    Deadlines,
    group_of,
)

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0  # between two checks of the deadlines, which are ten seconds and more
LOG_INTERVAL_S = 10.0  # between two lines about closed connections: a flood must not fill a disk
ACCEPT_RETRY_S = 1.0  # after accept() found no files or memory; the kernel keeps clients waiting meanwhile
FLUSH_S = 5.0  # for the last bytes of answers, after the drain
OTHER_FILES = 128
"""Open files besides connections: libraries, the engine's socket, pipes of ranks, logs, the event loop's own."""


def limits_within(limits: ConnectionLimits) -> ConnectionLimits:
    """The limits, lowered with a warning if this process may not open so many files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = soft - OTHER_FILES - RESERVE
    if soft == resource.RLIM_INFINITY or room >= limits.total:
        return limits
    total = max(1, room)
    log.warning("at most %d connections, not %d: the limit of open files is %d (ulimit -n)", total, limits.total, soft)
    return ConnectionLimits(total, min(total, limits.per_address))


class Acceptor:
    """Accepts the connections of one listening socket until `stop`.

    Args:
        listener: bound, listening, not blocking.
        connect: makes the protocol of a connection that has a slot.
        tls: the server's certificate; None for plain HTTP.
    """

    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        connect: Callable[[ConnectionSlot], HttpConnection],
        *,
        deadlines: Deadlines,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._table = table
        self._connect = connect
        self._deadlines = deadlines
        self._tls = tls
        self._open: set[HttpConnection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._closed: Counter[str] = Counter()  # cause -> connections closed for it since the last line of the log
        self._logged_at = -LOG_INTERVAL_S
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to accept."""
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._check_deadlines())]

    async def stop(self) -> None:
        """Accept no more; connections stay."""
        for task in (*self._tasks, *self._handshakes):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._handshakes, return_exceptions=True)

    @property
    def is_sending(self) -> bool:
        """Whether a connection has not sent all, or is not closed."""
        return any(not connection.is_gone for connection in self._open)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except ConnectionError:  # the client left before it was accepted
                continue
            except OSError as error:  # no files or memory; not this server's doing, since its limits are lower
                self._closed[f"times accept() failed ({error.strerror})"] += 1
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._admit(connection, peer[0])
            await asyncio.sleep(0)  # a flood must not keep the loop from its streams

    def _admit(self, connection: socket.socket, address: str) -> None:
        slot = self._table.admit(group_of(address), connection.close)
        if slot is None:
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection, slot))
        slot.close = task.cancel
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _serve(self, connection: socket.socket, slot: ConnectionSlot) -> None:
        """Hand the socket to its protocol; with TLS, after the handshake."""
        handshake_s = self._deadlines.header_s if self._tls is not None else None
        try:
            _, served = await asyncio.get_running_loop().connect_accepted_socket(
                functools.partial(self._connect, slot), connection, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
        except OSError:  # a failed or late handshake, or the client left
            self._closed["without a TLS handshake"] += self._tls is not None
            self._table.remove(slot)
        except asyncio.CancelledError:
            connection.close()
            self._table.remove(slot)
            raise
        else:
            self._open.add(served)

    async def _check_deadlines(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now = time.monotonic()
            for connection in list(self._open):
                if connection.is_gone:
                    self._open.discard(connection)
                elif cause := connection.overdue(now):
                    self._closed[cause] += 1
                    connection.abort()
            if now - self._logged_at >= LOG_INTERVAL_S:
                self._log_closed(now)

    def _log_closed(self, now: float) -> None:
        """Log one line on the connections closed since the last one."""
        counts = self._closed
        counts["closed for newer ones"] += self._table.displaced
        counts["refused"] += self._table.refused
        counts = +counts
        if not counts:
            return
        limits = self._table.limits
        log.warning(
            "connections: %s; open now: %d (at most %d, %d per address)",
            ", ".join(f"{count:,} {cause}" for cause, count in counts.most_common()),
            self._table.held,
            limits.total,
            limits.per_address,
        )
        self._closed = Counter()
        self._table.displaced = self._table.refused = 0
        self._logged_at = now
