"""One attempt of one request on one replica: sends the request and reads the answer.

It maps the HTTP library's errors to phalanx's, with the replica's name.
"""

from __future__ import annotations

import asyncio
import errno
import io
import re
from collections.abc import AsyncGenerator, Iterable, Mapping

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from phalanx.errors import MalformedAnswer, PhalanxError, ReplicaFailed, ReplicaTooSlow
from phalanx.gateway.dispatch.replica import VIA
from phalanx.gateway.relay.traffic import Traffic
from phalanx.http.owners import OWNER, owner_header
from phalanx.http.stream_records import MIGRATION, RESUME

CONNECT_S = 5.0  # for a connection and its TLS handshake: some round trips, with two lost packets
PIECE_BYTES = 1 << 16  # of a body, handed to the transport at a time
STATUSES = range(200, 600)
"""Statuses that are passed on. After 101 the client's connection would leave HTTP, and 0 cannot be sent."""
CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
UNAUTHORIZED = 401
HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    "upgrade".split()
)
NOT_SENT = HOP_BY_HOP | {
    "host", "content-length", "content-encoding", "accept-encoding", "expect", "x-request-id",
    MIGRATION, OWNER, RESUME,
}  # fmt: skip
RETURNED = frozenset(
    "allow cache-control content-disposition content-encoding content-language content-range content-type request-id "
    "retry-after retry-after-ms x-accel-buffering x-should-retry".split()
)
RETURNED_PREFIXES = ("anthropic-", "openai-", "ratelimit-", "x-phalanx-", "x-ratelimit-")
"""Answers' headers that are passed on. Others act on the gateway's whole origin (cookies, HTTPS, CORS) or on a proxy
before it (X-Accel-Redirect), which a replica may not. The gateway adds headers of its own.
"""
OWN_FAULTS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Errors of this machine, not of the replica, when it opens a connection; many clients can cause them."""
CLIENTS_KEYS = frozenset(("authorization", "x-api-key"))


def request_headers(
    given: Iterable[tuple[str, str]],
    *,
    request_id: str,
    owner: str,
    key: str | None,
    admin_key: str | None,
    pass_keys: bool,
) -> CIMultiDict[str]:
    """The headers sent to a replica, made from a client's.

    Args:
        owner: of the client's key; "" if the gateway needs none, so that all clients are one.
        key: the replica's own; None if it has none.
        admin_key: the replica's; None sends it no owner.
        pass_keys: pass the client's own key on, if the replica has none in the settings.
    """
    pairs = list(given)
    named = {part.strip().lower() for name, value in pairs if name.lower() == "connection" for part in value.split(",")}
    left_out = NOT_SENT | named | (frozenset() if pass_keys else CLIENTS_KEYS)
    headers = CIMultiDict((name, value) for name, value in pairs if name.lower() not in left_out)
    headers["Accept-Encoding"] = "identity"  # streams are read as they pass
    headers["X-Request-Id"] = request_id
    headers.add("Via", VIA)
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if owner and admin_key is not None:
        headers[OWNER] = owner_header(owner, admin_key)
    return headers


def response_headers(given: Mapping[str, str], status: int) -> CIMultiDict[str]:
    """The headers of a replica's answer that the client gets. The gateway sets WWW-Authenticate itself."""
    headers = CIMultiDict(
        (name, value)
        for name, value in given.items()
        if name.lower() in RETURNED or name.lower().startswith(RETURNED_PREFIXES)
    )
    if status == UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


class Attempt:
    """One attempt, open within `async with`; the end closes the connection unless it is idle.

    Args:
        traffic: updated as bytes pass.
        deadline: end of the whole request's time; the loop's clock.
    """

    def __init__(self, traffic: Traffic, deadline: float) -> None:
        self.traffic = traffic
        self.name = traffic.grant.replica.name
        self._cut: PhalanxError | None = None
        self._scope = asyncio.timeout_at(deadline)
        self._response: aiohttp.ClientResponse | None = None

    def cut(self, error: PhalanxError) -> None:
        """End the attempt now, with this error."""
        if self._cut is None and not self._scope.expired():
            self._cut = error
            self._scope.reschedule(0.0)

    @property
    def is_broken(self) -> bool:
        """Whether a framing error closed the connection before the body's end, which aiohttp does not report."""
        response = self._response
        if response is None or response.connection is None or response.connection.protocol is None:
            return False
        is_reported = response.content.is_eof() or response.content.exception() is not None
        return not is_reported and not response.connection.protocol.connected

    async def __aenter__(self) -> Attempt:
        await self._scope.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        if self._response is not None:
            self._response.close()  # a finished one has returned to the pool
        try:
            await self._scope.__aexit__(*details)  # type: ignore[arg-type]
        except TimeoutError:
            raise self._cut or ReplicaTooSlow(
                f"The request's time was over before the replica {self.name} had answered."
            ) from None

    async def send(
        self, session: aiohttp.ClientSession, method: str, path: str, headers: CIMultiDict[str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Send the request. Returns the answer's head.

        Args:
            path: with its query, as the client sent it.

        Raises:
            ReplicaFailed: no connection, or it broke off.
            MalformedAnswer: the answer is not HTTP, or has a status or header that cannot be passed on.
        """
        # A large body is sent in pieces, between which the loop serves other requests.
        data = io.BytesIO(body) if body is not None and len(body) > PIECE_BYTES else body
        url = URL(self.traffic.grant.replica.spec.url + path, encoded=True)
        try:
            self._response = await session.request(
                method, url, headers=headers, data=data, allow_redirects=False, trace_request_ctx=self
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self.traffic.is_unreachable = getattr(error, "errno", None) not in OWN_FAULTS
            raise ReplicaFailed(f"The replica {self.name} cannot be reached: {_cause(error)}.") from error
        except aiohttp.ClientResponseError as error:
            self.traffic.is_sent = True
            raise MalformedAnswer(f"The replica {self.name} does not answer in HTTP: {error.message}.") from error
        except (aiohttp.ClientError, OSError) as error:
            self.traffic.is_sent = True
            raise ReplicaFailed(f"The replica {self.name} broke off: {_cause(error)}.") from error
        self.traffic.is_sent = True
        if self._response.status not in STATUSES:
            raise MalformedAnswer(f"The replica {self.name} answers with the status {self._response.status}.")
        if any(map(CONTROLS.search, self._response.headers.values())):  # which aiohttp refuses to send
            raise MalformedAnswer(f"The replica {self.name} answers with control characters in a header.")
        self.note_byte()
        return self._response

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The answer's body, as it comes.

        Raises:
            ReplicaFailed: it broke off.
        """
        assert self._response is not None
        while True:
            try:
                piece = await self._response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise ReplicaFailed(f"The replica {self.name} broke off: {_cause(error)}.") from error
            if not piece:
                return
            self.note_byte()
            yield piece

    def note_byte(self) -> None:
        """A byte has come."""
        self.traffic.has_begun = True
        self.traffic.last_byte = asyncio.get_running_loop().time()


def _cause(error: BaseException) -> str:
    """An error of the library as text, without the address that it may name."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(inner, TimeoutError):
        return f"no connection in {CONNECT_S:g} s"
    if isinstance(inner, aiohttp.ClientPayloadError):
        return "its answer ended early"
    text = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    return str(text).rstrip(".")
