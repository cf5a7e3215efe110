"""Prometheus metrics of the gateway, with the prefix `phalanx:gateway_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from phalanx.gateway.dispatch.dispatcher import Dispatcher

PREFIX = "phalanx:gateway_"
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""From the gateway's own overhead to --request-timeout-secs."""
GAUGES = {
    "up": ("replica_up", "1 while the replica may get requests."),
    "in_flight": ("replica_requests_in_flight", "Requests of this gateway on the replica; each choice is one."),
    "others": ("replica_requests_of_others", "Requests of other clients on it, as of its last health check."),
    "limit": ("replica_request_limit", "Most concurrent requests of the replica."),
}


class GatewayMetrics:
    """The gateway's metrics, in a registry of their own. Each method records one kind of event."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()
        self._dispatcher = dispatcher
        self._requests = self._counter("requests", "Answers to clients, by HTTP status.", "code")
        self._attempts = self._counter("attempts", "Attempts on replicas, by how they ended.", "replica", "verdict")
        self._retries = self._counter(
            "retries", "Requests that were sent once more, by the replica that failed.", "replica"
        )
        self._broken = self._counter("broken_streams", "Answers that broke off after their first byte.", "replica")
        self._migrations = self._counter(
            "migrations",
            "Begun streams by the replica that broke off and by outcome.",
            "replica",
            "outcome",
        )
        self._left = self._counter("clients_left", "Requests whose client left before the end of their answer.")
        self._waiting = Gauge(
            f"{PREFIX}num_requests_waiting", "Requests waiting for a replica.", registry=self.registry
        )
        self._gauges = {
            key: Gauge(PREFIX + name, text, ("replica",), registry=self.registry)
            for key, (name, text) in GAUGES.items()
        }
        self._first_byte = self._histogram(
            "time_to_first_byte_seconds", "Arrival to the first text, reasoning or call passed on to the client."
        )
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a replica, all attempts together.")
        self._gap = self._histogram("stream_gap_seconds", "From the last byte of a replica to the first of the next.")
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to the end of the answer.")

    def retried(self, replica: str) -> None:
        """A request is sent again because this replica has failed it."""
        self._retries.labels(replica).inc()

    def attempted(self, replica: str, verdict: str) -> None:
        """An attempt is over."""
        self._attempts.labels(replica, verdict).inc()

    def broken(self, replica: str) -> None:
        """An answer broke off after its first byte."""
        self._broken.labels(replica).inc()

    def migrated(self, replica: str, outcome: str) -> None:
        """A begun stream that this replica broke off was continued, has failed, or was cancelled by its client."""
        self._migrations.labels(replica, outcome).inc()

    def gap(self, seconds: float) -> None:
        """A stream continues after a failover gap of so many seconds."""
        self._gap.observe(seconds)

    def client_left(self) -> None:
        """A client left."""
        self._left.inc()

    def first_byte(self, seconds: float) -> None:
        """The first text, reasoning or call of an answer was handed to the network."""
        self._first_byte.observe(seconds)

    def answered(self, code: int) -> None:
        """A client has its answer, or has left before it."""
        self._requests.labels(str(code)).inc()

    def finished(self, seconds: float, queued_s: float) -> None:
        """A replica's answer was passed on to its end."""
        self._whole.observe(seconds)
        self._queue.observe(queued_s)

    def text(self, now: float) -> bytes:
        """Prometheus' text format."""
        self._waiting.set(self._dispatcher.n_waiting)
        for gauge in self._gauges.values():
            gauge.clear()  # replicas may have left
        for name, replica in self._dispatcher.replicas.items():
            self._gauges["up"].labels(name).set(replica.is_available(now))
            self._gauges["in_flight"].labels(name).set(replica.in_flight)
            self._gauges["others"].labels(name).set(replica.others)
            self._gauges["limit"].labels(name).set(replica.limit)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=LATENCY_S, registry=self.registry)
