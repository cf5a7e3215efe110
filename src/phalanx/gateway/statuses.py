"""The HTTP status of each error that a gateway answers with. `server/app.py` has the server's table."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from phalanx.errors import (
    ForbiddenHost,
    InvalidApiKey,
    InvalidRequest,
    NoReplica,
    PhalanxError,
    QueueFull,
    ReplicaError,
    ReplicaTooSlow,
    RequestTooLarge,
    SlowClient,
    UnknownModel,
    UnknownPath,
    WrongMediaType,
)


class Status(Struct, frozen=True):
    """The HTTP status of an error, and OpenAI's names for its kind."""

    status: int
    type: str  # OpenAI's `error.type`
    code: str | None = None  # OpenAI's `error.code`, where the error has none of its own


STATUS: Mapping[type[PhalanxError], Status] = {
    InvalidRequest: Status(400, "invalid_request_error"),
    InvalidApiKey: Status(401, "invalid_request_error"),
    ForbiddenHost: Status(403, "invalid_request_error"),
    UnknownModel: Status(404, "invalid_request_error"),
    UnknownPath: Status(404, "invalid_request_error"),
    SlowClient: Status(408, "invalid_request_error"),
    RequestTooLarge: Status(413, "invalid_request_error"),
    WrongMediaType: Status(415, "invalid_request_error"),
    QueueFull: Status(429, "rate_limit_error", "rate_limit_exceeded"),
    ReplicaError: Status(502, "server_error", "replica_failed"),
    NoReplica: Status(503, "service_unavailable_error"),
    ReplicaTooSlow: Status(504, "server_error", "replica_too_slow"),
    PhalanxError: Status(500, "server_error"),
}
"""An error has the status of its nearest ancestor in this table."""


def status_of(error: PhalanxError) -> Status:
    """The table's entry for this error."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def headers_of(error: PhalanxError) -> dict[str, str]:
    """Further headers of the answer to a request that failed."""
    if isinstance(error, (QueueFull, NoReplica)):
        milliseconds = max(1, round(error.retry_after * 1000))
        return {"Retry-After": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, InvalidApiKey) else {}
