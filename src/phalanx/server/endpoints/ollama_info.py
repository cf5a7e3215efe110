"""The endpoints of Ollama's API that do not run the model. What they say is in `dialects/ollama/ollama_models.py`."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import JSONResponse

from phalanx.errors import InvalidRequest
from phalanx.server.dialects.ollama import ollama_models
from phalanx.server.dialects.ollama.ollama_body import OllamaModelBody
from phalanx.server.dialects.ollama.ollama_dialect import resolve_name
from phalanx.server.dialects.ollama.ollama_models import REFUSED, OllamaModel
from phalanx.server.requests.intake import Intake
from phalanx.server.requests.parsed import ApiModel
from phalanx.types import ModelInfo


class OllamaEndpoints:
    """The handlers.

    Args:
        template: of chats; "" without one.
        info: of the loaded model; raises EngineUnavailable before there is one.
    """

    def __init__(self, served: ApiModel, intake: Intake, template: str, info: Callable[[], ModelInfo]) -> None:
        self._served = served
        self._intake = intake
        self._template = template
        self._info = info
        self._since = int(time.time())

    async def version(self) -> JSONResponse:
        """`GET /api/version`"""
        return JSONResponse(ollama_models.version())

    async def tags(self) -> JSONResponse:
        """`GET /api/tags`"""
        return JSONResponse(ollama_models.tags([self._model(name) for name in self._served.names]))

    async def running(self) -> JSONResponse:
        """`GET /api/ps`"""
        return JSONResponse(ollama_models.running([self._model(self._served.names[0])]))

    async def show(self, request: Request) -> JSONResponse:
        """`POST /api/show`"""
        name = await self._intake.read(request, OllamaModelBody, self._named)
        return JSONResponse(ollama_models.show(self._model(name)))

    async def refuse(self, request: Request) -> JSONResponse:
        """The endpoints that this server does not have."""
        raise InvalidRequest(REFUSED[request.url.path.rstrip("/")])

    def _named(self, body: OllamaModelBody) -> str:
        name = body.model or body.name
        if not name:
            message = "Missing required parameter: 'model'."
            raise InvalidRequest(message, param="model", code="missing_required_parameter")
        return resolve_name(name, self._served)

    def _model(self, name: str) -> OllamaModel:
        return OllamaModel(
            name=name,
            info=self._info(),
            shapes=self._served.shapes,
            auto_tools=self._served.auto_tools,
            since=self._since,
            template=self._template,
        )
