"""One request before simulated servers: what `failover.py` decides is done without a network.

The servers write what `TokenReplica` writes, so that what passes can be compared with `undisturbed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.token_replica import MEDIA, Piece, Writer, start_of

from phalanx.errors import NoReplica, PhalanxError, ReplicaFailed
from phalanx.gateway.dispatch.breaker import BreakerRules
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Dispatcher, Grant, Verdict
from phalanx.gateway.dispatch.policies import LeastLoad
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.replica_health import Check, HealthReport, HealthRules, ReplicaLoad
from phalanx.gateway.dispatch.retries import RetryBudget
from phalanx.gateway.relay.api_kinds import dialect_of
from phalanx.gateway.relay.event_reader import EventReader
from phalanx.gateway.relay.failover import Failover
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.traffic import BufferedResponse, Traffic
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.gateway.settings.replicas_file import ReplicaSpec
from phalanx.http.stream_records import StreamRecord, framed

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "stream": true}'
CLOSING = NoReplica("The gateway is shutting down.")


class Places(Dispatcher):
    """Notes what becomes of places. One that is given back twice is a ValueError."""

    def __init__(self, actions: list[str]) -> None:
        super().__init__(LeastLoad(), queue_size=4)
        self.actions = actions
        self.held: list[Grant] = []

    def _grant(self, request: DispatchRequest, among: list[Replica]) -> Grant:
        self.held.append(super()._grant(request, among))
        return self.held[-1]

    def end(self, grant: Grant, verdict: Verdict, now: float) -> None:
        self.held.remove(grant)
        self.actions.append(f"{grant.replica.name} {verdict}")
        super().end(grant, verdict, now)

    def blame(self, grant: Grant, now: float) -> None:
        assert grant not in self.held
        self.actions.append(f"blame {grant.replica.name}")
        super().blame(grant, now)


class Counts(GatewayMetrics):
    """Notes what is counted but for attempts, which places have."""

    def __init__(self, dispatcher: Places) -> None:
        super().__init__(dispatcher)
        self.actions = dispatcher.actions

    def retried(self, replica: str) -> None:
        self.actions.append(f"retry after {replica}")

    def migrated(self, replica: str, outcome: str) -> None:
        self.actions.append(f"move from {replica} {outcome}")


class Tokens(RetryBudget):
    taken = 0

    def take(self, now: float) -> bool:
        is_taken = super().take(now)
        self.taken += is_taken
        return is_taken


class World:
    """One request before three simulated servers, of which c cannot continue streams. `client` is what passed.

    Args:
        kind: the machine.
    """

    def __init__(self, kind: type[Failover] = Failover, path: str = CHAT, **settings: Any) -> None:
        self.path, self.now, self.actions, self.client = path, 0.0, list[str](), b""
        self.places = Places(self.actions)
        for name in "abc":
            spec = ReplicaSpec(name=name, url=f"http://{name}", admin_key="k" if name < "c" else None)
            one = Replica(spec, HealthRules(2, 1), BreakerRules(failures=3, successes=1, open_s=5.0))
            self.places.add(one)
            self.check(one, ok=True)
        self.tokens = Tokens(0.2)
        config = GatewayConfig(**settings)
        self.request = DispatchRequest("", "m", config.queue_timeout_secs)
        self.failover = kind(
            request=self.request,
            config=config,
            dispatcher=self.places,
            metrics=Counts(self.places),
            budget=self.tokens,
            random=lambda: 0.5,
            deadline=config.request_timeout_secs,
            may_stream=True,
        )
        self.under_way: Traffic | None = None  # for which `pieces` are
        self.pieces: Iterator[Piece] = iter(())
        self.cut: PhalanxError | None = None

    def check(self, one: Replica, *, ok: bool, answered: bool = True) -> None:
        """A health check has ended. In a table replica c is another vendor's server."""
        report = HealthReport(ReplicaLoad(0, 0, 2), "n" if one.name < "c" else "")
        one.health.note(Check(ok=ok, answered=answered, report=report), self.now, self.now)
        one.is_suspect &= not ok
        one.needs_check &= not ok

    @property
    def traffic(self) -> Traffic:
        """Of the attempt; what is sent for it is decided when it begins."""
        traffic = self.failover.traffic
        assert traffic is not None
        if traffic is not self.under_way:
            known = self.failover.resume(self.now)
            start = known.start if known is not None else start_of(BODY, "n")
            self.under_way, self.cut = traffic, None
            self.pieces = Writer(self.path, BODY, start, known).pieces()
        return traffic

    def tell(self, record: StreamRecord, data: bytes = b"") -> None:
        """Bytes of the stream come, and pass where they may."""
        traffic, lines = self.traffic, self.path in MEDIA
        traffic.is_sent = traffic.has_begun = True
        if traffic.reader is None:
            traffic.reader = EventReader(dialect_of(self.path), lines=lines, transcript=traffic.transcript)
        whole = traffic.reader.feed(data + (framed(record, lines=lines) if traffic.transcript is not None else b""))
        assert not traffic.reader.fault
        traffic.last_byte = self.now
        if whole:
            is_first, traffic.passed_at = traffic.passed_at is None, self.now
            self.client += whole
            if is_first:
                self.failover.first_byte(self.now)

    def piece(self) -> None:
        """The next piece comes, or nothing more."""
        traffic = self.traffic
        if (piece := next(self.pieces, None)) is not None:
            is_start = traffic.transcript is not None and traffic.transcript.start is None
            self.tell(StreamRecord(start=start_of(BODY, "n") if is_start else None, choices=piece.choices), piece.data)

    def half_a_piece(self) -> None:
        """Its rest never comes."""
        traffic = self.traffic
        if (piece := next(self.pieces, None)) is not None and traffic.reader is not None:
            assert traffic.reader.feed(piece.data[:10]) == b""

    def breaks(self, error: PhalanxError | None = None) -> None:
        traffic = self.traffic
        traffic.is_sent |= not traffic.is_unreachable
        self.failover.broke_off(
            error or ReplicaFailed(f"The replica {traffic.grant.replica.name} broke off."), self.now
        )

    def answers(self, status: int, body: bytes = b"", *, is_final: bool = False) -> None:
        self.traffic.is_sent = self.traffic.has_begun = True
        self.failover.answered(BufferedResponse(status, {}, body, is_final), self.now)

    def tick(self) -> None:
        if (error := self.failover.tick(self.now)) is not None:
            self.actions.append(f"cut: {error}")
            self.cut = error

    def close(self) -> None:
        self.failover.gateway_end = self.cut = CLOSING
