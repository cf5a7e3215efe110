"""One client's request on its way through replicas, and the answer that is relayed: what is counted of both, signs of
life, how it ends with an error.

Knows no replica.
"""

from __future__ import annotations

from phalanx.errors import PhalanxError
from phalanx.gateway.relay.api_kinds import Dialect, dialect_of, error_event
from phalanx.http.body_budget import BodyLease
from phalanx.http.error_responses import error_body, public_failure
from phalanx.http.http_exchange import Exchange
from phalanx.http.shares import Shares


def body_lease(budget: Shares, owner: str) -> BodyLease:
    """The memory of one request's body.

    Args:
        owner: whose share it is of.
    """
    return BodyLease(budget, owner, "The gateway holds as many bytes of requests as it may (by --max-body-mb).")


class ClientExchange:
    """See the module's docstring.

    Args:
        http: a request whose key was accepted.
        arrived: when its header had come; monotonic seconds.
    """

    def __init__(self, http: Exchange, arrived: float) -> None:
        self.http = http
        self.request = http.request
        self.path = http.path
        self.id = http.id
        self.arrived = arrived
        self.raw_path = http.request.rel_url.raw_path.rstrip("/") or "/"
        """As the client wrote it, with its escapes."""
        self.dialect: Dialect = dialect_of(self.path)
        self.owner = http.owner or ""
        self.first_text_s: float | None = None
        """From its arrival until the first text, reasoning or call of the answer was passed on."""
        self.n_read = 0
        """Bytes of its body."""
        self.n_tokens = 0
        """Of prompt and answer, that its key is charged if it ends now: as its client leaves, or with its answer."""

    @property
    def share(self) -> str:
        """Whose part of what all clients share it takes: its key's, without keys its address's."""
        return self.owner or self.http.connection.place.address

    @property
    def has_begun(self) -> bool:
        """A part of the answer is on its way, so that its status stands."""
        return self.http.response is not None

    async def keep_alive(self) -> None:
        """Give the client of a stream a sign of life, unless bytes are on their way to it. Does not wait for it."""
        if not self.http.connection.n_unsent:
            await self.http.write(b" " if self.dialect == "ollama" else b": keep-alive\n\n")

    async def end_with(self, error: PhalanxError, *, is_stream: bool, number: int = 0) -> None:
        """End an answer that has begun. One that cannot say so is cut off, so that its client sees it."""
        if is_stream:
            body = error_body(public_failure(error), self.path)
            await self.http.write(error_event(self.dialect, body, number=number))
            await self.http.end()
        else:
            self.http.connection.abort()
