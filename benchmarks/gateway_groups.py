"""What replicas are for: two groups of two ranks behind the gateway beside one of four, and where conversations go.

    groups     TTFT and tokens/s at some concurrencies: one server of four ranks, two of two ranks behind the gateway;
               the same with replicas that only sleep, one alone and two behind the gateway: what the gateway adds
    affinity   a trace of conversations over two replicas: time to first token and cached share, by policy

The bundled model, so that ranks share this machine's processors: figures compare ways, not machines.
`gateway_report.py` runs the parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from routers import OURS, Target, running
from servers import DEMO, MODEL_NAME, endless_demo, phalanx
from sleeping_replica import MODEL as SLEEPING
from sleeping_replica import replica

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.bench.load_generator import closed_loop, distribution, ttft

CONCURRENCIES = (1, 2, 4)
PLACES = "4"  # rows of a server
FIRST_S, PAUSE_S = 0.05, 0.01  # of replicas that sleep: about a prefill and a step
POLICIES = ("round_robin", "cache_aware")
TURN_TOKENS = 16
TURN_WORDS = 90  # that a user adds in a turn; a conversation stays within the demo model's 4,096 tokens
AT_ONCE = 3  # conversations
NOT_SAID = {str(token): -100 for token in range(5)}  # tokens of the demo model that are no text
WORDS = "lighthouse keeper storm harbour lantern rope signal tide gull boat fog bell stone stair oil night wind".split()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that `measure` reads."""
    parser.add_argument("--group-requests", type=int, default=8, help="per client, at each concurrency")
    parser.add_argument("--group-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--conversations", type=int, default=9)
    parser.add_argument("--turns", type=int, default=6)


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part's figures."""
    if part == "groups":
        return groups(options.group_requests, options.group_tokens)
    return {policy: affinity(policy, options.conversations, options.turns) for policy in POLICIES}


@contextmanager
def behind_the_gateway(urls: list[str], model: str, *flags: str) -> Iterator[str]:
    """The gateway before these; yields its URL with /v1."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        target = Target(replicas=tuple(url.removesuffix("/v1") for url in urls), model=model)
        with running(OURS, None, target, Path(directory), *flags) as router:
            yield f"{router.url}/v1"


# Groups ----------------------------------------------------------------------------------------------------------


def groups(n: int, tokens: int) -> dict[str, Any]:
    """TTFT p95 and tokens/s of each set-up, by concurrency."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory, ExitStack() as stack:
        model = endless_demo(Path(directory))
        with phalanx(model, "--tp", "4", "--max-num-seqs", PLACES) as url:
            found["one group of 4"] = asyncio.run(by_concurrency(url, MODEL_NAME, n, tokens))
        urls = [stack.enter_context(phalanx(model, "--tp", "2", "--max-num-seqs", PLACES)) for _ in range(2)]
        url = stack.enter_context(behind_the_gateway(urls, MODEL_NAME))
        found["2 groups of 2"] = asyncio.run(by_concurrency(url, MODEL_NAME, n, tokens))
    with ExitStack() as stack:
        urls = [stack.enter_context(replica(events=tokens, first_s=FIRST_S, pause_s=PAUSE_S)) for _ in range(2)]
        found["one that sleeps"] = asyncio.run(by_concurrency(f"{urls[0]}/v1", SLEEPING, n, tokens))
        url = stack.enter_context(behind_the_gateway(urls, SLEEPING))
        found["2 that sleep"] = asyncio.run(by_concurrency(url, SLEEPING, n, tokens))
    return found


async def by_concurrency(url: str, model: str, n: int, tokens: int) -> dict[int, dict[str, float]]:
    """TTFT p95, ms, and tokens/s, with n requests per client."""
    found = {}
    async with open_client(url) as client:
        await asyncio.gather(*(stream_chat(client, body(model, f"warm up {i}", 8)) for i in range(4)))
        for concurrency in CONCURRENCIES:
            texts = [f"Story {concurrency} {i}: {WORDS[i % len(WORDS)]}" for i in range(n * concurrency)]
            bodies = [body(model, text, tokens) for text in texts]
            load = await closed_loop(client, bodies, concurrency)
            if load.failures:
                raise RuntimeError(f"{url}: {load.failures[0]}")
            found[concurrency] = {
                "ttft_ms_p50": round(ttft(load).percentiles[50], 1),
                "ttft_ms_p95": round(ttft(load).percentiles[95], 1),
                "tokens_per_s": round(load.tokens_per_s, 1),
            }
    return found


def body(model: str, text: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }


# Affinity --------------------------------------------------------------------------------------------------------


def affinity(policy: str, n_conversations: int, n_turns: int) -> dict[str, float]:
    """The trace over two fresh replicas of one rank each."""
    with ExitStack() as stack:
        urls = [stack.enter_context(phalanx(DEMO, "--max-num-seqs", PLACES)) for _ in range(2)]
        url = stack.enter_context(behind_the_gateway(urls, MODEL_NAME, "--policy", policy))
        return asyncio.run(trace(url, n_conversations, n_turns))


async def trace(url: str, n_conversations: int, n_turns: int) -> dict[str, float]:
    """Turns of conversations in a random order that is the same for every policy."""
    draw = random.Random(45)
    talks = [Conversation(url, draw.randrange(1 << 30)) for _ in range(n_conversations)]
    order = [talk for talk in talks for _ in range(n_turns)]
    draw.shuffle(order)
    remaining = iter(order)
    async with aiohttp.ClientSession() as session:
        await Conversation(url, 0).turn(session)

        async def client() -> None:
            for talk in remaining:
                await talk.turn(session)

        begun = time.monotonic()
        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        wall_s = time.monotonic() - begun
    firsts = distribution([first for talk in talks for first in talk.firsts_s])
    prompt, cached = (sum(getattr(talk, name) for talk in talks) for name in ("prompt_tokens", "cached_tokens"))
    return {
        "turns": len(order),
        "ttft_ms_mean": round(firsts.mean, 1),
        "ttft_ms_p95": round(firsts.percentiles[95], 1),
        "prompt_tokens": prompt,
        "cached_share": round(cached / prompt, 4),
        "wall_s": round(wall_s, 2),
    }


class Conversation:
    """Says something more in each turn, and sends all that was said."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._draw = random.Random(seed)
        self._messages: list[dict[str, str]] = []
        self._turns = asyncio.Lock()
        self.firsts_s: list[float] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0

    async def turn(self, session: aiohttp.ClientSession) -> None:
        """One turn; a second one waits for it."""
        async with self._turns:
            self._messages.append({"role": "user", "content": " ".join(self._draw.choices(WORDS, k=TURN_WORDS))})
            asked = body(MODEL_NAME, "", TURN_TOKENS) | {"messages": self._messages, "logit_bias": NOT_SAID}
            asked["stream"] = True
            text = ""
            begun = time.perf_counter()
            async with session.post(f"{self._url}/chat/completions", json=asked) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    if piece and not text:
                        self.firsts_s.append(time.perf_counter() - begun)
                    text += piece
                    if usage := event.get("usage"):
                        self.prompt_tokens += usage["prompt_tokens"]
                        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            if not text:
                raise RuntimeError(f"{self._url}: an answer without text")
            self._messages.append({"role": "assistant", "content": text})
