"""The endpoints of Ollama's API that do not run the model; `dialects/ollama/ollama_models.py` writes their bodies."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec

from phalanx.catalog.local_models import LocalModel, find, local_models
from phalanx.catalog.pull_progress import PullProgress
from phalanx.catalog.short_names import DEMO, repository_of, without_host
from phalanx.errors import InvalidRequest, ModelNotFound, UnknownModel
from phalanx.http.http_exchange import Answer, EventStream, Exchange, Reply, json_answer
from phalanx.http.model_lists import TAG, name_meant
from phalanx.server.dialects.ollama import ollama_models
from phalanx.server.dialects.ollama.ollama_body import OllamaModelBody, OllamaPullBody
from phalanx.server.dialects.ollama.ollama_models import HERE, REFUSED, OllamaModel
from phalanx.server.requests.intake import Intake
from phalanx.server.requests.parsed import ApiModel
from phalanx.server.requests.sampling_fields import resolve_model
from phalanx.supervision.model_commands import model_command
from phalanx.types import ModelInfo

NAME = re.compile(r"\w[\w.:-]{0,95}(/\w[\w.-]{0,95}(:\w[\w.-]{0,127})?)?", re.ASCII)
"""A short name or a hub id, perhaps with a quantisation; never a path."""
PULLS = 4
"""At the same time; each is a process with 100 MB of memory. Further ones wait."""


class OllamaEndpoints:
    """The handlers.

    Args:
        model: the served one, as the engine calls it.
        template: of chats; "" without one.
        info: of the loaded model; raises EngineUnavailable before there is one.
        manages: whether a request may see and change the models on this disk.
    """

    def __init__(
        self,
        served: ApiModel,
        intake: Intake,
        model: str,
        template: str,
        info: Callable[[], ModelInfo],
        manages: Callable[[Exchange], bool],
    ) -> None:
        self._served = served
        self._intake = intake
        self._repository = repository_of(model)
        self._names = {*served.names, model, self._repository}
        self._template = template
        self._info = info
        self._manages = manages
        self._since = int(time.time())
        self._turns = {"pull": asyncio.Semaphore(PULLS), "rm": asyncio.Semaphore(1)}

    async def version(self, _: Exchange) -> Answer:
        """`GET /api/version`: the version of Ollama's API."""
        return json_answer(ollama_models.version())

    async def tags(self, exchange: Exchange) -> Answer:
        """`GET /api/tags`: the served model; to managers also the others on this disk."""
        others = await asyncio.to_thread(self._others) if self._manages(exchange) else []
        return json_answer(ollama_models.tags([self._model(name) for name in self._served.names], others))

    async def running(self, _: Exchange) -> Answer:
        """`GET /api/ps`: the served model, as loaded."""
        return json_answer(ollama_models.running([self._model(self._served.names[0])]))

    async def show(self, exchange: Exchange) -> Answer:
        """`POST /api/show`: format, family, context and template of a model."""
        name = await self._intake.read(exchange, OllamaModelBody, _named)
        bare = name.removesuffix(TAG)
        if not self._is_served(name) and self._manages(exchange) and NAME.fullmatch(without_host(bare)):
            try:
                return json_answer(ollama_models.show_local(await asyncio.to_thread(find, bare)))
            except ModelNotFound:
                pass  # the error below names the served model
        return json_answer(ollama_models.show(self._model(resolve_model(name, self._served))))

    async def pull(self, exchange: Exchange) -> Reply:
        """`POST /api/pull`: a line of JSON for each step, unless `stream` is false."""
        body = await self._intake.read(exchange, OllamaPullBody, lambda body: body)
        name = _named(body)
        lines = _encoded(HERE) if self._is_served(name) else self._command("pull", _manageable(name))
        if body.stream is not False:
            return EventStream(lines, lambda: None, "application/x-ndjson")
        return await exchange.unless_lost(_whole(lines))

    async def delete(self, exchange: Exchange) -> Answer:
        """`DELETE /api/delete`: delete a model of this disk."""
        name = await self._intake.read(exchange, OllamaModelBody, _named)
        if self._is_served(name):
            raise InvalidRequest(f"{name} is served; stop this server first.", param="model")
        bare = _manageable(name)
        try:
            await asyncio.to_thread(find, bare)
        except ModelNotFound as error:
            raise UnknownModel(str(error), param="model") from error
        await _last(self._command("rm", bare))
        return Answer()

    async def refuse(self, exchange: Exchange) -> Answer:
        """The endpoints that this server does not have."""
        raise InvalidRequest(REFUSED[exchange.path])

    async def _command(self, verb: Literal["pull", "rm"], name: str) -> AsyncGenerator[bytes]:
        """The lines of a command, once it is its turn. Closing the generator ends the command."""
        turn = self._turns[verb]
        if turn.locked():
            async for line in _encoded([PullProgress("waiting for other models")]):
                yield line
        async with turn, aclosing(model_command(verb, name)) as lines:
            async for line in lines:
                yield line

    def _is_served(self, name: str) -> bool:
        return name_meant(name, self._names) is not None

    def _others(self) -> list[LocalModel]:
        """The models on this disk that can be used, but are not served."""
        return [
            model
            for model in local_models()
            if not model.lacks and model.name not in {DEMO, *self._names} and model.repository != self._repository
        ]

    def _model(self, name: str) -> OllamaModel:
        return OllamaModel(
            name=name,
            info=self._info(),
            calls_tools=self._served.tool_parser is not None and self._served.auto_tools,
            reasons=self._served.formats.reasoning is not None,
            since=self._since,
            template=self._template,
        )


def _named(body: OllamaModelBody) -> str:
    name = body.model or body.name
    if not name:
        message = "Missing required parameter: 'model'."
        raise InvalidRequest(message, param="model", code="missing_required_parameter")
    return name


def _manageable(name: str) -> str:
    """The name without Ollama's tag.

    Raises:
        InvalidRequest: it may be a path of this machine.
    """
    bare = name.removesuffix(TAG)
    if not NAME.fullmatch(without_host(bare)):
        raise InvalidRequest(f"{name[:80]!r} is neither a short name nor a hub id (owner/name).", param="model")
    return bare


async def _encoded(lines: Sequence[PullProgress]) -> AsyncGenerator[bytes]:
    for line in lines:
        yield msgspec.json.encode(line) + b"\n"


async def _whole(lines: AsyncGenerator[bytes]) -> Answer:
    async with aclosing(lines):
        return json_answer(await _last(lines))


async def _last(lines: AsyncGenerator[bytes]) -> dict[str, object]:
    """The last line of a command.

    Raises:
        InvalidRequest: it is an error.
    """
    last = b"{}"
    async for line in lines:
        last = line
    parsed: dict[str, object] = json.loads(last)
    if "error" in parsed:
        raise InvalidRequest(str(parsed["error"]), param="model")
    return parsed
