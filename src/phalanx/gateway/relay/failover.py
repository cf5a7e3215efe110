"""Decides when a request is sent, sent again or moved to another replica, and how it ends.

    queued --placed--> sending --passed_on, answered--> done
      ^                   |
      |                   +-- broke_off, or answered with an error that another replica may not have
      |                   |       before the first byte: the request is sent again
      |                   |       in a begun stream: with what its client has (`http/stream_records.py`)
      +-- backing off <---+

Each event is a method, and the state is the step that `proxy.py` has to take next: wait for a place, wait `pause_s`,
send, or answer with `result`. The dispatcher grants places and blames replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from phalanx.errors import MalformedAnswer, NoReplica, PhalanxError, ReplicaFailed
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Dispatcher, Grant, Verdict
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.retries import RetryBudget, pause
from phalanx.gateway.relay.event_reader import EventReader
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.traffic import BufferedResponse, Traffic
from phalanx.gateway.relay.transcript import Transcript
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.http.owners import OWNER
from phalanx.http.stream_records import MIGRATION, Resume

RETRIED = frozenset((408, 429, 500, 502, 503, 504))
"""Statuses for which another replica is tried."""
SUCCEEDED = range(200, 300)
FORBIDDEN = 403
NOT_FOUND = 404
FAILED = 500  # from here on an answer may be the replica's fault
MAX_GAP_S = 60.0  # failover gap, in which a begun stream waits for a replica; a server restarts its ranks in less
MIN_S = 0.01  # the least remaining time in a `Resume`
REASON_BYTES = 300  # of a replica's refusal to continue a stream, for the client's error

Result = BufferedResponse | PhalanxError
"""How an attempt failed, or a request ended."""


class Failover(Struct, eq=False, kw_only=True):
    """See the module's docstring. Queued at first; `request` changes only while it is not queued."""

    request: DispatchRequest
    config: GatewayConfig
    dispatcher: Dispatcher
    metrics: GatewayMetrics
    budget: RetryBudget
    random: Callable[[], float]  # from 0 to 1
    deadline: float  # end of the request's time
    may_stream: bool  # the answer may be a stream that can move

    state: Literal["queued", "sending", "backing off", "done"] = "queued"
    traffic: Traffic | None = None  # of the attempt under way
    pause_s: float = 0.0
    result: Result | None = None  # of the request; None: the whole answer was passed on
    stream: EventReader | None = None  # of the begun stream, once it has lost a replica
    gap_since: float | None = None  # start of the failover gap: when the last piece passed
    gap_of: str = ""  # the replica that the stream lost last
    has_begun: bool = False  # the client has a part of the answer
    successor: Grant | None = None  # another replica, to which the request moves when its attempt has ended
    attempts: int = 0  # failed ones
    breaks: int = 0  # attempts that broke off; `max_breaks` limits them
    losses: list[str] = []  # why each replica lost or refused the begun stream, for the client's error
    moves: int = 0  # times that the begun stream has lost its replica
    not_found: int = 0  # replicas that answered 404
    unblamed: list[Grant] = []  # failed attempts for which the request may be the cause
    met_stale: bool = False  # an idle connection has failed it, so further attempts open new ones
    last: Result | None = None  # of the last failed attempt
    gateway_end: PhalanxError | None = None  # the gateway is closing: no further attempt begins

    # Events ----------------------------------------------------------------------------------------------------

    def placed(self, grant: Grant, now: float) -> None:
        """The dispatcher has granted a replica: send the request there."""
        if self.gateway_end is not None:
            self.dispatcher.end(grant, "cancelled", now)
            self._end(self.gateway_end, now)
            return
        transcript = None
        if self.stream is not None:
            self.stream.begin_again()
            transcript = self.stream.transcript
        elif self.may_stream and self.config.migration_limit and grant.replica.can_migrate:
            transcript = Transcript(self.config.migration_max_seq_len)
        self.state = "sending"
        self.traffic = Traffic(grant, grant.replica.admin_key, transcript, now, self.stream)

    def resume(self, now: float) -> Resume | None:
        """The `Resume` for the replica that continues the stream; None if no stream has begun."""
        if self.stream is None:
            return None
        assert self.stream.transcript is not None, "a stream without records cannot move"
        left = max(MIN_S, self.deadline - now)
        return self.stream.transcript.resume(next_number=self.stream.next_number, timeout_s=left, moves=self.moves)

    def place_refused(self, error: PhalanxError, now: float) -> None:
        """No replica can take the request. Retry after a pause if one that has failed it may be back."""
        if self.has_begun or not isinstance(error, NoReplica):
            self._end(error, now)
        elif not (self.request.tried and self._may_retry(now)):
            self._end(self.last if isinstance(self.last, BufferedResponse) else error, now)

    def pause_over(self, now: float) -> None:
        """The back-off is over: replicas that have failed the request may be asked again."""
        if self.has_begun:
            self._move(now)
        else:
            self.request.tried.clear()
            self.request.give_up_at += self.pause_s
            self._next(now)

    def first_byte(self, now: float) -> None:
        """The attempt's first byte was handed to the network."""
        self._blame_failures(now)
        self._close_gap("continued")

    def passed_on(self, now: float) -> None:
        """The answer was passed on to its end."""
        self._release("answered", now)
        self._done("continued", now)

    def answered(self, answer: BufferedResponse, now: float) -> None:
        """A whole answer has come; none of it was sent to the client."""
        if answer.status in SUCCEEDED:
            self._blame_failures(now)
        has_failed = answer.status >= FAILED
        traffic = self._release("failed" if has_failed else "answered", now)
        replica = traffic.grant.replica
        if has_failed:
            self.unblamed.append(traffic.grant)
        if traffic.admin_key is not None and _refuses_key(answer):
            replica.refused_key = traffic.admin_key
            if not self.has_begun:
                self._next(now)
                return
        self._note_failure(replica, answer)
        if not self.has_begun and self._is_worth_retrying(answer, now):
            self._retry(replica, now)
        elif not self.has_begun:
            self._end(answer, now)
        elif answer.status in RETRIED and self.successor is None:
            self.state, self.pause_s = "backing off", pause(self.config, self.attempts, self.random)
        else:
            if answer.status not in RETRIED:
                self.request.refused.add(replica.name)
                why = " ".join(answer.body[:REASON_BYTES].decode("utf-8", "replace").split())
                self.losses.append(f"The replica {replica.name} does not continue it: {answer.status} {why}")
            self._move(now)

    def broke_off(self, error: PhalanxError, now: float) -> None:
        """The attempt has broken off, or the gateway has cut it."""
        traffic = self._release("failed", now)
        replica = traffic.grant.replica
        self.met_stale |= traffic.is_stale
        if traffic.is_unreachable:
            self.dispatcher.blame(traffic.grant, now)
        elif not (traffic.is_stale or traffic.client_was_slow):
            self.unblamed.append(traffic.grant)
        if traffic.is_sent or self.successor is not None:
            self.breaks += not replica.is_removed  # a removed one did not break off because of the request
            if self.has_begun:
                self._note_loss(traffic, error, now)
        self._note_failure(replica, error)
        if self.has_begun:
            self._move(now)
        else:
            self._retry(replica, now)

    def tick(self, now: float) -> PhalanxError | None:
        """Check the running attempt. Returns the error with which to end it: its replica is silent, or makes no
        progress and another one could.
        """
        traffic = self.traffic
        if traffic is None or traffic.is_relaying:
            return None
        why = traffic.silence(self.config.stream_timeout_secs, now)
        if not why and (why := traffic.standstill(self.config.health_check_timeout_secs, now)):
            why = why if self._reserve(traffic, now) else ""
        return ReplicaFailed(f"The replica {traffic.grant.replica.name} {why}.") if why else None

    def client_gone(self, now: float) -> None:
        """The client left before the request was done, in any state."""
        if self.traffic is not None:
            self._release("cancelled", now)
        self._done("cancelled", now)

    # The next step ---------------------------------------------------------------------------------------------

    def _next(self, now: float) -> None:
        """Begin the next attempt."""
        if self.gateway_end is not None:
            self._end(self.gateway_end, now)
        elif self.successor is not None:
            grant, self.successor = self.successor, None
            self.placed(grant, now)
        else:
            self.state = "queued"

    def _retry(self, replica: Replica, now: float) -> None:
        """Send the request again (its answer has not begun), or end it."""
        assert self.last is not None
        if self.gateway_end is None and (self.successor is not None or self._may_retry(now)):
            self.metrics.retried(replica.name)
            self.request.give_up_at = now + self.config.queue_timeout_secs
            if self.successor is not None:
                self._next(now)
        else:
            self._end(self.last, now)

    def _may_retry(self, now: float) -> bool:
        """Whether to retry: at once if another replica can take the request, else after a pause."""
        if self.gateway_end is not None or self.attempts > self.config.retry_max_retries or self._limit_reached:
            return False
        is_elsewhere = self.dispatcher.has_untried(self.request, now)
        self.pause_s = 0.0 if is_elsewhere else pause(self.config, self.attempts, self.random)
        if now + self.pause_s >= self.deadline or not self.budget.take(now):
            return False
        self.state = "queued" if is_elsewhere else "backing off"
        return True

    def _move(self, now: float) -> None:
        """Move a begun stream to another replica, or end it."""
        assert self.last is not None
        is_lost = isinstance(self.last, (BufferedResponse, ReplicaFailed, MalformedAnswer))  # else its time is over
        can_move = is_lost and self.stream is not None and self.stream.can_go_on and not self._limit_reached
        if can_move and now < self.request.give_up_at:
            self._next(now)
        else:
            self._end(self.last, now)

    def _end(self, result: Result, now: float) -> None:
        """End the request without another attempt."""
        self._done("failed", now)
        if self.has_begun:
            self.result = None if self.stream is not None and self.stream.ended else self._error(result)
        elif isinstance(result, BufferedResponse) and result.fault:
            self.result = ReplicaFailed(result.fault)
        else:
            self.result = result

    def _error(self, why: Result) -> PhalanxError:
        """The client's error: how the stream lost each replica, and why no other continues it."""
        parts = list(self.losses)
        if isinstance(why, PhalanxError) and str(why) not in parts:
            parts.append(str(why))
        if self._limit_reached and self.stream is not None and self.stream.can_go_on:
            limit = self.config.max_breaks
            parts.append(f"It is not moved again: perhaps it makes replicas fail (--migration-limit {limit}).")
        return why if isinstance(why, PhalanxError) and len(parts) == 1 else ReplicaFailed(" ".join(parts))

    # Parts of events ------------------------------------------------------------------------------------------

    @property
    def _limit_reached(self) -> bool:
        """Whether so many replicas have broken off that this request may be the cause."""
        return self.breaks > self.config.max_breaks

    def _release(self, verdict: Verdict, now: float) -> Traffic:
        """The attempt is over. Returns its traffic."""
        assert self.traffic is not None
        traffic, self.traffic = self.traffic, None
        self.has_begun = self.has_begun or traffic.passed_at is not None
        self.metrics.attempted(traffic.grant.replica.name, verdict)
        self.dispatcher.end(traffic.grant, verdict, now)
        return traffic

    def _done(self, outcome: str, now: float) -> None:
        self.state = "done"
        self._close_gap(outcome)
        if self.successor is not None:
            self.dispatcher.end(self.successor, "cancelled", now)
            self.successor = None

    def _close_gap(self, outcome: str) -> None:
        if self.gap_since is not None:
            self.metrics.migrated(self.gap_of, outcome)
            self.gap_since = None

    def _blame_failures(self, now: float) -> None:
        """Count earlier failures against their replicas: one that answers shows that the request was not the cause."""
        for grant in self.unblamed:
            self.dispatcher.blame(grant, now)
        self.unblamed.clear()

    def _note_failure(self, replica: Replica, result: Result) -> None:
        self.last = result
        if not replica.is_removed:  # else a new replica may have its name already
            self.request.tried.add(replica.name)
            self.attempts += 1

    def _is_worth_retrying(self, answer: BufferedResponse, now: float) -> bool:
        """Whether another attempt may get a better answer. Called once for each answer: it counts 404s."""
        if answer.status == NOT_FOUND and self.request.model is not None:  # the replica may serve another model now
            self.not_found += 1  # a second one may mean the path
            return self.not_found == 1 and self.dispatcher.has_untried(self.request, now)
        return answer.status in RETRIED and not answer.is_final

    def _note_loss(self, traffic: Traffic, error: PhalanxError, now: float) -> None:
        """Record that a begun answer has lost its replica."""
        name, self.stream = traffic.grant.replica.name, traffic.reader
        if self.stream is not None and self.stream.ended:
            return
        self.losses.append(str(error))
        self.metrics.broken(name)
        if traffic.can_move:
            since = self.gap_since if self.gap_since is not None else traffic.passed_at
            self._close_gap("failed")
            self.gap_since, self.gap_of = since, name
            self.moves += 1
            self.request.give_up_at = now + min(self.config.queue_timeout_secs, MAX_GAP_S)
            self._require_compatible(traffic)

    def _require_compatible(self, traffic: Traffic) -> None:
        """Restrict further grants to replicas that can continue this one's stream."""
        models = traffic.grant.replica.models
        if traffic.transcript is not None:
            self.request.determinism_key = traffic.transcript.determinism_key
        if self.request.model is None and models:
            self.request.model = min(models)  # the request names no model, and only this one can continue its tokens

    def _reserve(self, traffic: Traffic, now: float) -> bool:
        """Reserve another replica for a request whose own makes no progress. The request stays if none is free, or if
        one more break would exceed the limit: the server itself quarantines a request that crashes its engine.
        """
        if self.successor is None and self.gateway_end is None and self.breaks < self.config.max_breaks:
            if self.has_begun or traffic.passed_at is not None:
                self._require_compatible(traffic)
            self.successor = self.dispatcher.elsewhere(self.request, traffic.grant.replica, now)
            return self.successor is not None
        return False


def _refuses_key(answer: BufferedResponse) -> bool:
    body = answer.body.lower()
    return answer.status == FORBIDDEN and any(name.encode() in body for name in (MIGRATION, OWNER))
