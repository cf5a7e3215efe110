"""One replica as dispatch sees it: what it serves, how busy it is, whether it may get a request."""

from __future__ import annotations

from phalanx.gateway.dispatch.breaker import Breaker, BreakerRules
from phalanx.gateway.dispatch.replica_health import HealthRules, ReplicaHealth
from phalanx.gateway.settings.replicas_file import ReplicaSpec
from phalanx.http.model_lists import TAG

VIA = "1.1 phalanx"
"""Via header of a gateway's requests: a server on its machine must not take them for those of a local program."""
ALONE = 1
"""Limit of a server that reports none, such as LM Studio or llama.cpp's server."""


class Replica:
    """See the module's docstring. Used only on the event loop's thread."""

    def __init__(self, spec: ReplicaSpec, health: HealthRules, breaker: BreakerRules) -> None:
        self.spec = spec
        self.name = spec.name
        self.health = ReplicaHealth(health)
        self.breaker = Breaker(breaker)
        self.models: frozenset[str] | None = None  # None: it lists none, so it may serve any
        self.cards: list[dict[str, object]] = []  # entries of its /v1/models
        self.in_flight = 0  # requests of this gateway; each choice counts as one, as in /health
        self.others = 0  # requests of other clients, as of the last check
        self.is_suspect = False  # a failure counted against it; the next answer or good check clears it
        self.needs_check = False  # it failed a request, whatever the cause; cleared like `is_suspect`
        self.failed_at = 0  # grants of all replicas when its last failure was counted
        self.refused_key: str | None = None  # an admin key that it does not accept
        self.is_draining = False  # no new requests
        self.is_removed = False  # its running requests continue
        self.last_granted = 0  # number of the grant
        self.turn = 0.0  # of round_robin

    @property
    def limit(self) -> int:
        """Most concurrent requests."""
        if self.spec.max_in_flight is not None:
            return self.spec.max_in_flight
        return self.health.load.limit if self.health.load is not None else ALONE

    @property
    def has_room(self) -> bool:
        """Whether it may get one more request now."""
        return self.in_flight < self.limit

    def has_room_for(self, rows: int) -> bool:
        """Whether it has room for so many rows, or runs none, so that it computes as many of them at once as it can."""
        return self.in_flight + rows <= self.limit or not self.in_flight

    @property
    def busy(self) -> int:
        """Requests that it runs or queues, of this gateway and of others."""
        return self.in_flight + self.others

    @property
    def load(self) -> float:
        """Busy fraction of its limit, divided by its weight."""
        return self.busy / (self.limit * self.spec.weight)

    @property
    def is_degraded(self) -> bool:
        """It may get requests, but others are preferred."""
        return self.is_suspect or self.health.is_degraded or not self.breaker.is_closed

    @property
    def admin_key(self) -> str | None:
        """Its admin key if it is a phalanx server that accepts it; other servers see nothing made with the key."""
        key = self.spec.admin_key
        return key if self.health.determinism_key and key != self.refused_key else None

    @property
    def can_migrate(self) -> bool:
        """Whether its streams can move to other replicas, and theirs to it."""
        return self.admin_key is not None

    def serves(self, model: str | None) -> bool:
        """Whether it serves this model, as far as known; None is any model."""
        models = self.models
        return model is None or models is None or model in models or model.removesuffix(TAG) in models

    def is_available(self, now: float) -> bool:
        """Whether it may get requests at all, room or not."""
        return self.health.state == "up" and not self.is_draining and self.breaker.allows(now)

    def reason(self, now: float) -> str:
        """Why it is not available; empty if it is."""
        if self.health.state != "up":
            return self.health.reason
        if self.is_draining:
            return "is being drained"
        return self.breaker.reason(now)

    def note_load(self, own: int) -> None:
        """Take in the figures of a check's /health.

        Args:
            own: this gateway's requests on it when the check began.
        """
        load = self.health.load
        self.others = max(0, load.running + load.waiting - own) if load is not None else 0
