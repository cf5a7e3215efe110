"""A client's request on its way to replicas: what each gets, and what its attempts have come to so far."""

from __future__ import annotations

from msgspec import Struct, field

from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Grant
from phalanx.gateway.dispatch.retries import RetryBudget
from phalanx.gateway.relay.migration import Migration


class UpstreamRequest(Struct):
    """A request as replicas get it."""

    request: DispatchRequest
    method: str
    path: str  # with its query
    body: bytes | None
    n_tokens: int  # that it is expected to take, of prompt and answer
    deadline: float  # the loop's time
    pass_keys: bool  # the client's own key is for the replica
    migration: Migration
    budget: RetryBudget
    queued_s: float = 0.0
    admin_key: str | None = None  # with which the last attempt was made; None: without one
    attempts: int = 0  # that replicas have failed
    met_stale: bool = False  # a connection failed it that had been idle: further attempts make their own
    not_found: int = 0  # replicas that answered 404
    unexplained: list[Grant] = field(default_factory=list)  # of attempts that failed, perhaps because of the request
    successor: Grant | None = None  # the place to which the request moves as soon as its attempt has ended
