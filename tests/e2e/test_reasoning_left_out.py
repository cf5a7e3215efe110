"""A conversation with a model of recurrent state whose template leaves earlier reasoning out: each turn starts from the
end of the question before, in memory and after a restart from disk."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from support.models import make_model
from support.serving import CONFIG, Running, running_server

from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content.split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: <think>{% endif %}"
)
QUESTION = "the quick brown fox says hello to the world. " * 10
ENDINGS = 2  # blocks on disk of one answer beside whole ones: at the question's end, and at the answer's


def model_in(path: Path) -> Path:
    model = make_model("qwen3_next", path)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return model


def answered(running: Running, messages: list[dict[str, str]]) -> tuple[dict[str, int], int, int]:
    """Which prompt tokens were cached, and the number of tokens of the prompt, and of it without the answer's start."""
    with httpx.Client(base_url=running.origin, timeout=120) as client:
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        usage = client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
        asked = {"messages": messages, "add_generation_prompt": False}
        question = client.post("/tokenize", json=asked).raise_for_status().json()["count"]
    details = usage["prompt_tokens_details"]
    on_disk = details.get("cached_tokens_details", {}).get("disk", 0)
    return {"all": details["cached_tokens"], "disk": on_disk}, usage["prompt_tokens"], question


def written(running: Running, blocks: int) -> None:
    with httpx.Client(base_url=running.origin, timeout=120) as client:
        for _ in range(600):
            if f'prefix_cache_disk_blocks{{model_name="tiny"}} {blocks}' in client.get("/metrics").text:
                return
            time.sleep(0.05)
    raise AssertionError(f"there are not {blocks} blocks")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_turn_starts_from_the_end_of_the_question_before(restarts: bool, tmp_path: Path) -> None:
    path = model_in(tmp_path / "model")
    engine = replace(CONFIG.engine, model=str(path), kv_cache_gb=0.25, prefix_cache_gb=0.05)
    if restarts:
        engine = replace(engine, prefix_cache_dir=str(tmp_path / "cache"))
    config = replace(CONFIG, engine=engine)
    first = [{"role": "user", "content": QUESTION}]
    again = [*first, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and then?"}]
    with running_server(Tokenizer.load(path), EngineProcess(engine), config) as running:
        cached, prompt, question = answered(running, first)
        assert cached == {"all": 0, "disk": 0} and 256 < question < prompt
        if not restarts:
            cached, _, longer = answered(running, again)
            assert cached == {"all": question, "disk": 0}
            assert answered(running, again)[0] == {"all": longer, "disk": 0}
            return
        written(running, question // 256 + ENDINGS)
    with running_server(Tokenizer.load(path), EngineProcess(engine), config) as running:
        assert answered(running, again)[0] == {"all": question, "disk": question}
