"""Settings of `phalanx gateway`. Flags have the names that SMG's and vLLM's routers share, where those have the flag.

Does not know the files of replicas and keys (`replicas_file.py`, `keys_file.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.config import GATEWAY_PORT, MIB, Count, Flag, LogLevel, Size
from phalanx.edge.migration import MOST_ITEMS

PolicyName = Literal["least_load", "cache_aware", "power_of_two", "round_robin", "consistent_hashing"]
Seconds = Annotated[float, Meta(ge=0.05)]
MIGRATION_LIMIT = 3  # as many replicas may die of other causes within one answer; a fourth is suspicious


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Settings of the gateway's process."""

    host: Annotated[str, Flag("Address to bind.", "HTTP")] = "127.0.0.1"
    """Address to bind. Other machines reach the gateway only if the user gives another address than the default."""
    port: Annotated[int, Meta(ge=0, le=65535), Flag("Port; 0 picks a free one.", "HTTP")] = GATEWAY_PORT
    """TCP port; 0 picks a free one, which is printed. Not the server's default: both may run on one machine."""
    api_key: Annotated[
        tuple[str, ...],
        Flag("A key clients must send; may be repeated. Also PHALANX_API_KEY.", "HTTP"),
    ] = ()
    """Accepted keys without limits of their own. Empty, and no `keys`: no key is needed."""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag("Without keys: name in clients' Host header besides this machine's own; may be repeated.", "HTTP"),
    ] = ()
    """Further names that a Host header may have where no key is asked for: a web page could else send requests under a
    name of its own. `*` is all."""
    keys: Annotated[
        str | None, Flag("TOML file of keys with limits each; read again when it changes.", "HTTP", is_file=True)
    ] = None
    """File with keys and their limits; see `gateway/keys_file.py`."""
    admin_key: Annotated[str | None, Flag("Key of /admin; without it there is none.", "HTTP")] = None
    """Key of the admin API; None: no admin API."""
    ssl_certfile: Annotated[
        str | None, Flag("Certificate chain (PEM): the gateway speaks HTTPS.", "HTTP", is_file=True)
    ] = None
    """File with the gateway's certificate chain, PEM; None is plain HTTP."""
    ssl_keyfile: Annotated[
        str | None, Flag("Its private key, unless it is in the same file.", "HTTP", is_file=True)
    ] = None
    """File with the certificate's private key, PEM; None if `ssl_certfile` has it."""
    prometheus_port: Annotated[
        int | None, Meta(ge=0, le=65535), Flag("Serve /metrics at this port only.", "HTTP", default="the same port")
    ] = None
    """TCP port of /metrics on the same address; None: /metrics is at the gateway's own port."""
    max_body_mb: Annotated[float, Meta(ge=0.001, le=1024), Flag("Largest request, MiB.", "Limits")] = 8.0
    """Largest HTTP request body, MiB."""
    max_connections: Annotated[Count | None, Flag("Connections, at most.", "Limits", default="1,024")] = None
    """Most connections of clients at once; None is 1,024."""
    max_connections_per_address: Annotated[
        Count | None, Flag("Connections from one address, at most (a proxy is one).", "Limits", default="half of all")
    ] = None
    """Most connections from one IPv4 address or IPv6 /64 network; None is half of `max_connections`."""
    queue_size: Annotated[int, Meta(ge=0), Flag("Requests that may wait; one more is a 429.", "Limits")] = 32
    """Requests that may wait for a replica; one more is answered 429 at once."""
    queue_timeout_secs: Annotated[Seconds, Flag("Longest wait for a replica, seconds.", "Limits")] = 60.0
    """Seconds that a request may wait for a replica; then it is answered 429."""
    request_timeout_secs: Annotated[Seconds, Flag("Longest time of a request with its answer, seconds.", "Limits")] = (
        1800.0
    )
    """Seconds from a request's arrival to the end of its answer."""
    stream_timeout_secs: Annotated[
        Seconds, Flag("Seconds without a byte after which a begun answer has failed.", "Limits")
    ] = 60.0
    """Seconds without a byte of an answer that has begun. phalanx sends a comment every five."""
    shutdown_grace_period_secs: Annotated[Size, Flag("Seconds for running requests after SIGTERM.", "Limits")] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""

    worker_urls: Annotated[
        tuple[str, ...], Flag("Base URL of a replica; may be repeated, or several with commas.", "Replicas")
    ] = ()
    """Base URLs of the replicas, with or without /v1 at the end."""
    replicas: Annotated[
        str | None, Flag("TOML file of replicas instead; read again when it changes.", "Replicas", is_file=True)
    ] = None
    """File with the replicas; see `gateway/replicas_file.py`."""
    worker_key: Annotated[str | None, Flag("Key that replicas get, unless their file says another.", "Replicas")] = None
    """API key for replicas; None: clients' own keys are passed on if the gateway asks for none."""
    worker_admin_key: Annotated[
        str | None,
        Flag("Admin key of replicas, unless their file says another: with it their streams can go on elsewhere. "
             "Also PHALANX_WORKER_ADMIN_KEY.", "Replicas"),
    ] = None  # fmt: skip
    """`--admin-key` of phalanx replicas, with which they tell the gateway what another one needs to continue a stream;
    None: a stream ends with its replica."""
    worker_ca: Annotated[
        str | None, Flag("Certificates (PEM) that https replicas may have.", "Replicas", is_file=True)
    ] = None
    """File with certificates of authorities, or of replicas themselves; None: those of the system."""
    policy: Annotated[PolicyName, Flag("Which replica gets a request.", "Replicas")] = "least_load"
    """Which of the replicas that can take a request gets it; see `gateway/policies.py`."""
    model_aliases: Annotated[
        tuple[str, ...], Flag("Another name for a model; may be repeated.", "Replicas", metavar="ALIAS=MODEL")
    ] = ()
    """Names by which clients may ask for a model besides its own."""
    cache_threshold: Annotated[
        float,
        Meta(ge=0.0, le=1.0),
        Flag("cache_aware: least part of a prompt (0 to 1) that a replica must know.", "Replicas"),
    ] = 0.3
    """Part of a prompt, from its beginning, that a replica must have had for a request to be sent there for it."""
    balance_abs_threshold: Annotated[
        int,
        Meta(ge=0),
        Flag("cache_aware: a replica with so many requests more than the least busy one is too busy.", "Replicas"),
    ] = 4
    """A replica with so many more requests than the least busy one is left alone, if the next limit says so too."""
    balance_rel_threshold: Annotated[
        float, Meta(ge=1.0), Flag("cache_aware: and with so many times its requests.", "Replicas")
    ] = 1.5
    """A replica with so many times the requests of the least busy one is left alone."""

    health_check_endpoint: Annotated[str, Flag("Path of a replica's health.", "Health checks")] = "/health"
    """Path that answers 200 if a replica can serve. Where it is a 404, /v1/models is asked instead."""
    health_check_interval_secs: Annotated[Seconds, Flag("Seconds between two checks.", "Health checks")] = 5.0
    """Seconds between the end of a check and the next one."""
    health_check_timeout_secs: Annotated[Seconds, Flag("Longest time of one check, seconds.", "Health checks")] = 2.0
    """Seconds that a check may take, and that a stream may be silent meanwhile. A server that compiles a grammar
    is silent for one."""
    health_failure_threshold: Annotated[
        Count, Flag("Failed checks in a row after which a replica is down.", "Health checks")
    ] = 3
    """Failed checks in a row after which a replica is down."""
    health_success_threshold: Annotated[
        Count, Flag("Good checks in a row after which it is up again.", "Health checks")
    ] = 2
    """Good checks in a row after which a replica is up again; its very first check decides alone."""
    cb_failure_threshold: Annotated[
        Count, Flag("Failed requests in a row that open a replica's circuit breaker: it gets none.", "Health checks")
    ] = 10
    """Failed requests in a row, within the window, that open a replica's circuit breaker. A 4xx is no failure."""
    cb_success_threshold: Annotated[
        Count, Flag("Successful trial requests that close the circuit.", "Health checks")
    ] = 3
    """Requests that must succeed, one by one, before an open circuit is closed again."""
    cb_timeout_duration_secs: Annotated[Seconds, Flag("Seconds until the first trial request.", "Health checks")] = 60.0
    """Seconds that an open circuit keeps requests away."""
    cb_window_duration_secs: Annotated[
        Seconds, Flag("Seconds after which a failure no longer counts.", "Health checks")
    ] = 120.0
    """Seconds after which a failure no longer counts."""

    retry_max_retries: Annotated[
        int, Meta(ge=0, le=100), Flag("Retries of one request, before its first byte.", "Retries")
    ] = 5
    """Further attempts of one request, all before the first byte of its answer."""
    retry_budget: Annotated[
        float, Meta(ge=0.0, le=10.0), Flag("Retries per request, on average over all.", "Retries")
    ] = 0.2
    """Retries that each request allows, on average; ten a second are allowed in any case."""
    retry_initial_backoff_ms: Annotated[
        float, Meta(ge=1.0), Flag("Pause before the same replica is asked again, ms.", "Retries")
    ] = 50.0
    """Milliseconds before a request goes to a replica that has failed it already. Another one gets it at once."""
    retry_max_backoff_ms: Annotated[float, Meta(ge=1.0), Flag("Longest such pause, ms.", "Retries")] = 30000.0
    """Longest such pause."""
    retry_backoff_multiplier: Annotated[float, Meta(ge=1.0), Flag("Factor from one pause to the next.", "Retries")] = (
        1.5
    )
    """Each pause is so many times the one before."""
    retry_jitter_factor: Annotated[float, Meta(ge=0.0, le=1.0), Flag("Random part of a pause (0 to 1).", "Retries")] = (
        0.2
    )
    """Part of a pause by which it is longer or shorter, at random."""

    migration_limit: Annotated[
        int, Meta(ge=0, le=100), Flag("Moves of a begun stream to other replicas; 0: none.", "Retries")
    ] = MIGRATION_LIMIT
    """Replicas that may break off under one request before it goes nowhere else: perhaps it is what breaks them.
    0: a begun stream ends with its replica; before the first byte the default holds."""
    migration_max_seq_len: Annotated[
        int, Meta(ge=1, le=MOST_ITEMS), Flag("Tokens with which a stream can still move.", "Retries")
    ] = 131072
    """Tokens of a stream that are kept, those of all choices together; a longer one ends with its replica. A
    log-probability counts like a token. A server takes no more than fits into RESUME_BYTES."""

    log_level: Annotated[LogLevel, Flag("Verbosity of the log on stderr.")] = "info"
    """Verbosity of the log on stderr."""

    @property
    def most_breaks(self) -> int:
        """Replicas that may break off under one request while another one still gets it."""
        return self.migration_limit or MIGRATION_LIMIT

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * MIB)
