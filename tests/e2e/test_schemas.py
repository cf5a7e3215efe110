"""Answers to JSON schemas, of a trained model and of the bundled one: each that ends is one, with drafts and without.

`make test-full` asks the covering set of the bundled model, and `make soak` all hundred schemas of both, on three ranks
too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from msgspec.structs import replace
from support.driver import PATIENT
from support.real_model import real_model
from support.schemas import COVERING, SCHEMAS, Schema
from support.serving import CONFIG, MODEL, Running, running_server

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.speculation_config import NgramSpeculation
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

MAX_TOKENS = 512
ENDS = 0.9  # of greedy answers, by themselves
DRAFTS = NgramSpeculation(num_speculative_tokens=4, control="always")
THREE = {"tensor_parallel_size": 3, "backend": "mpi", **PATIENT}
"""SmolLM2 has nine heads: three is the only degree above one."""


@contextmanager
def serving(path: Path, **engine: Any) -> Iterator[Running]:
    config = EngineConfig(model=str(path), max_num_seqs=16, kv_cache_gb=0.5, prefix_cache_gb=0.05)
    config = replace(config, **engine)
    with running_server(
        Tokenizer.load(path), EngineProcess(config), replace(CONFIG, engine=config, queue=256)
    ) as running:
        yield running


def answers(server: Running, names: Sequence[str], temperature: float) -> dict[str, dict[str, Any]]:
    """By schema, what is answered to its question, all asked at once."""

    async def ask(client: httpx.AsyncClient, seed: int, asked: str, schema: Schema) -> dict[str, Any]:
        named = {"name": "answer", "schema": schema, "strict": True}
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{asked} Answer in JSON."}],
            "response_format": {"type": "json_schema", "json_schema": named},
            "max_tokens": MAX_TOKENS,
            "temperature": temperature,
            "seed": seed,
            "logprobs": True,
        }
        response = await client.post("/chat/completions", json=body)
        assert response.status_code == 200, (asked, response.text)
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    async def main() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=900) as client:
            asked = [ask(client, seed, *SCHEMAS[name]) for seed, name in enumerate(names)]
            return list(await asyncio.gather(*asked))

    return dict(zip(names, asyncio.run(main()), strict=True))


def check(found: Mapping[str, dict[str, Any]]) -> list[str]:
    """Judge answers by their schemas. Returns the names of those that did not end."""
    cut = []
    for name, choice in found.items():
        if choice["finish_reason"] == "length":
            cut.append(name)
            continue
        assert choice["finish_reason"] == "stop", (name, choice)
        value = json.loads(choice["message"]["content"])
        validator = jsonschema_rs.validator_for(SCHEMAS[name][1], validate_formats=True)
        assert validator.is_valid(value), (name, value, [error.message for error in validator.iter_errors(value)])
    return cut


def tokens(found: Mapping[str, dict[str, Any]]) -> dict[str, list[str]]:
    return {name: [token["token"] for token in choice["logprobs"]["content"]] for name, choice in found.items()}


def compare(path: Path, names: Sequence[str], **engine: Any) -> None:
    """Greedy and drawn answers, without drafts and with them."""
    with serving(path, **engine) as server:
        plain = {temperature: answers(server, names, temperature) for temperature in (0, 1)}
    with serving(path, **engine, speculative_config=DRAFTS) as server:
        drafted = {temperature: answers(server, names, temperature) for temperature in (0, 1)}
    for temperature in (0, 1):
        cut = check(plain[temperature])
        print(f"temperature {temperature}: {len(names) - len(cut)} of {len(names)} answers ended; not {', '.join(cut)}")
        assert tokens(drafted[temperature]) == tokens(plain[temperature])
        assert temperature == 1 or len(cut) <= max(1, (1 - ENDS) * len(names))


@pytest.mark.full
def test_the_covering_set_on_the_bundled_model():
    compare(MODEL_DIR, COVERING)


@pytest.mark.soak  # the other schemas, trained words, and masks at the leader of three ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", [{}, THREE], ids=["one rank", "three ranks"])
def test_all_schemas_on_a_trained_model(engine: dict[str, Any]):
    compare(real_model(), [*SCHEMAS], **engine)


@pytest.mark.soak  # the other schemas
@pytest.mark.timeout(1800)
def test_all_schemas_on_the_bundled_model():
    compare(MODEL_DIR, [*SCHEMAS])
