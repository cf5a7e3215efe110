"""The FastAPI application: builds the server's parts, adds the routes, and answers errors.

Does not know how the engine runs, nor sockets and signals (`server_process.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from phalanx import __version__
from phalanx.errors import AdminKeyRefused, EngineUnavailable, PhalanxError
from phalanx.http.allowed_hosts import AllowedHosts
from phalanx.http.api_keys import ApiKeys
from phalanx.http.connection_table import HEALTH_PATHS
from phalanx.http.error_responses import CLIENT_GONE, Failure, error_body, public_failure
from phalanx.http.openapi import describe_bodies, json_body
from phalanx.http.owners import OWNER, owner_on_server
from phalanx.http.refused_keys import RefusedKeys
from phalanx.http.request_ids import REQUEST_ID
from phalanx.server.access import HostCheck, ModelManagers, error_response
from phalanx.server.answers.call_memory import CallMemory
from phalanx.server.dialects.common.dialect import Dialect
from phalanx.server.dialects.messages.messages_dialect import COUNTED_MESSAGES, MESSAGES, count_body
from phalanx.server.dialects.ollama import ollama_dialect
from phalanx.server.dialects.ollama.ollama_body import OllamaModelBody, OllamaPullBody
from phalanx.server.dialects.ollama.ollama_models import REFUSED
from phalanx.server.dialects.openai.chat_completions import CHAT
from phalanx.server.dialects.openai.completions import COMPLETIONS
from phalanx.server.dialects.responses.responses_dialect import RESPONSES, input_tokens_body
from phalanx.server.endpoints.engine_health import EngineHealth
from phalanx.server.endpoints.generating import CompletionEndpoints
from phalanx.server.endpoints.info import InfoEndpoints
from phalanx.server.endpoints.numerics import numerics_of
from phalanx.server.endpoints.ollama_info import OllamaEndpoints
from phalanx.server.envelope import Envelope
from phalanx.server.fields.openai_bodies import DetokenizeBody, TokenizeBody
from phalanx.server.outputs.shapes import OutputShapes, by_name, choose
from phalanx.server.prompts.chat_encoding import ChatEncoder
from phalanx.server.prompts.grammar_checks import GrammarChecks
from phalanx.server.prompts.prompt_encoder import Prompts
from phalanx.server.requests.intake import Intake
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults, served_names
from phalanx.server.sequences.journal import Journal
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision.client import EngineClient
from phalanx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions


GENERATING: Mapping[str, Dialect[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/api/chat": ollama_dialect.CHAT,
    "/api/generate": ollama_dialect.GENERATE,
}
"""Path -> the dialect of the requests that the model answers there."""
NOT_TEXT = (
    "/v1/embeddings",
    "/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/pooling",
    "/classify",
)
"""Paths of OpenAI's, Cohere's, Jina's and vLLM's for models that compute vectors and scores."""
COUNTING: Mapping[str, tuple[Dialect[Any], Callable[[int], dict[str, Any]]]] = {
    "/v1/messages/count_tokens": (COUNTED_MESSAGES, count_body),
    "/v1/responses/input_tokens": (RESPONSES, input_tokens_body),
}
"""Path -> the dialect of the requests whose prompts are counted there, and how the count is written."""


def create_app(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: Tokenizer,
    *,
    defaults: GenerationDefaults | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """The server as an ASGI application. Its lifespan starts and closes the engine.

    Args:
        defaults: sampling parameters for fields that a request leaves out; see `defaults.read_defaults`.
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
        shapes=shapes_of(config, tokenizer),
        auto_tools=config.enable_auto_tool_choice,
    )
    numerics = numerics_of(config, served, tokenizer.fingerprint())
    metrics = ServerMetrics(served.names[0])
    journal = Journal(engine, metrics, max_num_seqs=config.engine.max_num_seqs, queue=config.queue, clock=clock)
    health = EngineHealth(
        engine, metrics, stall_s=config.stall_seconds, limit=config.engine.max_num_seqs, numerics=numerics
    )
    intake = Intake(config.max_body_bytes, lambda: engine.info.max_model_len if engine.info else None)
    prompts = Prompts(tokenizer)
    tokenize_prompts = Prompts(tokenizer, threads=1)  # a thread of its own: /tokenize must not delay completions
    keys = ApiKeys(config.api_key)
    calls = CallMemory()
    chats = ChatEncoder(prompts, served.shapes, calls)
    counted = ChatEncoder(tokenize_prompts, served.shapes, calls)
    information = InfoEndpoints(config, engine, served, intake, tokenize_prompts, counted, health, metrics, keys)
    managers = ModelManagers(keys, config.admin_key)
    ollama_info = OllamaEndpoints(
        served, intake, config.engine.model, tokenizer.template_source, information.loaded, managers.includes
    )
    grammars = GrammarChecks(tokenizer)
    completions = CompletionEndpoints(
        config, served, intake, prompts, chats, grammars, journal, metrics, numerics, clock
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
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
            prompts.close()
            tokenize_prompts.close()
            grammars.close()

    # FastAPI's pages for people load scripts from another site; /openapi.json says the same and loads nothing.
    app = FastAPI(
        title="phalanx",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the envelope drops them
    )
    app.state.shapes = served.shapes
    app.state.journal = journal  # server_process.py waits for its requests when the server stops
    authenticated = _authenticated(keys, config.admin_key)
    _add_routes(app, authenticated, completions, information, metrics_open=config.metrics_open)
    _add_ollama_routes(app, authenticated, managers, ollama_info)
    _add_middleware(app, config, metrics)
    _add_error_handlers(app)
    generating = {dialect.body for dialect in GENERATING.values()}
    describe_bodies(app, {TokenizeBody, DetokenizeBody, OllamaModelBody, OllamaPullBody, *generating})
    return app


def shapes_of(config: ServerConfig, tokenizer: Tokenizer) -> OutputShapes:
    """The formats in which the model writes calls and reasoning: by its chat template, or as the flags say."""
    found = choose(tokenizer.template_source, tokenizer.added_tokens)
    return by_name(found, config.tool_call_parser, config.reasoning_parser)


def _report(task: asyncio.Task[None], on_failure: Callable[[BaseException], None] | None) -> None:
    """Log the error that ended a background task, if any, and pass it to `on_failure`."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    log.error("%s", error, exc_info=None if isinstance(error, PhalanxError) else error)
    if on_failure is not None:
        on_failure(error)


def _add_middleware(app: FastAPI, config: ServerConfig, metrics: ServerMetrics) -> None:
    """Browsers' rules, before any route: the last one added comes first."""
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],  # a pre-flight is told what it asked for
            expose_headers=["Retry-After", "retry-after-ms", REQUEST_ID],
        )
    hosts = AllowedHosts(config.host, config.allowed_hosts)
    app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(Envelope, answered=metrics.answered)


def _authenticated(keys: ApiKeys, admin_key: str | None) -> list[Any]:
    """Dependencies of routes to all that computes or changes state, and to what describes the model."""

    async def require_key(request: Request) -> None:
        own = keys.owner(request.headers)
        request.state.owner = owner_on_server(own, request.headers.get(OWNER), admin_key)

    return [Depends(require_key)]


def _add_routes(
    app: FastAPI,
    authenticated: list[Any],
    completions: CompletionEndpoints,
    information: InfoEndpoints,
    *,
    metrics_open: bool,
) -> None:
    add = app.add_api_route
    tokenize, detokenize = json_body(TokenizeBody), json_body(DetokenizeBody)
    for path, dialect in GENERATING.items():
        handler, extra = completions.of(dialect), json_body(dialect.body)
        add(path, handler, methods=["POST"], dependencies=authenticated, openapi_extra=extra)
    for path, (counted, written) in COUNTING.items():
        handler, extra = information.counting(counted, written), json_body(counted.body)
        add(path, handler, methods=["POST"], dependencies=authenticated, openapi_extra=extra)
    for path in NOT_TEXT:
        add(path, information.other_outputs, methods=["POST"], dependencies=authenticated, include_in_schema=False)
    add("/v1/models", information.models, methods=["GET"], dependencies=authenticated)
    add("/v1/models/{name:path}", information.model, methods=["GET"], dependencies=authenticated)
    add("/tokenize", information.tokenize, methods=["POST"], dependencies=authenticated, openapi_extra=tokenize)
    add("/detokenize", information.detokenize, methods=["POST"], dependencies=authenticated, openapi_extra=detokenize)
    add("/tokenizer_info", information.tokenizer_info, methods=["GET"], dependencies=authenticated)
    add("/reset_prefix_cache", information.reset_prefix_cache, methods=["POST"], dependencies=authenticated)
    add("/", information.root, methods=["GET"])
    add("/version", information.version, methods=["GET"])
    for path in HEALTH_PATHS:
        add(path, information.health, methods=["GET"])
    add("/metrics", information.metrics, methods=["GET"], dependencies=[] if metrics_open else authenticated)


def _add_ollama_routes(
    app: FastAPI, authenticated: list[Any], managers: ModelManagers, information: OllamaEndpoints
) -> None:
    """Those of Ollama's API that do not run the model."""
    add = app.add_api_route
    shown = json_body(OllamaModelBody)
    add("/api/version", information.version, methods=["GET"])
    described = [Depends(managers.authenticate)]
    add("/api/tags", information.tags, methods=["GET"], dependencies=described)
    add("/api/ps", information.running, methods=["GET"], dependencies=described)
    add("/api/show", information.show, methods=["POST"], dependencies=described, openapi_extra=shown)
    managing = [Depends(managers.require)]
    pulled = json_body(OllamaPullBody)
    add("/api/pull", information.pull, methods=["POST"], dependencies=managing, openapi_extra=pulled)
    add("/api/delete", information.delete, methods=["DELETE"], dependencies=managing, openapi_extra=shown)
    for path in REFUSED:
        add(path, information.refuse, methods=["POST"], dependencies=authenticated)


def _add_error_handlers(app: FastAPI) -> None:
    refused = RefusedKeys("A wrong admin key")

    async def phalanx_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PhalanxError)
        if isinstance(error, AdminKeyRefused):
            refused.note(request.client.host if request.client else "an unknown address", time.monotonic())
        response = error_response(error, request.url.path)
        if response.status_code >= 500 and not isinstance(error, EngineUnavailable):
            log.error("%s %s (%s): %s", request.method, request.url.path, request.state.request_id, error)
        return response

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        failure = Failure(status=error.status_code, type="invalid_request_error", message=message)
        return JSONResponse(error_body(failure, request.url.path), error.status_code, error.headers)

    async def client_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def unexpected_error(request: Request, error: Exception) -> Response:
        request_id = request.state.request_id  # this answer does not pass the envelope
        log.error("%s %s (%s) failed", request.method, request.url.path, request_id)
        details = PhalanxError(f"Internal server error; the server's log has the details of {request_id}.")
        body = error_body(public_failure(details), request.url.path)
        return JSONResponse(body, 500, {REQUEST_ID: request_id})

    app.add_exception_handler(PhalanxError, phalanx_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_disconnect)
    app.add_exception_handler(Exception, unexpected_error)
