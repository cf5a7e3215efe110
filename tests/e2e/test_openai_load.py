"""More clients than rows and places: every one gets a full answer or a 429, nobody a broken stream."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
from support.serving import MODEL, Running, sse

from phalanx.memory import process_rss
from phalanx.types import EngineStats, ResetPrefixCache

CLIENTS = 200
MIB = 1 << 20
TOKENS = 12
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


async def one(client: httpx.AsyncClient, seed: int) -> str:
    response = await client.post("/chat/completions", json={**BODY, "seed": seed})
    if response.status_code == 429:
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        return "429"
    assert response.status_code == 200, response.text
    *chunks, usage, done = sse(response.text)
    assert done == "[DONE]" and usage["usage"]["completion_tokens"] == TOKENS
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "full"


def run_all(server: Running) -> Counter[str]:
    async def main() -> Counter[str]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=300, limits=limits) as client:
            return Counter(await asyncio.gather(*(one(client, seed) for seed in range(CLIENTS))))

    return asyncio.run(main())


def emptied(server: Running) -> EngineStats:
    """The engine's numbers with nothing running and no prefix kept."""
    server.call(lambda: server.engine.send(ResetPrefixCache()))
    stats: EngineStats = server.wait_for(server.engine.ping())
    assert (stats.running, stats.waiting, stats.prefix_bytes) == (0, 0, 0)
    return stats


def test_200_streams(server: Running):
    outcome = run_all(server)
    assert outcome["full"] + outcome["429"] == CLIENTS
    assert outcome["full"] >= 48  # what fits at once: 16 rows and 32 places
    assert server.call(lambda: server.server.app.journal.unfinished) == 0
    assert httpx.get(f"{server.origin}/health", timeout=60).status_code == 200


def test_memory_comes_back(real_server: Running):
    """As the engine's own numbers say, and as a client can ask."""

    def over_http() -> dict[str, int]:
        reset = httpx.post(f"{real_server.origin}/reset_prefix_cache", json={}, timeout=60)
        found: dict[str, int] = reset.json()["bytes"]
        return found

    run_all(real_server)  # libraries take what they take once
    before, first = emptied(real_server), over_http()
    own = process_rss()
    run_all(real_server)
    second, after = over_http(), emptied(real_server)
    assert after.active_bytes == before.active_bytes
    assert after.rss_bytes - before.rss_bytes < 32 * MIB
    assert process_rss() - own < 32 * MIB  # the server runs in this process
    assert (second["kv"], second["prefix"], second["active"]) == (0, 0, first["active"])
    assert second["rss"] - first["rss"] < 32 * MIB
