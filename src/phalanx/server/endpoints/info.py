"""The endpoints that do not run the model: models, tokenize, version, health, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST

from phalanx import __version__
from phalanx.errors import EngineUnavailable
from phalanx.http.api_keys import ApiKeys
from phalanx.http.http_exchange import Answer, Exchange, Reply, json_answer
from phalanx.http.media_types import require_json
from phalanx.http.model_lists import lm_studio_card, lm_studio_list, model_card, model_list
from phalanx.http.vector_requests import no_vectors
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody
from phalanx.server.endpoints.engine_health import EngineHealth
from phalanx.server.fields.json_pieces import to_json
from phalanx.server.fields.openai_bodies import Body, DetokenizeBody, TokenizeBody
from phalanx.server.prompts.chat_encoding import ChatEncoder
from phalanx.server.prompts.prompt_encoder import Prompts
from phalanx.server.requests.intake import Intake
from phalanx.server.requests.parsed import ApiModel, ChatRequest
from phalanx.server.requests.sampling_fields import resolve_model
from phalanx.server.requests.validate import parse_detokenize, parse_tokenize
from phalanx.server.sequences.journal import describe
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision.client import EngineClient
from phalanx.types import ModelInfo, ResetPrefixCache

B = TypeVar("B", bound=Body)


class InfoEndpoints:
    """The handlers, which never wait for the model."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient,
        served: ApiModel,
        intake: Intake,
        prompts: Prompts,
        chats: ChatEncoder,
        health: EngineHealth,
        metrics: ServerMetrics,
        keys: ApiKeys,
    ) -> None:
        self._config = config
        self._engine = engine
        self._served = served
        self._intake = intake
        self._prompts = prompts
        self._chats = chats
        self._health = health
        self._metrics = metrics
        self._keys = keys
        self._created = int(time.time())

    async def models(self, exchange: Exchange) -> Answer:
        """`GET /v1/models`: the names under which the model is served."""
        return json_answer(model_list(self._cards(), exchange.headers, exchange.query))

    async def model(self, exchange: Exchange) -> Answer:
        """`GET /v1/models/{name}`: one model."""
        return json_answer(model_card(self._asked_for(exchange), exchange.headers))

    async def lm_studio_models(self, _: Exchange) -> Answer:
        """`GET /api/v0/models`, LM Studio's list."""
        return json_answer(lm_studio_list(self._cards()))

    async def lm_studio_model(self, exchange: Exchange) -> Answer:
        """`GET /api/v0/models/{name}`: one model."""
        return json_answer(lm_studio_card(self._asked_for(exchange)))

    async def other_outputs(self, _: Exchange) -> Answer:
        """Embeddings and scores, which this server does not compute. The body is not read."""
        raise no_vectors(f"This server's model, {self._served.names[0]}, writes text.")

    async def tokenize(self, exchange: Exchange) -> Answer:
        """`POST /tokenize`, as in vLLM: the tokens of a prompt or a chat."""
        info = self.loaded()
        with self._intake.memory(exchange.owner or "") as memory:
            parsed = await self._intake.read(
                exchange, TokenizeBody, lambda body: parse_tokenize(body, self._served), memory
            )
            if isinstance(parsed.source, str):
                tokens = await self._prompts.encode(
                    parsed.source, add_special_tokens=parsed.add_special_tokens, limit=info.max_model_len
                )
            else:
                tokens = (await self._prompts.encode_chat(parsed.source, limit=info.max_model_len)).tokens

        def work() -> bytes:
            answer: dict[str, Any] = {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
            if parsed.with_texts:
                answer["token_strs"] = [self._prompts.tokenizer.token_text(token) for token in tokens]
            return to_json(answer)

        return Answer(await self._prompts.run(len(tokens), work))

    def counting(
        self, dialect: Dialect[B], body_of: Callable[[int], dict[str, Any]]
    ) -> Callable[[Exchange], Awaitable[Reply]]:
        """The handler that counts the prompt tokens of a dialect's requests.

        Args:
            body_of: makes the answer's body from the number.
        """

        async def endpoint(exchange: Exchange) -> Answer:
            """The number of tokens of such a request's prompt."""
            info, owner = self.loaded(), exchange.owner or ""
            with self._intake.memory(owner) as memory:
                asked = await self._intake.read(
                    exchange, dialect.body, lambda body: dialect.parse(body, self._served), memory, dialect.readers
                )
                assert isinstance(asked, ParsedBody) and isinstance(asked.request, ChatRequest)
                encoded = await self._chats.encode(asked.request, owner, info.max_model_len)
            return json_answer(body_of(sum(map(len, encoded.prompts))))

        return endpoint

    async def detokenize(self, exchange: Exchange) -> Answer:
        """`POST /detokenize`, as in vLLM: the text of tokens."""
        info = self.loaded()
        tokens = await self._intake.read(
            exchange, DetokenizeBody, lambda body: parse_detokenize(body, self._served, info)
        )
        return json_answer({"prompt": await self._prompts.decode(tokens)})

    async def tokenizer_info(self, _: Exchange) -> Answer:
        """`GET /tokenizer_info`, as in vLLM: special tokens and the chat template."""
        return json_answer(self._prompts.tokenizer.describe())

    async def reset_prefix_cache(self, exchange: Exchange) -> Answer:
        """`POST /reset_prefix_cache`, as in vLLM: drop all cached prefixes. Answers once the memory is free.

        The body is not read, but must be declared as JSON, so that a web page cannot send the request.
        """
        require_json(exchange.headers)
        self._engine.send(ResetPrefixCache())
        stats = await self._engine.ping()
        self._metrics.stats(stats)
        sizes = {"kv": stats.kv_bytes, "prefix": stats.prefix_bytes, "active": stats.active_bytes}
        return json_answer({"bytes": {**sizes, "rss": stats.rss_bytes}})

    async def version(self, _: Exchange) -> Answer:
        """`GET /version`: the version of phalanx."""
        return json_answer({"version": __version__})

    async def health(self, exchange: Exchange) -> Answer:
        """`GET /health`: 200 only while the engine's own loop answers. If the server has keys, details need one."""
        status, body = self._health.report()
        if not self._keys.may_see_details(exchange.headers):
            body = {"status": "ok" if status == 200 else "unavailable"}
        return json_answer(body, status)

    async def metrics(self, _: Exchange) -> Answer:
        """`GET /metrics`, Prometheus' text format."""
        return Answer(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def loaded(self) -> ModelInfo:
        """The served model, known from the engine's first start on, also during a restart.

        Raises:
            EngineUnavailable: the engine has never been ready.
        """
        info = self._engine.info
        if info is None:
            state = self._engine.state
            raise EngineUnavailable(describe(state.phase, state.reason), retry_after=2.0)
        return info

    def _cards(self) -> list[dict[str, Any]]:
        info = self.loaded()
        return [self._card(name, info) for name in self._served.names]

    def _asked_for(self, exchange: Exchange) -> dict[str, Any]:
        return self._card(resolve_model(exchange.rest, self._served), self.loaded())

    def _card(self, name: str, info: ModelInfo) -> dict[str, Any]:
        reasoning = self._served.formats.reasoning
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "phalanx",
            "root": self._served.names[0],
            "parent": None,
            "max_model_len": info.max_model_len,
            "tool_call_parser": self._served.tool_parser,
            "reasoning_parser": None if reasoning is None else reasoning.name,
        }
