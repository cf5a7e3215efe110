"""The client's side of a proxied request: its counts, keep-alives, and how its answer ends with an error."""

from __future__ import annotations

from phalanx.errors import PhalanxError
from phalanx.gateway.relay.api_kinds import Dialect, dialect_of, error_event
from phalanx.http.body_budget import BodyLease
from phalanx.http.error_responses import error_body, public_failure
from phalanx.http.fair_quota import FairQuota
from phalanx.http.http_exchange import Exchange


def body_lease(budget: FairQuota, owner: str) -> BodyLease:
    """The memory of one request's body.

    Args:
        owner: whose quota it counts against.
    """
    return BodyLease(budget, owner, "The gateway holds as many bytes of requests as it may (by --max-body-mb).")


class ClientExchange:
    """See the module's docstring.

    Args:
        http: a request with a valid key.
        arrived: when its head had arrived; monotonic seconds.
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
        """Seconds from its arrival to the first text, reasoning or call passed on."""
        self.n_read = 0
        """Bytes of its body."""
        self.n_tokens = 0
        """Tokens of prompt and answer that count against its key if the request ends now."""

    @property
    def quota_owner(self) -> str:
        """The owner of its quota of memory and retries: its key's owner, without keys its address."""
        return self.owner or self.http.connection.slot.address

    @property
    def has_begun(self) -> bool:
        """The answer's head was sent, so its status can no longer change."""
        return self.http.response is not None

    async def keep_alive(self) -> None:
        """Send a keep-alive into the stream, unless bytes still wait for the client."""
        if not self.http.connection.n_unsent:
            await self.http.write(b" " if self.dialect == "ollama" else b": keep-alive\n\n")

    async def end_with(self, error: PhalanxError, *, is_stream: bool, number: int = 0) -> None:
        """End a begun answer: a stream with an error event, any other by closing the connection."""
        if is_stream:
            body = error_body(public_failure(error), self.path)
            await self.http.write(error_event(self.dialect, body, number=number))
            await self.http.end()
        else:
            self.http.connection.abort()
