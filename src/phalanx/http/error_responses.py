"""Maps errors to responses, for server and gateway: one table of status, type and code, and each dialect's body."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from phalanx.errors import (
    AdminKeyRefused,
    EngineUnavailable,
    ForbiddenHost,
    InvalidApiKey,
    InvalidRequest,
    NoReplica,
    PhalanxError,
    Quarantined,
    QueueFull,
    ReplicaError,
    ReplicaTooSlow,
    RequestTooLarge,
    SlowClient,
    UnknownModel,
    UnknownPath,
    WrongMediaType,
    WrongMethod,
)

PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.@+~%-]+)+/([\w.@+~%-]+)")
CLIENT_GONE = 499  # nginx's status, for its log, of a client that has left
SHOULD_RETRY = "x-should-retry"
"""Is "false" if the request itself is the cause. The gateway heeds it, as OpenAI's and Anthropic's clients do."""
TOO_LONG = "prompt is too long: "
"""Claude Code shortens its conversation when an error says so."""


class Status(Struct, frozen=True):
    """The HTTP status of an error, and OpenAI's names for its kind."""

    status: int
    type: str  # OpenAI's `error.type`
    code: str | None = None  # OpenAI's `error.code`, if the error has none of its own; never a number


STATUS: Mapping[type[PhalanxError], Status] = {
    InvalidRequest: Status(400, "invalid_request_error"),
    InvalidApiKey: Status(401, "invalid_request_error"),
    ForbiddenHost: Status(403, "invalid_request_error"),
    AdminKeyRefused: Status(403, "invalid_request_error"),
    UnknownModel: Status(404, "invalid_request_error"),
    UnknownPath: Status(404, "invalid_request_error"),
    WrongMethod: Status(405, "invalid_request_error"),
    SlowClient: Status(408, "invalid_request_error"),
    RequestTooLarge: Status(413, "invalid_request_error"),
    WrongMediaType: Status(415, "invalid_request_error"),
    QueueFull: Status(429, "rate_limit_error", "rate_limit_exceeded"),
    ReplicaError: Status(502, "server_error", "replica_failed"),
    EngineUnavailable: Status(503, "service_unavailable_error"),
    Quarantined: Status(500, "server_error", "quarantined"),
    NoReplica: Status(503, "service_unavailable_error"),
    ReplicaTooSlow: Status(504, "server_error", "replica_too_slow"),
    PhalanxError: Status(500, "server_error"),
}
"""An error has the status of its nearest ancestor in this table."""
MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> Anthropic's type of an error; others are a mistake of the client's or of the server's."""


class Failure(Struct, frozen=True, kw_only=True):
    """An error as a client sees it, with OpenAI's fields."""

    status: int  # of HTTP; in a begun stream, the one that the error would have had
    type: str
    message: str
    param: str | None = None
    code: str | None = None


def public_failure(error: PhalanxError) -> Failure:
    """The error as a client sees it, without file paths. Errors in its own request, and a replica's, keep their paths:
    these are the client's, or of URLs.
    """
    entry = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    param, code = (error.param, error.code) if isinstance(error, InvalidRequest) else (None, None)
    return Failure(
        status=entry.status,
        type=entry.type,
        message=str(error) if isinstance(error, (InvalidRequest, ReplicaError)) else without_paths(str(error)),
        param=param,
        code=code or entry.code,
    )


def not_http(why: str) -> Failure:
    """A request that is refused before its path is known: in OpenAI's format, whatever its dialect."""
    return Failure(status=400, type="invalid_request_error", message=f"The request is not HTTP: {why}.")


def without_paths(text: str) -> str:
    """The text with every absolute path cut to its last part: strangers learn none of this machine's directories."""
    return PATH.sub(r"\1", text)


def headers_of(error: PhalanxError) -> dict[str, str]:
    """Further headers of the answer to a request that failed."""
    if isinstance(error, Quarantined):
        return {SHOULD_RETRY: "false"}
    if isinstance(error, (QueueFull, EngineUnavailable, NoReplica)):
        milliseconds = max(1, round(error.retry_after * 1000))
        return {"Retry-After": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}
    if isinstance(error, WrongMethod):
        return {"Allow": ", ".join(error.allowed)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, InvalidApiKey) else {}


def openai_error(failure: Failure) -> dict[str, Any]:
    """OpenAI's error object, as a body or as an event of a stream."""
    error = {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}
    return {"error": error}


def messages_error(failure: Failure) -> dict[str, Any]:
    """Anthropic's error, as a body or as an event of a stream."""
    kind = MESSAGES_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    before = TOO_LONG if failure.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": before + failure.message}}


def ollama_error(failure: Failure) -> dict[str, Any]:
    """Ollama's error, as a body or as a line of a stream."""
    return {"error": failure.message}


ERROR_BODIES: Mapping[str, Callable[[Failure], dict[str, Any]]] = {"/v1/messages": messages_error, "/api": ollama_error}
"""Path -> how errors are written there and below; elsewhere as OpenAI does."""


def error_body(failure: Failure, path: str) -> dict[str, Any]:
    """The error in the format of the path's dialect."""
    return writer_of(path)(failure)


def writer_of(path: str) -> Callable[[Failure], dict[str, Any]]:
    """The function that writes errors in the format of the path's dialect."""
    return next((write for root, write in ERROR_BODIES.items() if f"{path}/".startswith(f"{root}/")), openai_error)
