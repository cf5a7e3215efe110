"""More clients than rows and places: every one gets a full answer or a 429, nobody a broken stream."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
from serving import MODEL, Running, sse

CLIENTS = 200
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


def test_200_streams(server: Running):
    async def main() -> Counter[str]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=300, limits=limits) as client:
            return Counter(await asyncio.gather(*(one(client, seed) for seed in range(CLIENTS))))

    outcome = asyncio.run(main())
    assert outcome["full"] + outcome["429"] == CLIENTS
    assert outcome["full"] >= 48  # what fits at once: 16 rows and 32 places
    assert server.call(lambda: server.server._journal.unfinished) == 0
    assert httpx.get(f"{server.origin}/health").status_code == 200
