"""`GET /v1/requests/{id}`: the life of one request, for its owner and the admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.errors import UnknownPath
from phalanx.http.http_exchange import Answer, Exchange, json_answer
from phalanx.server.endpoints.engine_health import EngineHealth
from phalanx.server.prompts.prompt_encoder import Prompts
from phalanx.server.sequences.request_log import MAX_LIVES, RequestLife, RequestLog, message_at
from phalanx.server.sequences.request_story import Progress, life_json
from phalanx.supervision.client import EngineClient


class RequestLives:
    """Answers from the log of requests, and finds the messages in which prompts left what was kept.

    Args:
        sees_all: whether a client, whose key was accepted, sees every owner's requests.
    """

    def __init__(
        self,
        request_log: RequestLog,
        engine: EngineClient,
        health: EngineHealth,
        prompts: Prompts,
        sees_all: Callable[[Exchange], bool],
        clock: Callable[[], float],
    ) -> None:
        self._log = request_log
        self._engine = engine
        self._health = health
        self._prompts = prompts
        self._sees_all = sees_all
        self._clock = clock
        self._locating: set[asyncio.Task[None]] = set()
        request_log.when_differs = self._locate

    async def life(self, exchange: Exchange) -> Answer:
        """`GET /v1/requests/{id}`: what a request waited for, reused, computed and lost."""
        life = self._log.find(exchange.rest, self.whose(exchange))
        if life is None:
            raise UnknownPath(
                f"No request {exchange.rest[:80]!r} of this key is among the last {MAX_LIVES}. The id is that of the "
                "answer, or its header x-request-id."
            )
        return json_answer(life_json(life, self.progress(), self._clock(), self._checks()))

    def close(self) -> None:
        """Look for no more messages."""
        for task in self._locating:
            task.cancel()

    def whose(self, exchange: Exchange) -> str | None:
        """The owner whose requests a client sees; None: everyone's."""
        return None if self._sees_all(exchange) else exchange.owner or ""

    def progress(self) -> Progress:
        """The engine's last figures."""
        stats = self._health.stats
        return {} if stats is None else {one.id: one for one in stats.sequences}

    def _checks(self) -> int:
        info = self._engine.info
        return 0 if info is None or info.self_test is None else info.self_test.reductions

    def _locate(self, life: RequestLife, common: list[int]) -> None:
        if life.contents:
            task = asyncio.create_task(self._find_message(life, life.contents, common))
            self._locating.add(task)
            task.add_done_callback(self._locating.discard)

    async def _find_message(self, life: RequestLife, contents: tuple[str, ...], common: list[int]) -> None:
        text = await self._prompts.decode(common)
        life.left_in = await self._prompts.run(len(text), lambda: message_at(text, contents))
