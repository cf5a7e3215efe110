"""The server's parts and routes. `server_process.py` handles sockets and signals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Any

from msgspec import Struct

from phalanx.errors import PhalanxError
from phalanx.http.allowed_hosts import AllowedHosts
from phalanx.http.api_keys import ApiKeys
from phalanx.http.application import Application
from phalanx.http.connection_table import HEALTH_PATHS
from phalanx.http.cross_origin import CrossOrigin
from phalanx.http.http_exchange import Answer, Exchange, json_answer
from phalanx.http.model_lists import LM_STUDIO
from phalanx.http.openapi import document
from phalanx.http.router import Route, Router
from phalanx.http.vector_requests import VECTOR_PATHS
from phalanx.http.web_page import PATH as PAGE_PATH
from phalanx.http.web_page import page_file, root
from phalanx.server.access import Access, KeptOwners
from phalanx.server.answers.call_memory import CallMemory
from phalanx.server.dialects.common.dialect import Dialect
from phalanx.server.dialects.messages.messages_dialect import COUNTED_MESSAGES, MESSAGES, count_body
from phalanx.server.dialects.ollama import ollama_dialect
from phalanx.server.dialects.ollama.ollama_body import OllamaModelBody, OllamaPullBody
from phalanx.server.dialects.ollama.ollama_models import REFUSED
from phalanx.server.dialects.openai.chat_completions import CHAT
from phalanx.server.dialects.openai.completions import COMPLETIONS
from phalanx.server.dialects.responses.responses_dialect import RESPONSES, input_tokens_body
from phalanx.server.endpoints.determinism_key import determinism_key_of
from phalanx.server.endpoints.engine_health import EngineHealth
from phalanx.server.endpoints.generating import CompletionEndpoints
from phalanx.server.endpoints.info import InfoEndpoints
from phalanx.server.endpoints.ollama_info import OllamaEndpoints
from phalanx.server.endpoints.overview import ServerOverview
from phalanx.server.endpoints.request_lives import RequestLives
from phalanx.server.fields.openai_bodies import DetokenizeBody, TokenizeBody
from phalanx.server.outputs.output_formats import OutputFormats, by_name, choose
from phalanx.server.prompts.chat_encoding import ChatEncoder
from phalanx.server.prompts.grammar_checks import GrammarChecks
from phalanx.server.prompts.prompt_encoder import Prompts
from phalanx.server.requests.intake import Intake
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults, served_names
from phalanx.server.sequences.event_log import EventLog
from phalanx.server.sequences.journal import Journal
from phalanx.server.sequences.queue_room import PROMPT_BODIES
from phalanx.server.sequences.request_log import RequestLog
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.server.sequences.speed_meter import SpeedMeter
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision.client import EngineClient
from phalanx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions


GENERATE_ROUTES: Mapping[str, Dialect[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/api/chat": ollama_dialect.CHAT,
    "/api/generate": ollama_dialect.GENERATE,
}
"""Path -> dialect of the requests that the model answers."""
COUNTING: Mapping[str, tuple[Dialect[Any], Callable[[int], dict[str, Any]]]] = {
    "/v1/messages/count_tokens": (COUNTED_MESSAGES, count_body),
    "/v1/responses/input_tokens": (RESPONSES, input_tokens_body),
}
"""Path -> dialect of the requests whose prompts are counted, and the function that writes the count."""


class ServerApp(Struct, frozen=True):
    """A server that does not accept connections yet."""

    application: Application
    running: Callable[[], AbstractAsyncContextManager[None]]  # starts the engine, and closes it at the end
    journal: Journal
    served: ApiModel
    prepare: Callable[[], None]  # start work that the first requests would wait for; returns at once


def create_app(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: Tokenizer,
    *,
    defaults: GenerationDefaults | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
    speeds: SpeedMeter | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ServerApp:
    """A server on this engine.

    Args:
        defaults: sampling parameters for fields that a request leaves out; see `defaults.read_defaults`.
        speeds: measures requests beside a prediction.
        on_failure: called when the engine cannot be started at all, or when a bug ended a background task.
        clock: monotonic seconds.
    """
    served = ApiModel(
        names=served_names(config),
        hidden_name=None if config.served_model_name else config.engine.model,
        max_n=config.max_n,
        max_prompts=config.max_prompts,
        default_max_tokens=COMPLETION_TOKENS,
        clamp_max_tokens=config.clamp_max_tokens,
        defaults=defaults or GenerationDefaults(),
        eos_ids=frozenset(tokenizer.eos_ids),
        template_kwargs=config.default_chat_template_kwargs,
        formats=output_formats_of(config, tokenizer),
        shows_tools=tokenizer.shows_tools,
        drop_tools=_note_once(served_names(config)[0]) if config.drops_tools else None,
        auto_tools=config.enable_auto_tool_choice,
    )
    determinism_key = determinism_key_of(config, served, tokenizer.fingerprint())
    metrics = ServerMetrics(served.names[0], speeds)
    keys = ApiKeys(config.api_key)
    if config.engine.prefix_cache_dir is not None:
        engine.subscribe(KeptOwners(engine, keys))  # before the journal, which submits sequences
    journal = Journal(
        engine,
        metrics,
        max_num_seqs=config.engine.max_num_seqs,
        queue=config.queue,
        prompt_bytes=PROMPT_BODIES * config.max_body_bytes,
        clock=clock,
    )
    request_log = RequestLog(clock)
    event_log = EventLog(clock, time.time)
    engine.subscribe(request_log)
    engine.subscribe(event_log)
    health = EngineHealth(
        engine,
        metrics,
        stall_s=config.stall_seconds,
        limit=config.engine.max_num_seqs,
        determinism_key=determinism_key,
        keeps_prefixes=config.engine.prefix_cache_dir is not None,
    )
    intake = Intake(config.max_body_bytes, lambda: engine.info.max_model_len if engine.info else None)
    prompts = Prompts(tokenizer)
    tokenize_prompts = Prompts(tokenizer, threads=1)  # a thread of its own: /tokenize must not delay completions
    calls = CallMemory()
    chats = ChatEncoder(prompts, served.formats, calls)
    counted = ChatEncoder(tokenize_prompts, served.formats, calls)
    information = InfoEndpoints(config, engine, served, intake, tokenize_prompts, counted, health, metrics, keys)
    access = Access(keys, config.admin_key)
    ollama_info = OllamaEndpoints(
        served, intake, config.engine.model, tokenizer.template_source, information.loaded, access.manages
    )
    grammars = GrammarChecks(tokenizer)
    completions = CompletionEndpoints(
        config, served, intake, prompts, chats, grammars, journal, metrics, request_log, determinism_key, clock
    )

    lives = RequestLives(request_log, engine, health, tokenize_prompts, access.has_admin_key, clock)
    overview = ServerOverview(
        config, served.names, engine, health, request_log, lives, event_log, lambda _: application.is_draining, clock
    )

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        tasks = [asyncio.create_task(engine.start()), asyncio.create_task(health.watch())]
        for task in tasks:
            task.add_done_callback(lambda task: _report(task, on_failure))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.close()
            lives.close()
            prompts.close()
            tokenize_prompts.close()
            grammars.close()

    routes = _routes(access, completions, information, lives, overview, metrics_open=config.metrics_open)
    router = Router([*routes, *_ollama_routes(access, ollama_info)])

    @cache
    def described() -> Answer:
        return json_answer(document("phalanx", (route.described() for route in router.routes)))

    async def openapi(_: Exchange) -> Answer:
        """This description of the server's paths."""
        return described()

    router.add(Route("GET", "/openapi.json", openapi))
    hosts = AllowedHosts(config.host, config.allowed_hosts)
    origins = CrossOrigin(config.allowed_origins, "--allowed-origins")
    application = Application(router, hosts.accept, origins, metrics.answered)
    return ServerApp(application, running, journal, served, grammars.prepare)


def output_formats_of(config: ServerConfig, tokenizer: Tokenizer) -> OutputFormats:
    """The model's formats of calls and reasoning: by its chat template, or by the flags."""
    found = choose(tokenizer.template_source, tokenizer.added_tokens)
    return by_name(found, config.tool_call_parser, config.reasoning_parser)


def _note_once(model: str) -> Callable[[], None]:
    """A function that logs, at its first call, that tools of requests to this model are left out."""

    @cache
    def note() -> None:
        log.info("%s cannot call tools: those of requests are left out (--tools refuse: 400)", model)

    return note


def _report(task: asyncio.Task[None], on_failure: Callable[[BaseException], None] | None) -> None:
    """Pass the error that ended a background task, if any, to `on_failure`; log one that is not reported there."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    known = isinstance(error, PhalanxError)
    if not known or on_failure is None:
        log.error("%s", error, exc_info=None if known else error)
    if on_failure is not None:
        on_failure(error)


def _routes(
    access: Access,
    completions: CompletionEndpoints,
    information: InfoEndpoints,
    lives: RequestLives,
    overview: ServerOverview,
    *,
    metrics_open: bool,
) -> list[Route]:
    client = access.client
    return [
        *(Route("POST", path, completions.of(kind), client, kind.body) for path, kind in GENERATE_ROUTES.items()),
        *(
            Route("POST", path, information.counting(kind, written), client, kind.body)
            for path, (kind, written) in COUNTING.items()
        ),
        *(Route("POST", path, information.other_outputs, client) for path in VECTOR_PATHS),
        Route("GET", "/v1/models", information.models, client),
        Route("GET", "/v1/models/{name}", information.model, client),
        Route("GET", "/v1/overview/events", overview.events, access.client_or_manager),
        Route("GET", "/v1/requests/{id}", lives.life, access.client_or_manager),
        Route("POST", "/tokenize", information.tokenize, client, TokenizeBody),
        Route("POST", "/detokenize", information.detokenize, client, DetokenizeBody),
        Route("GET", "/tokenizer_info", information.tokenizer_info, client),
        Route("POST", "/reset_prefix_cache", information.reset_prefix_cache, client),
        Route("GET", LM_STUDIO, information.lm_studio_models, client),
        Route("GET", f"{LM_STUDIO}/{{name}}", information.lm_studio_model, client),
        Route("GET", "/", root),
        Route("GET", PAGE_PATH, page_file),
        Route("GET", "/version", information.version),
        *(Route("GET", path, information.health) for path in HEALTH_PATHS),
        Route("GET", "/metrics", information.metrics, None if metrics_open else client),
    ]


def _ollama_routes(access: Access, information: OllamaEndpoints) -> list[Route]:
    """The routes of Ollama's API that do not run the model."""
    return [
        Route("GET", "/api/version", information.version),
        Route("GET", "/api/tags", information.tags, access.client_or_manager),
        Route("GET", "/api/ps", information.running, access.client_or_manager),
        Route("POST", "/api/show", information.show, access.client_or_manager, OllamaModelBody),
        Route("POST", "/api/pull", information.pull, access.manager, OllamaPullBody),
        Route("DELETE", "/api/delete", information.delete, access.manager, OllamaModelBody),
        *(Route("POST", path, information.refuse, access.client) for path in REFUSED),
    ]
