"""Settings of `phalanx gateway`. Flags have the names that SMG's and vLLM's routers share, where those have the flag.

`replicas_file.py` and `keys_file.py` parse the files of replicas and keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.config import GATEWAY_PORT, MIB, Count, Flag, LogLevel, Size
from phalanx.environment import (
    API_KEY_VARIABLE,
    GATEWAY_ADMIN_KEY_VARIABLE,
    WORKER_ADMIN_KEY_VARIABLE,
    WORKER_KEY_VARIABLE,
)
from phalanx.http.stream_records import MAX_ITEMS

PolicyName = Literal["least_load", "cache_aware", "power_of_two", "round_robin", "consistent_hashing"]
Seconds = Annotated[float, Meta(ge=0.05)]
MIGRATION_LIMIT = 3  # so many replicas may fail by chance during one answer; a fourth points at the request


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Settings of the gateway's process."""

    host: Annotated[str, Flag("HTTP")] = "127.0.0.1"
    """Address to bind; the default accepts connections from this machine only."""
    port: Annotated[int, Meta(ge=0, le=65535), Flag("HTTP")] = GATEWAY_PORT
    """TCP port; 0 picks a free one, which is printed."""
    api_key: Annotated[
        tuple[str, ...],
        Flag("HTTP", default="no key is needed, but for those of --keys", variable=API_KEY_VARIABLE, is_key=True),
    ] = ()
    """A key clients must send, without limits of its own; may be repeated."""
    allowed_hosts: Annotated[tuple[str, ...], Flag("HTTP")] = ()
    """Without keys: name in clients' Host header besides this machine's own, or `*` for all; may be repeated. Others
    are refused: a web page could use a name of its own."""
    keys: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """TOML file of API keys with their limits; reloaded when it changes."""
    admin_key: Annotated[str | None, Flag("HTTP", variable=GATEWAY_ADMIN_KEY_VARIABLE, is_key=True)] = None
    """Key of the admin API at /admin, which is off without it."""
    ssl_certfile: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """Certificate chain (PEM); enables HTTPS."""
    ssl_keyfile: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """Its private key, unless it is in the same file."""
    prometheus_port: Annotated[int | None, Meta(ge=0, le=65535), Flag("HTTP", default="the same port")] = None
    """Serve /metrics at this port of the same address instead."""
    metrics_open: Annotated[bool, Flag("HTTP")] = False
    """Serve /metrics without a key, at either port."""
    max_body_mb: Annotated[float, Meta(ge=0.001, le=1024), Flag("Limits")] = 8.0
    """Largest request, MiB."""
    max_connections: Annotated[Count | None, Flag("Limits", default="twice --queue-size, 1,024 at least")] = None
    """Connections of clients, at most."""
    max_connections_per_address: Annotated[Count | None, Flag("Limits", default="half of all")] = None
    """Connections from one IPv4 address or IPv6 /64 network, at most; a proxy is one address."""
    queue_size: Annotated[int, Meta(ge=0), Flag("Limits")] = 1024  # benchmarks send 512 at once
    """Requests that may wait for a replica; further ones get a 429."""
    queue_timeout_secs: Annotated[Seconds, Flag("Limits")] = 600.0  # OpenAI's clients wait as long
    """Longest wait for a replica, seconds; then a 429. A stream that has lost its replica waits 60 s at most."""
    request_timeout_secs: Annotated[Seconds, Flag("Limits")] = 1800.0
    """Longest time from a request's arrival to the end of its answer, seconds."""
    stream_timeout_secs: Annotated[Seconds, Flag("Limits")] = 60.0
    """Seconds without a byte after which a begun answer counts as failed; phalanx sends a comment every 5 s."""
    shutdown_grace_period_secs: Annotated[Size, Flag("Limits")] = 30.0
    """Seconds that running requests have to finish after SIGTERM."""

    worker_urls: Annotated[tuple[str, ...], Flag("Replicas")] = ()
    """Base URL of a replica, with or without /v1; may be repeated, or separated by commas or blanks."""
    replicas: Annotated[str | None, Flag("Replicas", is_file=True)] = None
    """TOML file of replicas, in place of --worker-urls; reloaded when it changes."""
    worker_key: Annotated[
        str | None,
        Flag(
            "Replicas", default="clients' own, if the gateway asks for none", variable=WORKER_KEY_VARIABLE, is_key=True
        ),
    ] = None
    """API key sent to replicas, unless --replicas names another."""
    worker_admin_key: Annotated[
        str | None,
        Flag(
            "Replicas",
            default="streams end with their replica, and replicas see all clients as one",
            variable=WORKER_ADMIN_KEY_VARIABLE,
            is_key=True,
        ),
    ] = None
    """--admin-key of the replicas, unless --replicas names another: their streams can then move to other replicas,
    and they keep clients with different keys apart."""
    worker_ca: Annotated[str | None, Flag("Replicas", is_file=True, default="the system's")] = None
    """Certificates (PEM) of the authorities of https replicas, or of the replicas themselves."""
    policy: Annotated[PolicyName, Flag("Replicas")] = "least_load"
    """Which replica gets a request."""
    model_aliases: Annotated[tuple[str, ...], Flag("Replicas", metavar="ALIAS=MODEL")] = ()
    """Further name for a model; may be repeated."""
    cache_threshold: Annotated[float, Meta(ge=0.0, le=1.0), Flag("Replicas")] = 0.3
    """cache_aware: least fraction of a prompt (0 to 1), from its beginning, that a replica must have seen before."""
    balance_abs_threshold: Annotated[int, Meta(ge=0), Flag("Replicas")] = 4
    """cache_aware: a replica is too busy with more than this many requests above the least busy one ..."""
    balance_rel_threshold: Annotated[float, Meta(ge=1.0), Flag("Replicas")] = 1.5
    """cache_aware: ... and more than this many times the requests of the least busy one."""

    health_check_endpoint: Annotated[str, Flag("Health checks")] = "/health"
    """Path that returns 200 if a replica can serve; where it returns 404, /v1/models is checked instead."""
    health_check_interval_secs: Annotated[Seconds, Flag("Health checks")] = 5.0
    """Seconds between the end of a check and the next one."""
    health_check_timeout_secs: Annotated[Seconds, Flag("Health checks")] = 2.0  # compiling a grammar may take one
    """Timeout of a check, seconds; a stream that is silent as long meanwhile may move."""
    health_failure_threshold: Annotated[Count, Flag("Health checks")] = 3
    """Failed checks in a row after which a replica is down."""
    health_success_threshold: Annotated[Count, Flag("Health checks")] = 2
    """Good checks in a row after which it is up again; its very first check decides alone."""
    cb_failure_threshold: Annotated[Count, Flag("Health checks")] = 10
    """Consecutive failed requests that open a replica's circuit breaker, so that it gets none. A failure counts if
    another replica answers the request, or if the replica gave no connection."""
    cb_success_threshold: Annotated[Count, Flag("Health checks")] = 3
    """Trial requests that must succeed, one at a time, to close the circuit again."""
    cb_timeout_duration_secs: Annotated[Seconds, Flag("Health checks")] = 60.0
    """Seconds for which an open circuit keeps requests away."""
    cb_window_duration_secs: Annotated[Seconds, Flag("Health checks")] = 120.0
    """Seconds after which such a failure no longer counts."""

    retry_max_retries: Annotated[int, Meta(ge=0, le=100), Flag("Retries")] = 5
    """Retries of one request, at most, before the first byte of its answer."""
    retry_budget: Annotated[float, Meta(ge=0.0, le=10.0), Flag("Retries")] = 0.2
    """Retries per request, averaged over the requests of one key (without keys, of one address); ten a second are
    always allowed."""
    retry_initial_backoff_ms: Annotated[float, Meta(ge=1.0), Flag("Retries")] = 50.0
    """Pause before a replica that failed a request gets it again, ms; another replica gets it at once."""
    retry_max_backoff_ms: Annotated[float, Meta(ge=1.0), Flag("Retries")] = 30000.0
    """Longest such pause, ms."""
    retry_backoff_multiplier: Annotated[float, Meta(ge=1.0), Flag("Retries")] = 1.5
    """Factor from one pause to the next."""
    retry_jitter_factor: Annotated[float, Meta(ge=0.0, le=1.0), Flag("Retries")] = 0.2
    """Fraction of a pause (0 to 1) by which it varies at random."""

    migration_limit: Annotated[int, Meta(ge=0, le=100), Flag("Retries")] = MIGRATION_LIMIT
    """Replicas that may fail during one request, at most; 0: a begun stream ends with its replica."""
    migration_max_seq_len: Annotated[int, Meta(ge=1, le=MAX_ITEMS), Flag("Retries")] = 131072
    """Longest stream that can still move: tokens of all choices together; a log-probability counts as one."""

    log_level: Annotated[LogLevel, Flag()] = "info"
    """Verbosity of the log on stderr."""

    @property
    def max_breaks(self) -> int:
        """Replicas that may fail during one request while others take it over; if 0 is set, before its first byte."""
        return self.migration_limit or MIGRATION_LIMIT

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * MIB)
