"""Host allow list, the clients that may manage models, and the response to a request that failed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.errors import AdminKeyRefused, ForbiddenHost, PhalanxError
from phalanx.http.allowed_hosts import AllowedHosts, name_of
from phalanx.http.api_keys import ApiKeys
from phalanx.http.error_responses import error_body, headers_of, public_failure
from phalanx.http.listening import is_loopback
from phalanx.http.owners import OWNER, owner_on_server


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


class ModelManagers:
    """The clients that may see, pull and delete the models on this disk: programs on this machine, and those with the
    admin key. What a proxy on this machine passes on is not this machine's own.
    """

    def __init__(self, keys: ApiKeys, admin_key: str | None) -> None:
        self._keys = keys
        self._admin_key = admin_key
        self._admin = None if admin_key is None else ApiKeys([admin_key])

    def has_admin_key(self, request: Request) -> bool:
        """Whether the request has the admin key, in the place of an API key."""
        return self._admin is not None and self._admin.may_see_details(request.headers)

    def includes(self, request: Request) -> bool:
        """Whether the request, which `authenticate` has passed, is of one of them."""
        local = request.client is not None and is_loopback(request.client.host)
        return self.has_admin_key(request) or (local and not any(name in request.headers for name in OF_PROXIES))

    async def authenticate(self, request: Request) -> None:
        """Note the owner of the request's key.

        Raises:
            InvalidApiKey: neither the admin key nor an API key that is accepted.
            AdminKeyRefused: as `owner_on_server`.
        """
        own = "" if self.has_admin_key(request) else self._keys.owner(request.headers)
        request.state.owner = owner_on_server(own, request.headers.get(OWNER), self._admin_key)

    async def require(self, request: Request) -> None:
        """Refuse requests of others.

        Raises:
            InvalidApiKey: as `authenticate`.
            AdminKeyRefused: from another machine without the admin key.
        """
        await self.authenticate(request)
        if not self.includes(request):
            raise AdminKeyRefused("Only this machine, or a client with the --admin-key, may change its models.")


OF_PROXIES = ("x-forwarded-for", "x-real-ip", "forwarded", "via")
"""Headers that tell of another client behind the one that asks."""
