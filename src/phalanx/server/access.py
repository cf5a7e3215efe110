"""Under which names requests are let in, and what strangers may see."""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.edge.hosts import AllowedHosts, name_of
from phalanx.errors import ForbiddenHost, PhalanxError

PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.@+~%-]+)+/([\w.@+~%-]+)")


def without_paths(text: str) -> str:
    """The text with the last part only of every absolute path: strangers need not know this machine's directories."""
    return PATH.sub(r"\1", text)


class HostCheck:
    """Middleware: answers requests under foreign names with an error, before anything else sees them."""

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts, error_response: Callable[[PhalanxError, str], Response]
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._error_response = error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._hosts.accept(host):  # HTTP/1.0 may leave it out; browsers never do
            await self._app(scope, receive, send)
            return
        name = name_of(host)[:80]
        error = ForbiddenHost(f"{name!r} is not a name of this server; start it with --allowed-hosts NAME to allow it.")
        await self._error_response(error, scope["path"])(scope, receive, send)
