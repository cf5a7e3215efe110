"""What all requests and answers have in common: request ids, HEAD, and slashes at the end of a path."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.http.request_ids import REQUEST_ID, request_id


def endpoint_of(scope: Mapping[str, Any]) -> str:
    """The path of the route that took a request, as it is declared; "unknown" if none did, or not yet."""
    route = scope.get("route")
    return "unknown" if route is None else str(route.path)


class Envelope:
    """Middleware, before all others.

    - Every answer carries `x-request-id`: the request's own, if it is sane, else a new one. Handlers find it in the
      request's state, as `request_id`.
    - HEAD is answered wherever GET is, with the same headers and no body.
    - `/v1/models/` means `/v1/models`. A redirect would not do: many clients follow none after a POST.

    Args:
        answered: called with the endpoint and the status of every answer; None: nothing counts them.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[str, int], None] | None = None) -> None:
        self._app = app
        self._answered = answered or (lambda endpoint, status: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own_id = request_id(Headers(scope=scope).get(REQUEST_ID, ""), lambda: uuid.uuid4().hex)
        is_head = scope["method"] == "HEAD"
        begun = False

        async def enclose(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = own_id
                self._answered(endpoint_of(inner), message["status"])
                begun = True
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        # The caller of this middleware answers errors that nothing handles, and looks into the same state.
        scope.setdefault("state", {})["request_id"] = own_id
        path = scope["path"].rstrip("/") or "/"
        inner = {**scope, "method": "GET" if is_head else scope["method"], "path": path}
        try:
            await self._app(inner, receive, enclose)
        finally:
            if not begun:
                self._answered(endpoint_of(inner), 500)
