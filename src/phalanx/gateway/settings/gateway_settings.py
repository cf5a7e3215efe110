"""Settings of `phalanx gateway`. Flags have the names that SMG's and vLLM's routers share, where those have the flag.

Does not know the files of replicas and keys (`replicas_file.py`, `keys_file.py`).
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
MIGRATION_LIMIT = 3  # as many replicas may die of other causes within one answer; a fourth is suspicious


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Settings of the gateway's process."""

    host: Annotated[str, Flag("HTTP")] = "127.0.0.1"
    """Address to bind; with the default, other machines do not reach the gateway."""
    port: Annotated[int, Meta(ge=0, le=65535), Flag("HTTP")] = GATEWAY_PORT
    """TCP port; 0 picks a free one, which is printed."""
    api_key: Annotated[
        tuple[str, ...],
        Flag("HTTP", default="no key is needed, but for those of --keys", variable=API_KEY_VARIABLE, is_key=True),
    ] = ()
    """A key clients must send, without limits of its own; may be repeated."""
    allowed_hosts: Annotated[tuple[str, ...], Flag("HTTP")] = ()
    """Without keys: name in clients' Host header besides this machine's own, or `*` for all; may be repeated. Others
    are refused: a web page could ask under a name of its own."""
    keys: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """TOML file of keys with limits each; read again when it changes."""
    admin_key: Annotated[str | None, Flag("HTTP", variable=GATEWAY_ADMIN_KEY_VARIABLE, is_key=True)] = None
    """Key of /admin; without it there is none."""
    ssl_certfile: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """Certificate chain (PEM): the gateway speaks HTTPS."""
    ssl_keyfile: Annotated[str | None, Flag("HTTP", is_file=True)] = None
    """Its private key, unless it is in the same file."""
    prometheus_port: Annotated[int | None, Meta(ge=0, le=65535), Flag("HTTP", default="the same port")] = None
    """Serve /metrics at this port of the same address only."""
    metrics_open: Annotated[bool, Flag("HTTP")] = False
    """/metrics needs no key, where the rest does; at either port."""
    max_body_mb: Annotated[float, Meta(ge=0.001, le=1024), Flag("Limits")] = 8.0
    """Largest request, MiB."""
    max_connections: Annotated[Count | None, Flag("Limits", default="twice --queue-size, 1,024 at least")] = None
    """Connections of clients, at most."""
    max_connections_per_address: Annotated[Count | None, Flag("Limits", default="half of all")] = None
    """Of them, from one IPv4 address or IPv6 /64 network (a proxy is one)."""
    queue_size: Annotated[int, Meta(ge=0), Flag("Limits")] = 1024  # benchmarks send 512 at once
    """Requests that may wait for a replica; one more is a 429."""
    queue_timeout_secs: Annotated[Seconds, Flag("Limits")] = 600.0  # OpenAI's clients wait as long
    """Longest wait for a replica, seconds; then a 429. A stream that has lost its replica waits for 60 at most."""
    request_timeout_secs: Annotated[Seconds, Flag("Limits")] = 1800.0
    """Longest time from a request's arrival to the end of its answer, seconds."""
    stream_timeout_secs: Annotated[Seconds, Flag("Limits")] = 60.0
    """Seconds without a byte after which a begun answer has failed. phalanx sends a comment every five."""
    shutdown_grace_period_secs: Annotated[Size, Flag("Limits")] = 30.0
    """Seconds for running requests after SIGTERM."""

    worker_urls: Annotated[tuple[str, ...], Flag("Replicas")] = ()
    """Base URL of a replica, with or without /v1; may be repeated, or several with commas or blanks."""
    replicas: Annotated[str | None, Flag("Replicas", is_file=True)] = None
    """TOML file of replicas instead; read again when it changes."""
    worker_key: Annotated[
        str | None,
        Flag(
            "Replicas", default="clients' own, if the gateway asks for none", variable=WORKER_KEY_VARIABLE, is_key=True
        ),
    ] = None
    """Key that replicas get, unless their file says another."""
    worker_admin_key: Annotated[
        str | None,
        Flag(
            "Replicas",
            default="streams end with their replica, to which all clients are one",
            variable=WORKER_ADMIN_KEY_VARIABLE,
            is_key=True,
        ),
    ] = None
    """--admin-key of replicas, unless their file says another: with it their streams can go on elsewhere, and they
    keep clients with different keys apart."""
    worker_ca: Annotated[str | None, Flag("Replicas", is_file=True, default="the system's")] = None
    """Certificates (PEM) of authorities, or of https replicas themselves."""
    policy: Annotated[PolicyName, Flag("Replicas")] = "least_load"
    """Which replica gets a request."""
    model_aliases: Annotated[tuple[str, ...], Flag("Replicas", metavar="ALIAS=MODEL")] = ()
    """Another name by which clients may ask for a model; may be repeated."""
    cache_threshold: Annotated[float, Meta(ge=0.0, le=1.0), Flag("Replicas")] = 0.3
    """cache_aware: least part of a prompt (0 to 1), from its beginning, that a replica must have had."""
    balance_abs_threshold: Annotated[int, Meta(ge=0), Flag("Replicas")] = 4
    """cache_aware: a replica with so many requests more than the least busy one is too busy."""
    balance_rel_threshold: Annotated[float, Meta(ge=1.0), Flag("Replicas")] = 1.5
    """cache_aware: a replica that is too busy also has so many times the requests of the least busy one."""

    health_check_endpoint: Annotated[str, Flag("Health checks")] = "/health"
    """Path that answers 200 if a replica can serve; where it is a 404, /v1/models is asked instead."""
    health_check_interval_secs: Annotated[Seconds, Flag("Health checks")] = 5.0
    """Seconds between the end of a check and the next one."""
    health_check_timeout_secs: Annotated[Seconds, Flag("Health checks")] = 2.0  # compiling a grammar may take one
    """Longest time of a check, and of a stream's silence meanwhile, seconds."""
    health_failure_threshold: Annotated[Count, Flag("Health checks")] = 3
    """Failed checks in a row after which a replica is down."""
    health_success_threshold: Annotated[Count, Flag("Health checks")] = 2
    """Good checks in a row after which it is up again; its very first check decides alone."""
    cb_failure_threshold: Annotated[Count, Flag("Health checks")] = 10
    """Failed requests in a row that open a replica's circuit breaker: it gets none. Those count that another replica
    answers, and those that get no connection."""
    cb_success_threshold: Annotated[Count, Flag("Health checks")] = 3
    """Trial requests that must succeed, one by one, before the circuit is closed again."""
    cb_timeout_duration_secs: Annotated[Seconds, Flag("Health checks")] = 60.0
    """Seconds that an open circuit keeps requests away."""
    cb_window_duration_secs: Annotated[Seconds, Flag("Health checks")] = 120.0
    """Seconds after which such a failure no longer counts."""

    retry_max_retries: Annotated[int, Meta(ge=0, le=100), Flag("Retries")] = 5
    """Retries of one request, before its first byte."""
    retry_budget: Annotated[float, Meta(ge=0.0, le=10.0), Flag("Retries")] = 0.2
    """Retries per request, on average over all of one key (without keys, of one address); ten a second are allowed in
    any case."""
    retry_initial_backoff_ms: Annotated[float, Meta(ge=1.0), Flag("Retries")] = 50.0
    """Pause before a replica that failed a request gets it again, ms; another one gets it at once."""
    retry_max_backoff_ms: Annotated[float, Meta(ge=1.0), Flag("Retries")] = 30000.0
    """Longest such pause, ms."""
    retry_backoff_multiplier: Annotated[float, Meta(ge=1.0), Flag("Retries")] = 1.5
    """Factor from one pause to the next."""
    retry_jitter_factor: Annotated[float, Meta(ge=0.0, le=1.0), Flag("Retries")] = 0.2
    """Part of a pause (0 to 1) by which it is longer or shorter, at random."""

    migration_limit: Annotated[int, Meta(ge=0, le=100), Flag("Retries")] = MIGRATION_LIMIT
    """Replicas that may break off under one request; 0: a begun stream ends with its replica."""
    migration_max_seq_len: Annotated[int, Meta(ge=1, le=MAX_ITEMS), Flag("Retries")] = 131072
    """Tokens, of all choices together, with which a stream can still move; a log-probability counts as one."""

    log_level: Annotated[LogLevel, Flag()] = "info"
    """Verbosity of the log on stderr."""

    @property
    def max_breaks(self) -> int:
        """Replicas that may break off under one request while another one gets it; of 0, before the first byte."""
        return self.migration_limit or MIGRATION_LIMIT

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * MIB)
