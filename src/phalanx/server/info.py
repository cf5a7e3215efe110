"""The endpoints that do not run the model: models, tokenize, version, health, metrics.

Does not know requests in progress; `routes.py` has the completion endpoints.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from phalanx import __version__
from phalanx.config import ServerConfig
from phalanx.errors import EngineUnavailable
from phalanx.server.health import Health
from phalanx.server.intake import read_body
from phalanx.server.journal import describe
from phalanx.server.metrics import Metrics
from phalanx.server.parsed import Served
from phalanx.server.prompts import Prompts
from phalanx.server.sampling import resolve_model
from phalanx.server.schema import DetokenizeBody, TokenizeBody
from phalanx.server.validate import parse_detokenize, parse_tokenize
from phalanx.supervision.client import EngineClient
from phalanx.types import ModelInfo, ResetPrefixCache


class InfoEndpoints:
    """The handlers. None of them waits for a request that the model computes."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient,
        served: Served,
        prompts: Prompts,
        health: Health,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._engine = engine
        self._served = served
        self._prompts = prompts
        self._health = health
        self._metrics = metrics
        self._created = int(time.time())

    async def models(self) -> JSONResponse:
        """`GET /v1/models`"""
        info = self._info()
        return JSONResponse({"object": "list", "data": [self._card(name, info) for name in self._served.names]})

    async def model(self, name: str) -> JSONResponse:
        """`GET /v1/models/{name}`"""
        return JSONResponse(self._card(resolve_model(name, self._served), self._info()))

    async def tokenize(self, request: Request) -> JSONResponse:
        """`POST /tokenize`, vLLM's shape."""
        body = await read_body(request, TokenizeBody, self._config.max_body_bytes)
        parsed = parse_tokenize(body, self._served)
        info = self._info()
        if isinstance(parsed.source, str):
            tokens = await self._prompts.encode(parsed.source, add_special_tokens=parsed.add_special_tokens)
        else:
            tokens = await self._prompts.encode_chat(parsed.source)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
        if parsed.with_texts:
            answer["token_strs"] = [self._prompts.tokenizer.token_text(token) for token in tokens]
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> JSONResponse:
        """`POST /detokenize`, vLLM's shape."""
        body = await read_body(request, DetokenizeBody, self._config.max_body_bytes)
        tokens = parse_detokenize(body, self._served, self._info().vocab_size)
        return JSONResponse({"prompt": await self._prompts.decode(tokens)})

    async def reset_prefix_cache(self) -> JSONResponse:
        """`POST /reset_prefix_cache`, as in vLLM: drop all cached prefixes. Answers once the memory is free."""
        self._engine.send(ResetPrefixCache())
        stats = await self._engine.ping()
        self._metrics.stats(stats)
        sizes = {"kv": stats.kv_bytes, "prefix": stats.prefix_bytes, "active": stats.active_bytes}
        return JSONResponse({"bytes": {**sizes, "rss": stats.rss_bytes}})

    async def version(self) -> JSONResponse:
        """`GET /version`"""
        return JSONResponse({"version": __version__})

    async def health(self) -> JSONResponse:
        """`GET /health`: 200 only while the engine's own loop answers."""
        status, body = self._health.report()
        return JSONResponse(body, status)

    async def metrics(self) -> Response:
        """`GET /metrics`, Prometheus' text format."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _info(self) -> ModelInfo:
        """The served model. Known since the engine was ready for the first time, also during a restart.

        Raises:
            EngineUnavailable: the engine has never been ready.
        """
        info = self._engine.info
        if info is None:
            state = self._engine.state
            raise EngineUnavailable(describe(state.phase, state.reason), retry_after=2.0)
        return info

    def _card(self, name: str, info: ModelInfo) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "phalanx",
            "root": self._config.engine.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }
