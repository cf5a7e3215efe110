"""The bundled model, or a trained one, on a real engine, behind an API key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace
from support.serving import CONFIG, Running, running_server

from phalanx.demo import MODEL_DIR
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

KEY = "secret"
SERVED = "demo"
QUEUE = 256  # what a benchmark sends at once waits, and is not refused


@contextmanager
def demo_server(model: Path = MODEL_DIR, **settings: Any) -> Iterator[Running]:
    """The server, in a thread of this process, with further settings of a server's."""
    engine = replace(CONFIG.engine, model=str(model), kv_cache_gb=0.25, prefix_cache_gb=0.05, memory_guard_gb=0.5)
    config = replace(CONFIG, engine=engine, api_key=(KEY,), served_model_name=(SERVED,), queue=QUEUE, **settings)
    with running_server(Tokenizer.load(model), EngineProcess(engine), config) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> Any:
    """Post a JSON body to an endpoint below /v1, with no client's library. Returns the answer's JSON."""
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{server.base_url}/{path}", json={"model": SERVED, **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()
