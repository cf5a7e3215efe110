"""Over HTTP a server that speculates gives the answers of one that does not: choices, stop strings, log-probabilities,
streams (A2). Drafts here are now right, now wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, MODEL, Running, running_server, sse
from support.speculation import with_noise

from phalanx.speculation_config import DraftModelSpeculation, RandomSpeculation
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

CHAT_ASKED: dict[str, Any] = {**CHAT, "max_tokens": 60, "seed": 3, "ignore_eos": True}
ASKED = [
    ("chat", {"temperature": 0}),
    ("chat", {"temperature": 1.0, "n": 3}),
    ("chat", {"temperature": 0.7, "top_p": 0.9, "logprobs": True, "top_logprobs": 2}),
    ("chat", {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_p": 0.02}),
    ("chat", {"temperature": 0.8, "stop": ["a", "e"], "min_tokens": 9}),
    ("chat", {"temperature": 0.8, "n": 2, "stop": ["oo", "t", "x"], "include_stop_str_in_output": True}),
    ("chat", {"temperature": 1.0, "logit_bias": {"20": 5, "30": -100}, "max_tokens": 1}),
    ("text", {"prompt": "the fox", "temperature": 0.9, "echo": True, "logprobs": 2, "max_tokens": 60}),
]


@pytest.fixture(scope="module", params=["none", "draft model", "random"])
def server(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with its kind of speculation."""
    if request.param == "none":
        yield request.param, request.getfixturevalue("real_server")
        return
    if request.param == "draft model":
        folder = with_noise(tiny_model, tmp_path_factory.mktemp("draft") / "model", 0.02)
        config: Any = DraftModelSpeculation(model=str(folder), num_speculative_tokens=4, control="always")
    else:
        config = RandomSpeculation(num_speculative_tokens=3, control="always", compare_steps=4)
    engine = replace(
        CONFIG.engine, model=str(tiny_model), kv_cache_gb=0.25, prefix_cache_gb=0.05, speculative_config=config
    )
    process = EngineProcess(engine)
    with running_server(Tokenizer.load(tiny_model), process, replace(CONFIG, engine=engine)) as running:
        yield request.param, running


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    """By kind of speculation; the fixture `server` without any comes first."""
    return {}


def collect(running: Running) -> list[Any]:
    """What clients get, whole and as streams, without ids, times and usage; equal texts in both."""
    found = []
    with httpx.Client(base_url=running.base_url, timeout=120) as client:
        for kind, fields in ASKED:
            url = "/chat/completions" if kind == "chat" else "/completions"
            body = {**CHAT_ASKED, **fields}
            if kind == "text":
                del body["messages"]
            whole = client.post(url, json=body).raise_for_status().json()
            found.append([_rounded(choice) for choice in whole["choices"]])
            streamed = sse(client.post(url, json={**body, "stream": True}).text)
            texts = dict.fromkeys(range(len(whole["choices"])), "")
            for event in streamed[:-1]:
                for choice in event["choices"]:
                    texts[choice["index"]] += (
                        choice["delta"].get("content") if kind == "chat" else choice["text"]
                    ) or ""
            for choice in whole["choices"]:
                said = choice["message"]["content"] if kind == "chat" else choice["text"]
                assert texts[choice["index"]] == said
    return found


def _rounded(value: Any) -> Any:
    """Log-probabilities to what two orders of summation agree on."""
    match value:
        case float():
            return round(value, 3)
        case list():
            return [_rounded(entry) for entry in value]
        case dict():
            return {key: _rounded(entry) for key, entry in value.items()}
        case _:
            return value


@pytest.mark.full
def test_clients_see_no_difference(server: tuple[str, Running], answers: dict[str, list[Any]]) -> None:
    kind, running = server
    answers[kind] = collect(running)
    assert answers[kind] == answers["none"]
    if kind == "none":
        reasons = [choice["finish_reason"] for choices in answers[kind] for choice in choices]
        assert set(reasons) == {"stop", "length"}
        return
    with httpx.Client(base_url=running.origin, timeout=120) as client:
        text = client.get("/metrics").text
        asked = {**CHAT_ASKED, "speculation": True, "temperature": 1.0}
        details = client.post("/v1/chat/completions", json=asked).json()["usage"]["completion_tokens_details"]
        refused = client.post("/v1/chat/completions", json={**asked, "num_speculative_tokens": 0}).json()["usage"]
        assert set(refused["completion_tokens_details"].values()) == {0}
        drafted = f'phalanx:spec_decode_num_draft_tokens_total{{model_name="{MODEL}"}} '
        assert drafted in text
        compared = [float(line.split()[-1]) for line in text.splitlines() if "_compared_" in line and "_total{" in line]
        assert len(compared) == (4 if kind == "random" else 0)
        assert all(compared)
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert rejected > 0
    assert accepted < 60
    assert (accepted > 10) == (kind == "draft model")
