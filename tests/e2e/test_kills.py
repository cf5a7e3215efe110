"""Ranks are killed again and again under load: every stream is whole and has the text that it would have had."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from msgspec.structs import replace
from support.driver import PATIENT
from support.examples import SOAK
from support.serving import CONFIG, MODEL, Running, running_server, sse

from phalanx.demo import MODEL_DIR
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

KILLS = 50 if SOAK else 3  # 50 in ten minutes
PAUSE_S = 12.0 if SOAK else 1.0  # on average between two of them
CLIENTS = 8 if SOAK else 4
PROMPTS = 12 if SOAK else 4
TOKENS = 500 if SOAK else 150
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


def body(i: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me story number {i} about the sea."}],
        "temperature": 0.8 * (i % 2),
        "seed": i,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }


async def stream(client: httpx.AsyncClient, i: int) -> str:
    """The text of a stream, asked for until the server takes it."""
    while True:
        async with client.stream("POST", "/chat/completions", json=body(i)) as response:
            text = (await response.aread()).decode()
        if response.status_code not in (429, 503):  # the engine restarts: as clients do, try again
            break
        await asyncio.sleep(0.2)
    assert response.status_code == 200, text
    *chunks, done = sse(text)
    assert done == "[DONE]"
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


# A single rank dies in `test_openai_restart.py` too, in the midst of every dialect.
@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.soak), 2])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    config = replace(CONFIG.engine, model=str(MODEL_DIR), max_num_seqs=8, kv_cache_gb=0.2, prefix_cache_gb=0.05)
    if request.param > 1:
        config = replace(config, tensor_parallel_size=request.param, backend="mpi", **PATIENT)
    with running_server(
        Tokenizer.load(Path(MODEL_DIR)), EngineProcess(config), replace(CONFIG, engine=config)
    ) as found:
        yield found


@pytest.mark.full
@pytest.mark.grows
@pytest.mark.timeout(1800 if SOAK else 900)
def test_no_stream_is_lost_by_kills(server: Running) -> None:
    choose = random.Random(1)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=600) as client:
            expected = [await stream(client, i) for i in range(PROMPTS)]
            over = asyncio.Event()
            whole = 0

            async def ask() -> None:
                nonlocal whole
                while not over.is_set():
                    i = choose.randrange(PROMPTS)
                    assert await stream(client, i) == expected[i]
                    whole += 1

            asked = [asyncio.create_task(ask()) for _ in range(CLIENTS)]
            for _ in range(KILLS):
                await asyncio.sleep(choose.uniform(0, 2 * PAUSE_S))
                engine = server.engine
                assert isinstance(engine, EngineProcess)
                if pids := sorted(engine.rank_pids.values()):
                    psutil.Process(choose.choice(pids)).send_signal(choose.choice(SIGNALS))
            over.set()
            await asyncio.gather(*asked)
            assert whole >= CLIENTS
            while (await client.get(f"{server.origin}/health")).json()["status"] != "ok":
                await asyncio.sleep(0.05)

    asyncio.run(main())
