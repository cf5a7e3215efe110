"""The HTTP sessions for replicas: with or without a check of addresses, with or without reuse of connections."""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import AsyncExitStack
from typing import Any, Self

import aiohttp

from phalanx.gateway.relay.attempt import CONNECT_S, Attempt
from phalanx.gateway.settings.replica_addresses import address_fault
from phalanx.gateway.settings.replicas_file import ReplicaSpec

KEEP_IDLE_S = 15.0  # a connection, for further requests


class ReplicaSessions:
    """Open within `async with`.

    Args:
        trusted: authorities of https replicas; None is the system's.
    """

    def __init__(self, trusted: ssl.SSLContext | None) -> None:
        self._trusted = trusted
        self._end = AsyncExitStack()
        self._sessions: dict[tuple[bool, bool], aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        for by_api in (False, True):
            for is_new in (False, True):
                session = self._make(by_api, is_new)
                self._sessions[by_api, is_new] = await self._end.enter_async_context(session)
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._end.aclose()

    def of(self, spec: ReplicaSpec, *, is_new: bool = False) -> aiohttp.ClientSession:
        """The session for a replica.

        Args:
            is_new: open a new connection: an idle one has failed the request, and the replica may have closed all.
        """
        return self._sessions[spec.by_api, is_new]

    def _make(self, by_api: bool, is_new: bool) -> aiohttp.ClientSession:
        """A session without limits of its own: dispatch limits connections, and each attempt has its deadlines."""
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_note_reuse)
        connector = aiohttp.TCPConnector(
            limit=0,
            ssl=self._trusted if self._trusted is not None else True,
            socket_factory=_checked_socket if by_api else None,
            force_close=is_new,
            keepalive_timeout=None if is_new else KEEP_IDLE_S,
        )
        return aiohttp.ClientSession(
            trace_configs=[reuse],
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
            trust_env=False,
        )


async def _note_reuse(session: aiohttp.ClientSession, context: Any, params: object) -> None:
    if isinstance(attempt := context.trace_request_ctx, Attempt):  # else a health check
        attempt.traffic.is_reused = True


def _checked_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for the resolved address of a replica that the admin API added.

    Raises:
        PermissionError: such a replica may not have this address.
    """
    family, kind, protocol, _, address = info
    if fault := address_fault(str(address[0])):
        raise PermissionError(errno.EACCES, fault)
    return socket.socket(family, kind, protocol)
