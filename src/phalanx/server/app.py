"""The FastAPI application: builds the server's parts, adds the routes, and maps errors to HTTP status in one table.

Does not know how the engine runs, nor sockets and signals (`run.py`).
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
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from phalanx import __version__
from phalanx.config import ServerConfig
from phalanx.errors import (
    EngineUnavailable,
    InvalidApiKey,
    InvalidRequest,
    PhalanxError,
    QueueFull,
    RequestTooLarge,
    SlowClient,
    UnknownModel,
    WrongMediaType,
)
from phalanx.server.health import Health
from phalanx.server.info import InfoEndpoints
from phalanx.server.intake import check_key
from phalanx.server.journal import Journal
from phalanx.server.metrics import Metrics
from phalanx.server.openapi import describe_bodies, json_body
from phalanx.server.parsed import GenerationDefaults, Served
from phalanx.server.prompts import Prompts
from phalanx.server.routes import CLIENT_GONE, CompletionEndpoints
from phalanx.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from phalanx.supervision.client import EngineClient
from phalanx.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Status(Struct, frozen=True):
    """The HTTP status of an error, and OpenAI's name for its kind."""

    status: int
    type: str  # OpenAI's `error.type`


STATUS: Mapping[type[PhalanxError], Status] = {
    InvalidRequest: Status(400, "invalid_request_error"),
    InvalidApiKey: Status(401, "invalid_request_error"),
    UnknownModel: Status(404, "invalid_request_error"),
    SlowClient: Status(408, "invalid_request_error"),
    RequestTooLarge: Status(413, "invalid_request_error"),
    WrongMediaType: Status(415, "invalid_request_error"),
    QueueFull: Status(429, "rate_limit_error"),
    EngineUnavailable: Status(503, "service_unavailable_error"),
    PhalanxError: Status(500, "server_error"),
}
"""An error has the status of its nearest ancestor in this table."""


def status_of(error: PhalanxError) -> Status:
    """The table's entry for this error."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def error_object(error: PhalanxError) -> dict[str, Any]:
    """OpenAI's error object, as a body or as an event of a stream."""
    entry = status_of(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    code: str | int | None = error.code if isinstance(error, InvalidRequest) else None
    return {"error": {"message": str(error), "type": entry.type, "param": param, "code": code or entry.status}}


def error_response(error: PhalanxError) -> JSONResponse:
    """The response to a request that failed before the first byte of its answer."""
    headers = {}
    if isinstance(error, (QueueFull, EngineUnavailable)):
        milliseconds = max(1, round(error.retry_after * 1000))
        headers = {"Retry-After": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}
    if isinstance(error, InvalidApiKey):
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(error_object(error), status_of(error).status, headers)


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
    served = Served(
        names=config.served_model_name or (config.engine.model,),
        max_n=config.max_n,
        defaults=defaults or GenerationDefaults(),
        eos_ids=frozenset(tokenizer.eos_ids),
        template_kwargs=config.default_chat_template_kwargs,
    )
    metrics = Metrics(served.names[0])
    journal = Journal(engine, metrics, max_num_seqs=config.engine.max_num_seqs, queue=config.queue, clock=clock)
    health = Health(engine, metrics, stall_s=config.stall_seconds)
    prompts = Prompts(tokenizer)
    tokenize_prompts = Prompts(tokenizer, threads=1)  # a thread of its own: /tokenize must not delay completions
    information = InfoEndpoints(config, engine, served, tokenize_prompts, health, metrics)
    completions = CompletionEndpoints(config, served, prompts, journal, metrics, error_object, clock)

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

    app = FastAPI(title="phalanx", version=__version__, lifespan=lifespan)
    app.state.journal = journal  # run.py waits for its requests when the server stops
    _add_routes(app, config, completions, information)
    _add_error_handlers(app)
    describe_bodies(app)
    return app


def _report(task: asyncio.Task[None], on_failure: Callable[[BaseException], None] | None) -> None:
    """Log the error that ended a background task, if any, and pass it to `on_failure`."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    log.error("%s", error, exc_info=None if isinstance(error, PhalanxError) else error)
    if on_failure is not None:
        on_failure(error)


def _add_routes(
    app: FastAPI, config: ServerConfig, completions: CompletionEndpoints, information: InfoEndpoints
) -> None:
    async def require_key(request: Request) -> None:
        request.state.api_key = check_key(request.headers.get("authorization"), config.api_key)

    authenticated = [Depends(require_key)]  # for /v1 and for endpoints that change state
    add = app.add_api_route
    chat, complete = json_body(ChatBody), json_body(CompletionBody)
    add("/v1/chat/completions", completions.chat, methods=["POST"], dependencies=authenticated, openapi_extra=chat)
    add("/v1/completions", completions.complete, methods=["POST"], dependencies=authenticated, openapi_extra=complete)
    add("/v1/models", information.models, methods=["GET"], dependencies=authenticated)
    add("/v1/models/{name:path}", information.model, methods=["GET"], dependencies=authenticated)
    add("/tokenize", information.tokenize, methods=["POST"], openapi_extra=json_body(TokenizeBody))
    add("/detokenize", information.detokenize, methods=["POST"], openapi_extra=json_body(DetokenizeBody))
    add("/reset_prefix_cache", information.reset_prefix_cache, methods=["POST"], dependencies=authenticated)
    add("/version", information.version, methods=["GET"])
    add("/health", information.health, methods=["GET"])
    add("/ping", information.health, methods=["GET"])
    add("/metrics", information.metrics, methods=["GET"])


def _add_error_handlers(app: FastAPI) -> None:
    async def phalanx_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PhalanxError)
        if status_of(error).status >= 500 and not isinstance(error, EngineUnavailable):
            log.error("%s %s: %s", request.method, request.url.path, error)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": error.status_code}
        return JSONResponse({"error": body}, error.status_code, error.headers)

    async def client_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def unexpected_error(request: Request, error: Exception) -> Response:
        return JSONResponse(error_object(PhalanxError("Internal server error; the server's log has the details.")), 500)

    app.add_exception_handler(PhalanxError, phalanx_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_disconnect)
    app.add_exception_handler(Exception, unexpected_error)
