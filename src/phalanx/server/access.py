"""Under which names requests are let in, and what strangers may see, of errors too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.edge.error_responses import Failure, failure_of, headers_of, messages_error, ollama_error, openai_error
from phalanx.edge.hosts import AllowedHosts, name_of
from phalanx.errors import ForbiddenHost, InvalidRequest, PhalanxError

PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.@+~%-]+)+/([\w.@+~%-]+)")
ERROR_BODIES: Mapping[str, Callable[[Failure], dict[str, Any]]] = {"/v1/messages": messages_error, "/api": ollama_error}
"""Path -> how errors are written there and below; elsewhere as OpenAI does."""


def without_paths(text: str) -> str:
    """The text with the last part only of every absolute path: strangers need not know this machine's directories."""
    return PATH.sub(r"\1", text)


def public_failure(error: PhalanxError) -> Failure:
    """The error as a client sees it: paths only of mistakes of its own."""
    return failure_of(error, str(error) if isinstance(error, InvalidRequest) else without_paths(str(error)))


def error_body(failure: Failure, path: str) -> dict[str, Any]:
    """The error in the words of the dialect that is spoken at this path."""
    write = next((write for root, write in ERROR_BODIES.items() if f"{path}/".startswith(f"{root}/")), openai_error)
    return write(failure)


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
