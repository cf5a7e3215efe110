"""The ways of the last requests through replicas: which had each, and what moving it cost."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any, Literal

from msgspec import Struct

from phalanx.gateway.relay.exchange import ClientExchange

MAX_TRAILS = 1000
MAX_MOVES = 50  # shown among the page's events

Outcome = Literal["", "finished", "failed", "client left"]


class StreamMove(Struct, frozen=True):
    """A stream that went on at another replica."""

    at: float  # seconds after the request's arrival
    origin: str
    target: str
    gap_s: float
    ended: float  # seconds since 1970, when it went on


class RequestTrail(Struct, kw_only=True, eq=False):
    """One request. Times are seconds on the gateway's monotonic clock."""

    id: str
    owner: str
    endpoint: str
    model: str
    arrived: float
    exchange: ClientExchange | None  # while it is answered
    replicas: list[str] = []  # that had it, the last one last
    moves: list[StreamMove] = []
    gap_since: float | None = None  # its stream has no replica since then
    first_text_s: float | None = None
    n_tokens: int = 0  # of prompt and answer, as its key is charged
    outcome: Outcome = ""
    ended: float | None = None

    @property
    def state(self) -> str:
        """What it waits for, or how it has ended."""
        if self.outcome:
            return self.outcome
        if self.gap_since is not None:
            return "paused"
        if not self.replicas:
            return "queued"
        has_text = self.exchange is not None and self.exchange.first_text_s is not None
        return "decode" if has_text else "prefill"

    def end(self, outcome: Outcome, now: float) -> None:
        """The request is over."""
        self.outcome, self.ended, self.gap_since = outcome, now, None
        if self.exchange is not None:
            self.first_text_s, self.n_tokens = self.exchange.first_text_s, self.exchange.n_tokens
            self.exchange = None

    def row(self, now: float) -> dict[str, Any]:
        """As one line of the page's table."""
        end = self.ended if self.ended is not None else now
        first = self.first_text_s if self.exchange is None else self.exchange.first_text_s
        return {
            "id": self.id,
            "model": self.model,
            "endpoint": self.endpoint,
            "replica": self.replicas[-1] if self.replicas else None,
            "state": self.state,
            "moves": len(self.moves),
            "seconds": round(end - self.arrived, 1 if self.ended is None else 2),
            "first_text_seconds": None if first is None else round(first, 2),
            "total_tokens": self.n_tokens if self.exchange is None else None,
        }

    def story(self) -> list[str]:
        """Its way in words."""
        told = [f"The gateway gave it to {self.replicas[0]}."] if self.replicas else ["No replica has had it yet."]
        told += [
            f"After {move.at:.2f} s it moved from {move.origin} to {move.target}, in {move.gap_s:.2f} s, and lost no "
            "token."
            for move in self.moves
        ]
        return told


def trail_of(exchange: ClientExchange, model: str | None) -> RequestTrail:
    """The trail of a request that has just come."""
    return RequestTrail(
        id=exchange.id, owner=exchange.owner, endpoint=exchange.path, model=model or "", arrived=exchange.arrived,
        exchange=exchange,
    )  # fmt: skip


class RequestTrails:
    """The last ones, by their ids."""

    def __init__(self) -> None:
        self._trails: OrderedDict[int, RequestTrail] = OrderedDict()  # by number, oldest first
        self._n = 0

    def add(self, trail: RequestTrail) -> None:
        """A request is let in."""
        self._n += 1
        self._trails[self._n] = trail
        if len(self._trails) > MAX_TRAILS:
            self._trails.popitem(last=False)

    def find(self, id: str, owner: str | None) -> RequestTrail | None:
        """The newest request with this id. `owner`: whose it must be; None: whoever's."""
        found = (trail for trail in reversed(self._trails.values()) if trail.id == id)
        return next((trail for trail in found if owner is None or trail.owner == owner), None)

    def moves(self, owner: str | None) -> dict[str, dict[str, Any]]:
        """The last moves of streams by name, as the page shows them among its events."""
        found = (
            (f"{k}-{i}", _shown_move(one.id, one.moves[i]))
            for k, one in reversed(self._trails.items())
            if owner is None or one.owner == owner
            for i in reversed(range(len(one.moves)))
        )
        return dict(islice(found, MAX_MOVES))

    def latest(self, n: int, owner: str | None) -> dict[int, RequestTrail]:
        """Those that are not over, and the last others, n in all at least; newest first, by number."""
        own = [(k, one) for k, one in reversed(self._trails.items()) if owner is None or one.owner == owner]
        return {k: one for i, (k, one) in enumerate(own) if i < n or not one.outcome}


def _shown_move(id: str, move: StreamMove) -> dict[str, Any]:
    return {
        "at": round(move.ended, 1),
        "what": f"The stream of {id} moved from {move.origin} to {move.target}.",
        "did": f"It went on after {move.gap_s:.2f} s and lost no token.",
        "gap_seconds": round(move.gap_s, 2),
        "is_good": True,
    }
