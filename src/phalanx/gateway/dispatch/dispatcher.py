"""Decides which request goes to which replica, and when, as plain calls.

    arrive(request) -> Grant    the request goes to this replica
                    -> None     it waits; `decided` will return it
                    raises      the queue is full, or no replica can take it at all
    end(grant, verdict)         the attempt is over
    blame(grant)                the attempt failed, and not because of its request
    elsewhere(request, replica) -> Grant or None      a second grant, on another replica
    decided() -> [(request, Grant or error)]          to be called after every change

After `decided` no waiting request can be granted a replica, so a new request that can overtakes none.

A request whose begun stream has lost its replica waits in a separate queue: it goes first, and takes no room in the
others' queue. It waits even if every replica is down, since one may come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from phalanx.errors import NoReplica, PhalanxError, QueueFull, UnknownModel
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.fair_queue import DrainRate, FairQueue
from phalanx.gateway.dispatch.policies import Policy
from phalanx.gateway.dispatch.replica import Replica

Verdict = Literal["answered", "failed", "cancelled"]
"""How an attempt ended: the replica answered; it failed, perhaps because of the request; or the client left."""
MAX_NAMED = 20  # replicas, or models, in an error message


class Grant(Struct, eq=False):
    """A request's slot on a replica."""

    request: DispatchRequest
    replica: Replica
    trial: bool  # the replica's circuit is half-open
    number: int  # counts all grants


Decision = tuple[DispatchRequest, Grant | PhalanxError]
_Kind = tuple[object, ...]
"""The values on which `_ready` depends: model, determinism key, and replicas that failed or refused the request."""


class Dispatcher:
    """See the module's docstring. Used only on the event loop's thread."""

    def __init__(self, policy: Policy, *, queue_size: int) -> None:
        self.replicas: dict[str, Replica] = {}
        self.queue: FairQueue[DispatchRequest] = FairQueue(queue_size)
        self.begun: FairQueue[DispatchRequest] = FairQueue(None)
        """Waiting requests whose begun stream has lost its replica."""
        self._policy = policy
        self._rate = DrainRate()
        self._grants = 0
        self._evicted: list[DispatchRequest] = []

    # Replicas ------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Add a replica; it gets requests once it is up."""
        self.replicas[replica.name] = replica

    def remove(self, name: str) -> Replica:
        """Send a replica no new requests; its running ones continue."""
        replica = self.replicas.pop(name)
        replica.is_draining = replica.is_removed = True
        self._policy.forget(name)
        return replica

    def forget_cache(self, name: str) -> None:
        """A replica was down and may have lost its cached prefixes."""
        self._policy.forget(name)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a replica."""
        return len(self.queue) + len(self.begun)

    @property
    def in_flight(self) -> int:
        """Requests on all replicas."""
        return sum(replica.in_flight for replica in self.replicas.values())

    # Requests ------------------------------------------------------------------------------------------------

    def arrive(self, request: DispatchRequest, now: float) -> Grant | None:
        """A request wants a replica, for the first time or after one has failed it.

        Raises:
            UnknownModel: no replica serves its model, and all list the models they serve.
            NoReplica: no replica that serves it can take requests; names each with its reason.
            QueueFull: all are busy, and there is no room to wait.
        """
        if ready := _ready(request, self._free(now)):
            return self._grant(request, ready)
        if not self._may_wait(request, now):
            raise self._none_error(request, now)
        if request.is_begun:
            self.begun.add(request)
            return None
        evicted = self.queue.add(request)
        if evicted is request:
            raise self._full_error(now)
        if evicted is not None:
            self._evicted.append(evicted)
        return None

    def elsewhere(self, request: DispatchRequest, replica: Replica, now: float) -> Grant | None:
        """A second grant, on a healthy replica other than this one with room for all rows; None if there is none. A
        begun stream also needs an equal determinism key: an inexact continuation is no better than waiting.
        """
        able = [
            other
            for other in self.replicas.values()
            if other is not replica and other.is_available(now) and not other.is_degraded
            if other.has_room_for(request.rows) and _may_get(request, other)
            if not request.is_begun or other.health.determinism_key == request.determinism_key
        ]
        return self._grant(request, able) if able else None

    def withdraw(self, request: DispatchRequest) -> None:
        """A waiting request's client left."""
        (self.begun if request.is_begun else self.queue).remove(request)

    def end(self, grant: Grant, verdict: Verdict, now: float) -> None:
        """An attempt is over."""
        grant.replica.in_flight -= grant.request.rows
        self._rate.note(now)
        breaker = grant.replica.breaker
        if verdict == "answered":
            grant.replica.is_suspect = grant.replica.needs_check = False
            breaker.succeed(grant.trial)
        else:
            grant.replica.needs_check |= verdict == "failed"
            breaker.cancel(grant.trial)

    def blame(self, grant: Grant, now: float) -> None:
        """Count an ended attempt against its replica: the request is not why it failed."""
        if grant.trial or grant.number > grant.replica.failed_at:
            grant.replica.is_suspect = True
            grant.replica.failed_at = self._grants  # its other running attempts fail with this one and count once
            grant.replica.breaker.fail(grant.trial, now)

    def decided(self, now: float) -> Iterator[Decision]:
        """Every waiting request that can go now or has to give up."""
        while self._evicted:
            yield self._evicted.pop(), self._full_error(now)
        for request in [*self.begun.take_overdue(now), *self.queue.take_overdue(now)]:
            yield request, self._late_error(request, now)
        able: dict[_Kind, bool] = {}
        for request in [*self.begun, *self.queue]:
            kind = _kind_of(request)
            if kind not in able:
                able[kind] = self._may_wait(request, now)
            if not able[kind]:
                self.withdraw(request)
                yield request, self._none_error(request, now)
        while (taken := self._take(now)) is not None:
            yield taken[0], self._grant(*taken)

    def has_untried(self, request: DispatchRequest, now: float) -> bool:
        """Whether a replica that has not failed this request could take it, now or later."""
        return any(one.is_available(now) and _may_get(request, one) for one in self.replicas.values())

    # -----------------------------------------------------------------------------------------------------------

    def _free(self, now: float) -> list[Replica]:
        """Available replicas with room; few while requests wait."""
        return [replica for replica in self.replicas.values() if replica.has_room and replica.is_available(now)]

    def _may_wait(self, request: DispatchRequest, now: float) -> bool:
        """Whether there is a replica that a request can wait for."""
        if not request.is_begun:
            return self.has_untried(request, now)
        return any(one.serves(request.model) and _may_continue(request, one) for one in self.replicas.values())

    def _take(self, now: float) -> tuple[DispatchRequest, list[Replica]] | None:
        """Remove the next waiting request that can go from its queue, with the replicas that can take it."""
        if not (free := self._free(now)):
            return None  # a thousand waiting requests cost nothing while all replicas are busy
        ready: dict[_Kind, list[Replica]] = {}

        def can_go(request: DispatchRequest) -> bool:
            kind = _kind_of(request)
            if kind not in ready:
                ready[kind] = _ready(request, free)
            return bool(ready[kind])

        request = self.begun.take(can_go) or self.queue.take(can_go)
        return None if request is None else (request, ready[_kind_of(request)])

    def _grant(self, request: DispatchRequest, among: list[Replica]) -> Grant:
        replica = self._policy.choose(request, among)
        self._policy.granted(request, replica)
        self._grants += 1
        replica.last_granted = self._grants
        replica.in_flight += request.rows
        return Grant(request, replica, replica.breaker.begin(), self._grants)

    def _none_error(self, request: DispatchRequest, now: float) -> PhalanxError:
        serving = [replica for replica in self.replicas.values() if replica.serves(request.model)]
        if self.replicas and not serving:
            names = sorted({name for replica in self.replicas.values() for name in replica.models or ()})
            more = f" and {len(names) - MAX_NAMED} more (/v1/models)" if len(names) > MAX_NAMED else ""
            served = ", ".join(names[:MAX_NAMED]) + more or "none"
            return UnknownModel(
                f"The model {str(request.model)[:200]!r} is not served here. Served are: {served}.",
                param="model",
                code="model_not_found",
            )
        reasons = [
            f"{replica.name}: {replica.reason(now) or _why_not(request, replica)}" for replica in serving[:MAX_NAMED]
        ]
        more = f"; and {len(serving) - MAX_NAMED} more" if len(serving) > MAX_NAMED else ""
        why = "; ".join(reasons) or "there is none"
        return NoReplica(f"No replica can take the request ({why}{more}).", retry_after=2.0)

    def _full_error(self, now: float) -> QueueFull:
        return QueueFull(
            f"All replicas are busy, and {len(self.queue)} of {self.queue.capacity} places to wait are taken "
            "(--queue-size).",
            retry_after=self._rate.seconds_until(len(self.queue) + 1, now),
        )

    def _late_error(self, request: DispatchRequest, now: float) -> PhalanxError:
        if request.is_begun and not self.has_untried(request, now):
            return self._none_error(request, now)
        return QueueFull(
            "No replica became free in the time that a request may wait (--queue-timeout-secs).",
            retry_after=self._rate.seconds_until(len(self.queue) + 1, now),
        )


def _kind_of(request: DispatchRequest) -> _Kind:
    if not (request.tried or request.refused):  # nearly always
        return request.model, request.determinism_key
    return request.model, request.determinism_key, frozenset(request.tried), frozenset(request.refused)


def _ready(request: DispatchRequest, free: list[Replica]) -> list[Replica]:
    """The free replicas that can take a request; for a begun stream, those of its determinism key if there are any."""
    able = [replica for replica in free if _may_get(request, replica)]
    exact = [
        replica for replica in able if request.is_begun and replica.health.determinism_key == request.determinism_key
    ]
    return exact or able


def _may_get(request: DispatchRequest, replica: Replica) -> bool:
    """Whether a replica serves a request and has not failed it (a begun stream: not since the last good check)."""
    if not replica.serves(request.model):
        return False
    if not request.is_begun:
        return replica.name not in request.tried
    return _may_continue(request, replica) and not (replica.needs_check and replica.name in request.tried)


def _may_continue(request: DispatchRequest, replica: Replica) -> bool:
    """Whether a replica can continue a begun stream once it is available, as far as is known."""
    return replica.can_migrate and replica.name not in request.refused


def _why_not(request: DispatchRequest, replica: Replica) -> str:
    """Why an available replica does not get this request."""
    can = not request.is_begun or _may_continue(request, replica)
    return "has failed this request" if can else "cannot continue the stream"
