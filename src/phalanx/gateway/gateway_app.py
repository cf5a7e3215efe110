"""The gateway's routes: what it answers itself, what only an admin may ask, and what goes to replicas.

Does not know sockets and signals (`gateway_process.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from phalanx import __version__
from phalanx.errors import (
    ForbiddenHost,
    InvalidApiKey,
    NoReplica,
    PhalanxError,
    UnknownModel,
    UnknownPath,
)
from phalanx.gateway.admin import CALLS, ROOT, Admin
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.fleet import TAGS, Fleet
from phalanx.gateway.dispatch.replica_models import merged, merged_tags
from phalanx.gateway.relay.exchange import ClientExchange, body_lease
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.proxy import Proxy
from phalanx.gateway.settings.clients import Clients
from phalanx.http.allowed_hosts import AllowedHosts, name_of
from phalanx.http.connection import raw_header, refusal
from phalanx.http.connection_table import HEALTH_PATHS
from phalanx.http.error_responses import CLIENT_GONE, not_http
from phalanx.http.http_exchange import GREETING
from phalanx.http.media_types import require_json
from phalanx.http.model_lists import LM_STUDIO, lm_studio_card, lm_studio_list, model_card, model_list, name_meant
from phalanx.http.openapi import Operation, document
from phalanx.http.refused_keys import RefusedKeys
from phalanx.http.shares import Shares

log = logging.getLogger(__name__)

PROXIED = ("/v1/", "/api/")
PROXIED_ALONE = frozenset(("/tokenize", "/detokenize", "/tokenizer_info"))
"""Paths of phalanx's and vLLM's servers outside of /v1."""
PASSED_ON = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/v1/responses/input_tokens", "/api/chat", "/api/generate", "/api/show", "/tokenize", "/detokenize"),
)
"""The paths of phalanx's servers that clients ask at; whatever else is below those above is passed on as well."""
OPERATIONS = (
    *(Operation("POST", path, "Passed on; a replica's /openapi.json has its fields.") for path in PASSED_ON),
    Operation("GET", "/v1/models", "The models of all replicas."),
    Operation("GET", "/v1/models/{name}", "One of them."),
    Operation("GET", LM_STUDIO, "The models of all replicas, in LM Studio's words."),
    Operation("GET", f"{LM_STUDIO}/{{name}}", "One of them."),
    Operation("GET", "/", "That there is a gateway.", needs_key=False),
    Operation("GET", TAGS, "The models of all replicas, in Ollama's words."),
    *(Operation("GET", path, "Whether a replica can take requests.", needs_key=False) for path in HEALTH_PATHS),
    Operation("GET", "/metrics", "Prometheus' text format."),
    Operation("GET", "/version", "The version of this gateway.", needs_key=False),
    Operation("GET", "/openapi.json", "What this gateway answers at which path.", needs_key=False),
    *CALLS,
)
DOTS = frozenset((".", ".."))  # a server might take /v1/../x for /x, which is not for clients
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))
ADMIN_BODY = 1 << 16  # bytes; one replica takes some hundred


class App:
    """Answers requests.

    Args:
        admin_key: None: there is no admin API.
        aliases: of models.
        hosts: under which it may be addressed where no key is needed.
        serves_metrics: /metrics is answered here, and not at a port of its own.
        metrics_open: without a key.
    """

    def __init__(
        self,
        dispatcher: AsyncDispatcher,
        proxy: Proxy,
        clients: Clients,
        metrics: GatewayMetrics,
        admin: Admin,
        fleet: Fleet,
        *,
        admin_key: str | None,
        aliases: Mapping[str, str],
        hosts: AllowedHosts,
        serves_metrics: bool,
        metrics_open: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._proxy = proxy
        self._clients = clients
        self._metrics = metrics
        self._admin = admin
        self._fleet = fleet
        self._admin_key = admin_key
        self._aliases = aliases
        self._hosts = hosts
        self._serves_metrics = serves_metrics
        self._metrics_open = metrics_open
        self._admin_memory = Shares(ADMIN_BODY)
        self._refused_admins = RefusedKeys("A wrong admin key")
        self._described = document("phalanx gateway", OPERATIONS)
        self.closing = ""
        """Why new requests are refused."""
        self.unfinished = 0
        """Proxied requests that are not answered yet."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's handler."""
        exchange = ClientExchange(request, self._dispatcher.clock())
        connection = exchange.connection
        connection.request_begins(request)
        try:
            fault = connection.fault
            response = await self._answer(exchange) if not fault else refusal(not_http(fault))
        except PhalanxError as error:
            response = exchange.error(error)
            log.debug("%s %s (%s): %s", request.method, exchange.path, exchange.id, error)
        except ConnectionError:  # the client left while it was written to
            self._metrics.client_left()
            connection.abort()
            return exchange.response or web.Response(status=CLIENT_GONE)
        finally:
            connection.request_ends()
        if connection.place.reserved or self.closing or not request.content.at_eof():
            response.force_close()
        return response

    async def wait_until_idle(self, limit_s: float, *, unless: asyncio.Event | None = None) -> bool:
        """Wait until no request is unfinished, so long at most and until `unless` is set. Returns whether none is."""
        events = [self._idle, *([unless] if unless is not None else [])]
        waiting = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return not self.unfinished

    async def _answer(self, exchange: ClientExchange) -> web.StreamResponse:
        path, method = exchange.path, exchange.request.method
        if path in HEALTH_PATHS:
            return self._health(exchange)
        if exchange.connection.place.reserved:
            raise NoReplica("The gateway has as many connections as it may have (--max-connections).")
        if path == "/metrics" and self._serves_metrics:
            if not self._metrics_open:
                self._clients.owner(_key_headers(exchange.request))
            text = self._metrics.text(self._dispatcher.clock())
            return exchange.whole(200, text, {"Content-Type": CONTENT_TYPE_LATEST})
        if path == "/" and method in ("GET", "HEAD"):
            return exchange.whole(200, GREETING.body, {"Content-Type": GREETING.media_type})
        if path == "/version":
            return exchange.json(200, {"version": __version__})
        if path == "/openapi.json" and method in ("GET", "HEAD"):
            return exchange.json(200, self._described)
        if path.startswith("/admin") and self._admin_key is not None:
            return await self._answer_admin(exchange)
        is_proxied = path in PROXIED_ALONE or (path.startswith(PROXIED) and not DOTS.intersection(path.split("/")))
        if not is_proxied or method not in METHODS:
            raise UnknownPath(f"The gateway has no {method} {path}.")
        exchange.owner = self._clients.owner(_key_headers(exchange.request))
        exchange.connection.mark_busy()
        self._check_is_no_page(exchange)
        if method in ("GET", "HEAD") and f"{path}/".startswith(("/v1/models/", f"{LM_STUDIO}/")):
            return self._models(exchange)
        if method in ("GET", "HEAD") and path == TAGS:
            return exchange.json(200, {"models": merged_tags(await self._fleet.tags(), self._aliases)})
        return await self._forward(exchange)

    async def _forward(self, exchange: ClientExchange) -> web.StreamResponse:
        if self.closing:
            raise NoReplica(self.closing, retry_after=5.0)
        use = self._clients.begin(exchange.owner)
        self.unfinished += 1
        self._idle.clear()
        try:
            response = await self._proxy.forward(
                exchange,
                self._aliases,
                pass_keys=not self._clients.need_key,
                reserve=lambda n_tokens, rows: self._clients.reserve(use, n_tokens, rows),
            )
        except PhalanxError:
            exchange.n_tokens = 0  # an error takes nothing
            raise
        finally:
            self.unfinished -= 1
            if not self.unfinished:
                self._idle.set()
            self._clients.end(use, exchange.n_tokens)
        first = exchange.first_text_s
        log.debug(
            "%s %s (%s) of %s: %d, %d tokens in %.3f s, %s", exchange.request.method, exchange.path, exchange.id,
            self._clients.name(exchange.owner), response.status, exchange.n_tokens,
            self._dispatcher.clock() - exchange.arrived,
            f"the first text after {first:.3f} s" if first is not None else "no text",
        )  # fmt: skip
        return response

    def _check_is_no_page(self, exchange: ClientExchange) -> None:
        """Refuse what a web page in a user's browser could send: a POST that needs no pre-flight, and without keys a
        name that is not this machine's.

        Raises:
            WrongMediaType, ForbiddenHost: see above.
        """
        needs_key = self._clients.need_key
        is_form = exchange.request.content_type == "multipart/form-data"
        if exchange.request.method == "POST" and not (needs_key and is_form):
            require_json(exchange.request.headers)
        host = raw_header(exchange.request, b"host")
        if host and not needs_key and not self._hosts.accept(host):
            name = name_of(host)[:80]
            raise ForbiddenHost(f"{name!r} is not a name of this gateway; --allowed-hosts NAME allows it.")

    # What the gateway answers itself ---------------------------------------------------------------------------

    def _health(self, exchange: ClientExchange) -> web.Response:
        """200 while a replica can take requests. The figures are as a phalanx server's: gateways may be stacked."""
        now = self._dispatcher.clock()
        dispatcher = self._dispatcher.core
        available = [replica for replica in dispatcher.replicas.values() if replica.is_available(now)]
        body: dict[str, object] = {"status": "ok" if available else "unavailable"}
        if self.closing:
            body = {"status": "closing"}
        if self._clients.may_see_details(_key_headers(exchange.request)):
            limit = sum(replica.limit for replica in available)
            running = dispatcher.in_flight
            body["requests"] = {"running": running, "waiting": dispatcher.n_waiting, "limit": limit}
            body["replicas"] = {name: replica.reason(now) or "ok" for name, replica in dispatcher.replicas.items()}
        return exchange.json(200 if body["status"] == "ok" else 503, body)

    def _models(self, exchange: ClientExchange) -> web.Response:
        cards = merged(self._dispatcher.core.replicas.values(), self._aliases)
        path, headers = exchange.path, exchange.request.headers
        if path == "/v1/models":
            return exchange.json(200, model_list(cards, headers, exchange.request.query))
        if path == LM_STUDIO:
            return exchange.json(200, lm_studio_list(cards))
        is_lm_studio = path.startswith(LM_STUDIO)
        name = path.removeprefix(f"{LM_STUDIO}/" if is_lm_studio else "/v1/models/")
        found = name_meant(name, [card["id"] for card in cards])
        for card in cards:
            if card["id"] == found:
                return exchange.json(200, lm_studio_card(card) if is_lm_studio else model_card(card, headers))
        raise UnknownModel(f"The model {name!r} is not served here.", param="model", code="model_not_found")

    async def _answer_admin(self, exchange: ClientExchange) -> web.Response:
        assert self._admin_key is not None
        given = _key_headers(exchange.request)
        bearer = given["authorization"].partition(" ")[2].strip() or given["x-api-key"]
        if not hmac.compare_digest(bearer.encode("latin-1"), self._admin_key.encode()):
            self._refused_admins.note(exchange.request.remote or "an unknown address", self._dispatcher.clock())
            raise InvalidApiKey(
                "Send the gateway's --admin-key as 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )
        if not exchange.path.startswith(ROOT):
            raise UnknownPath(f"The admin API is at {ROOT}.")
        exchange.connection.mark_busy()
        with body_lease(self._admin_memory, "") as memory:
            body = await exchange.read_body(ADMIN_BODY, memory)
        request = exchange.request
        return exchange.json(
            200, await self._admin.answer(request.method, exchange.path, request.query, body, self._dispatcher.clock())
        )


def _key_headers(request: web.BaseRequest) -> dict[str, str]:
    return {name: raw_header(request, name.encode()) for name in ("authorization", "x-api-key")}


def metrics_handler(
    metrics: GatewayMetrics, clients: Clients | None, clock: Callable[[], float]
) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
    """The handler of a port that has /metrics alone.

    Args:
        clients: whose keys open it; None: it needs no key.
    """

    async def handle(request: web.BaseRequest) -> web.Response:
        if request.path != "/metrics":
            return web.Response(status=404, text="Only /metrics is here.\n")
        if clients is not None and not clients.may_see_details(_key_headers(request)):
            headers = {"WWW-Authenticate": "Bearer"}
            return web.Response(status=401, text="Send an API key, or start with --metrics-open.\n", headers=headers)
        return web.Response(body=metrics.text(clock()), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return handle
