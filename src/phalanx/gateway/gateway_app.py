"""The gateway's routes: its own endpoints, the admin API, and the paths that replicas answer.

`gateway_process.py` handles sockets and signals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST

from phalanx import __version__
from phalanx.errors import InvalidApiKey, NoReplica, PhalanxError, UnknownModel, UnknownPath
from phalanx.gateway.admin import CALLS, ROOT, Admin
from phalanx.gateway.dispatch.async_dispatcher import AsyncDispatcher
from phalanx.gateway.dispatch.fleet import TAGS, Fleet
from phalanx.gateway.dispatch.replica_models import merged, merged_tags
from phalanx.gateway.gateway_overview import GatewayOverview
from phalanx.gateway.relay.exchange import ClientExchange, body_lease
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.proxy import Proxy
from phalanx.gateway.settings.clients import Clients
from phalanx.http.allowed_hosts import AllowedHosts
from phalanx.http.api_keys import ApiKeys
from phalanx.http.application import Application
from phalanx.http.connection_table import HEALTH_PATHS
from phalanx.http.content_encoding import read_body
from phalanx.http.cross_origin import CrossOrigin
from phalanx.http.fair_quota import FairQuota
from phalanx.http.http_exchange import Answer, Exchange, Reply, json_answer
from phalanx.http.media_types import require_json
from phalanx.http.model_lists import LM_STUDIO, lm_studio_card, lm_studio_list, model_card, model_list, name_meant
from phalanx.http.openapi import Operation, document
from phalanx.http.router import Route, Router
from phalanx.http.vector_requests import BARE_PATHS, VECTOR_PATHS, no_vectors
from phalanx.http.web_page import PATH as PAGE_PATH
from phalanx.http.web_page import page_file, root

PROXIED = ("/v1/{path}", "/api/{path}", "/tokenize", "/detokenize", "/tokenizer_info", *BARE_PATHS)
"""Paths proxied to replicas, among them those of phalanx's and vLLM's servers outside /v1."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
PASSED_ON = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/v1/responses/input_tokens", "/api/chat", "/api/generate", "/api/show", "/tokenize", "/detokenize"),
)
"""Endpoints of phalanx's servers, for /openapi.json; every other path below `PROXIED` is proxied as well."""
DOTS = frozenset((".", ".."))  # a server might take /v1/../x for /x, which is not for clients
ADMIN_BODY = 1 << 16  # bytes; one replica takes some hundred


class App:
    """Answers requests.

    Args:
        admin_key: None disables the admin API.
        aliases: alias -> model.
        hosts: accepted Host headers while no key is needed.
        serves_metrics: serve /metrics here, not at a port of its own.
        metrics_open: serve /metrics without a key.
    """

    def __init__(
        self,
        dispatcher: AsyncDispatcher,
        proxy: Proxy,
        clients: Clients,
        metrics: GatewayMetrics,
        admin: Admin,
        fleet: Fleet,
        overview: GatewayOverview,
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
        self._aliases = aliases
        self._hosts = hosts
        self._admin_memory = FairQuota(ADMIN_BODY)
        metrics_route = Route("GET", "/metrics", self._metrics_text, None if metrics_open else self._note_owner)
        own = [*self._own_routes(overview), *([metrics_route] if serves_metrics else [])]
        passed_on = "Passed on; a replica's /openapi.json has its fields."
        operations = [
            *(Operation("POST", path, passed_on) for path in PASSED_ON),
            *(route.described() for route in own),
        ]
        if admin_key is not None:
            operations += CALLS
            guard = partial(self._check_admin, ApiKeys([admin_key]))
            own += [Route(method, "/admin/{call}", self._answer_admin, guard) for method in METHODS]
        self._described = json_answer(document("phalanx gateway", operations))
        passed = [Route(method, path, self._forward, self._note_owner) for path in PROXIED for method in METHODS]
        self.application = self._application([*own, *passed])
        overview.is_over = lambda: bool(self.closing)
        self.metrics_application = self._application([metrics_route])
        """Serves --prometheus-port."""
        self.closing = ""
        """Why new requests are refused; empty while they are not."""
        self.unfinished = 0
        """Proxied requests that are not answered yet."""
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self, why: str) -> None:
        """Refuse new requests."""
        self.closing = why
        self.application.is_draining = True

    async def wait_until_idle(self, limit_s: float, *, unless: asyncio.Event | None = None) -> bool:
        """Wait until every request has ended, `unless` is set or the limit is over. Returns whether all have ended."""
        events = [self._idle, *([unless] if unless is not None else [])]
        waiting = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return not self.unfinished

    def _application(self, routes: list[Route]) -> Application:
        def is_own(host: str) -> bool:
            return self._clients.need_key or self._hosts.accept(host)  # a web page has no key

        def answered(endpoint: str, status: int) -> None:
            if endpoint in PROXIED:
                self._metrics.answered(status)

        return Application(Router(routes), is_own, CrossOrigin(()), answered, name="gateway")

    def _own_routes(self, overview: GatewayOverview) -> list[Route]:
        client = self._note_owner
        return [
            Route("GET", "/v1/overview/events", overview.events, overview.guard),
            Route("GET", "/v1/requests/{id}", overview.life, overview.guard),
            Route("GET", "/v1/models", self._models, client),
            Route("GET", "/v1/models/{name}", self._model, client),
            Route("GET", LM_STUDIO, self._lm_studio_models, client),
            Route("GET", f"{LM_STUDIO}/{{name}}", self._lm_studio_model, client),
            Route("GET", TAGS, self._tags, client),
            *(Route("GET", path, self._health) for path in HEALTH_PATHS),
            Route("GET", "/", root),
            Route("GET", PAGE_PATH, page_file),
            Route("GET", "/version", self._version),
            Route("GET", "/openapi.json", self._openapi),
        ]

    def _note_owner(self, exchange: Exchange) -> None:
        exchange.owner = self._clients.owner(exchange.headers)

    def _check_admin(self, keys: ApiKeys, exchange: Exchange) -> None:
        if not keys.may_see_details(exchange.headers):
            self.application.refused_admins.note(exchange.address, self._dispatcher.clock())
            raise InvalidApiKey(
                "Send the gateway's --admin-key as 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )
        exchange.owner = ""

    # Proxied requests ------------------------------------------------------------------------------------------

    async def _forward(self, exchange: Exchange) -> Reply:
        if DOTS.intersection(exchange.path.split("/")):
            raise UnknownPath(f"The gateway has no {exchange.method} {exchange.path}.")
        is_form = exchange.request.content_type == "multipart/form-data"
        if exchange.method == "POST" and not (self._clients.need_key and is_form):
            require_json(exchange.headers)
        if self.closing:
            raise NoReplica(self.closing, retry_after=5.0)
        client = ClientExchange(exchange, self._dispatcher.clock())
        use = self._clients.begin(client.owner)
        self.unfinished += 1
        self._idle.clear()
        answer = self._proxy.forward(
            client,
            self._aliases,
            pass_keys=not self._clients.need_key,
            reserve=lambda n_tokens, rows: self._clients.reserve(use, n_tokens, rows),
        )
        try:
            return await exchange.unless_lost(answer)
        except PhalanxError as error:
            client.n_tokens = 0  # an error is not charged
            if isinstance(error, UnknownModel) and exchange.path in VECTOR_PATHS:
                raise no_vectors(str(error)) from error
            raise
        except ConnectionError:
            self._metrics.client_left()
            raise
        finally:
            self.unfinished -= 1
            if not self.unfinished:
                self._idle.set()
            self._clients.end(use, client.n_tokens)
            first, whole = client.first_text_s, self._dispatcher.clock() - client.arrived
            text = f"the first text after {first:.3f} s" if first is not None else "no text"
            name = self._clients.name(client.owner)
            exchange.remark = f", {client.n_tokens} tokens of {name} in {whole:.3f} s, {text}"

    # The gateway's own endpoints -------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> Answer:
        """Whether a replica can take requests."""
        now = self._dispatcher.clock()
        dispatcher = self._dispatcher.core
        available = [replica for replica in dispatcher.replicas.values() if replica.is_available(now)]
        body: dict[str, object] = {"status": "ok" if available else "unavailable"}
        if self.closing:
            body = {"status": "closing"}
        if self._clients.may_see_details(exchange.headers):  # as a phalanx server's: gateways may be stacked
            limit = sum(replica.limit for replica in available)
            running = dispatcher.in_flight
            body["requests"] = {"running": running, "waiting": dispatcher.n_waiting, "limit": limit}
            body["replicas"] = {name: replica.reason(now) or "ok" for name, replica in dispatcher.replicas.items()}
        return json_answer(body, 200 if body["status"] == "ok" else 503)

    async def _metrics_text(self, _: Exchange) -> Answer:
        """Prometheus' text format."""
        return Answer(self._metrics.text(self._dispatcher.clock()), media_type=CONTENT_TYPE_LATEST)

    async def _version(self, _: Exchange) -> Answer:
        """The version of this gateway."""
        return json_answer({"version": __version__})

    async def _openapi(self, _: Exchange) -> Answer:
        """This description of the gateway's paths."""
        return self._described

    async def _models(self, exchange: Exchange) -> Answer:
        """The models of all replicas."""
        return json_answer(model_list(self._cards(), exchange.headers, exchange.query))

    async def _model(self, exchange: Exchange) -> Answer:
        """One model."""
        return json_answer(model_card(self._asked_for(exchange), exchange.headers))

    async def _lm_studio_models(self, _: Exchange) -> Answer:
        """The models of all replicas, in LM Studio's format."""
        return json_answer(lm_studio_list(self._cards()))

    async def _lm_studio_model(self, exchange: Exchange) -> Answer:
        """One model, in LM Studio's format."""
        return json_answer(lm_studio_card(self._asked_for(exchange)))

    def _asked_for(self, exchange: Exchange) -> dict[str, object]:
        cards = {card["id"]: card for card in self._cards()}
        name = name_meant(exchange.rest, map(str, cards))
        if name is None:
            message = f"The model {exchange.rest!r} is not served here."
            raise UnknownModel(message, param="model", code="model_not_found")
        return cards[name]

    def _cards(self) -> list[dict[str, object]]:
        return merged(self._dispatcher.core.replicas.values(), self._aliases)

    async def _tags(self, _: Exchange) -> Answer:
        """The models of all replicas, in Ollama's format."""
        return json_answer({"models": merged_tags(await self._fleet.tags(), self._aliases)})

    async def _answer_admin(self, exchange: Exchange) -> Answer:
        if not exchange.path.startswith(ROOT):
            raise UnknownPath(f"The admin API is at {ROOT}.")
        with body_lease(self._admin_memory, "") as memory:
            body = await read_body(exchange, ADMIN_BODY, memory)
        now = self._dispatcher.clock()
        return json_answer(await self._admin.answer(exchange.method, exchange.path, exchange.query, body, now))
