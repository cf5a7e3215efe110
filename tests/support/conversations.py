"""What tests of dialects share: conversations with a scripted model, prompts as it read them, and spoiled bodies."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import httpx
from support.examples import SOAK
from support.scripted_model import ScriptedEngine
from support.serving import CONFIG, serving

from phalanx.server.settings.server_settings import ServerConfig
from phalanx.text.tokenizer import Tokenizer

BODIES = 2000 if SOAK else 250
"""By chance, for each dialect."""
Scenario = Callable[[httpx.AsyncClient, ScriptedEngine], Awaitable[Any]]


def run(
    tokenizer: Tokenizer,
    answers: Iterable[str] | Callable[[str], str],
    scenario: Scenario,
    config: ServerConfig = CONFIG,
) -> Any:
    """Play a scenario with a client of a server whose model says these answers. Returns what the scenario does."""

    async def main() -> Any:
        engine = ScriptedEngine(tokenizer, answers)
        async with asyncio.timeout(240), serving(tokenizer, engine, config) as client:
            return await scenario(client, engine)

    return asyncio.run(main())


def prompts(engine: ScriptedEngine) -> list[str]:
    """What the model has read, special tokens and all."""
    sent = [message.request.prompt for message in engine.received if hasattr(message, "request")]
    return [engine._tokenizer.decode(prompt, skip_special_tokens=False) for prompt in sent]


def spoiled(body: dict[str, Any], odd: Sequence[Any], rng: random.Random) -> dict[str, Any]:
    """The body, or every other time with one value in it replaced by an odd one."""
    if rng.random() < 0.5:
        return body
    place: Any = (body := copy.deepcopy(body))
    while True:
        key = rng.choice(list(place if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
            place[key] = rng.choice(odd)
            return body
        place = place[key]
