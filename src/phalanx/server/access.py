"""Host allow list, and the response to a request that failed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.errors import ForbiddenHost, PhalanxError
from phalanx.http.allowed_hosts import AllowedHosts, name_of
from phalanx.http.error_responses import error_body, headers_of, public_failure


def error_response(error: PhalanxError, path: str) -> JSONResponse:
    """The response to a request that failed before the first byte of its answer."""
    failure = public_failure(error)
    return JSONResponse(error_body(failure, path), failure.status, headers_of(error))


class HostCheck:
    """Middleware: answers requests under foreign names with an error, before anything else sees them."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._hosts.accept(host):  # HTTP/1.0 may leave it out; browsers never do
            await self._app(scope, receive, send)
            return
        name = name_of(host)[:80]
        error = ForbiddenHost(f"{name!r} is not a name of this server; start it with --allowed-hosts NAME to allow it.")
        await error_response(error, scope["path"])(scope, receive, send)
