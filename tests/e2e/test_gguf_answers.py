"""A trained model served from its GGUF file: the same right answer by every kind of group, through the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from support.driver import PATIENT
from support.gateways import running_gateway
from support.real_model import CHATS, real_gguf, recorded
from support.serving import CONFIG, MODEL, running_server

from phalanx.config import EngineConfig
from phalanx.model.loading.resolve import resolve
from phalanx.speculation_config import NgramSpeculation
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

DRAFTS = NgramSpeculation(num_speculative_tokens=4, control="always")
KINDS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "three ranks": {"tensor_parallel_size": 3, "backend": "mpi", **PATIENT},  # nine heads
    "two stages": {"pipeline_parallel_size": 2, **PATIENT},
    "one rank with drafts": {"speculative_config": DRAFTS},
    "three ranks with drafts": {"tensor_parallel_size": 3, "backend": "mpi", "speculative_config": DRAFTS, **PATIENT},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_gguf(tmp_path_factory.mktemp("package"))


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "gguf-answers"))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_capital_of_france_is_paris_through_the_gateway(kind: str, file: Path, cache: None) -> None:
    engine = EngineConfig(model=str(file), max_num_seqs=4, kv_cache_gb=0.2, prefix_cache_gb=0.05)
    engine = replace(engine, **KINDS[kind])
    tokenizer = Tokenizer.load(resolve(str(file)))
    with (
        running_server(tokenizer, EngineProcess(engine), replace(CONFIG, engine=engine)) as server,
        running_gateway(server.origin) as url,
    ):
        body = {"model": MODEL, "messages": [{"role": "user", "content": CHATS[0]}], "temperature": 0, "max_tokens": 64}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    text = answer.json()["choices"][0]["message"]["content"]
    assert "Paris" in text and text == tokenizer.decode(recorded()[0]["tokens"])
