"""The types of errors of Anthropic's `/v1/messages`, which server and gateway write alike."""

from __future__ import annotations

from collections.abc import Mapping

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> type; others are a mistake of the client's or of the server's."""


def messages_error_type(status: int) -> str:
    """What Anthropic calls an error of this HTTP status, 400 to 599."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
