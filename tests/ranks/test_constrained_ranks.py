"""A rank that is killed while an answer follows a grammar, or reasons: resumed, it is the undisturbed one (A7)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from groups import group_server
from llguidance import LLMatcher
from mlx_lm.utils import load_model
from msgspec import structs
from support.driver import PATIENT, ask, running
from support.examples import SOAK
from support.grammars import closed, json_schema, reference
from support.models import EOS, make_model
from support.scripted_model import tokenizer_of
from support.serving import MODEL

from phalanx.config import EngineConfig
from phalanx.speculation_config import NgramSpeculation

DRAFTS = NgramSpeculation(num_speculative_tokens=4, control="always")
LONGEST = 120
LETTERS = {"type": "string", "pattern": "^[a-f]{90,110}$"}
WORD = {"type": "string", "pattern": "^[a-z]{4}$"}
GRAMMARS = [
    json_schema(closed(first=LETTERS, second={"enum": ["one of two", "the other"]}, third={"const": "known"})),
    LLMatcher.grammar_from_regex("[a-f]{100,120}(xy)+z"),
    json_schema({"type": "array", "items": WORD, "minItems": 15, "maxItems": 17}),
    "",
]

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.mark.soak  # four grammars in a batch; the call below has one, `e2e/test_engine.py` resumes three on one rank
def test_a_rank_is_killed_inside_a_schema(group_model: Path):
    model = load_model(group_model)[0]
    prompts = [[5 + i, 40 + 3 * i, 300 - i] for i in range(len(GRAMMARS))]
    asked = [
        ask(f"r{i}", prompt, LONGEST, stop_ids={EOS}, grammar=grammar)
        for i, (prompt, grammar) in enumerate(zip(prompts, GRAMMARS, strict=True))
    ]
    wanted = [reference(model, group_model, r.prompt, r.grammar, LONGEST, EOS) for r in asked]
    assert all(len(tokens) > 40 for tokens in wanted[:3])
    config = EngineConfig(
        model=str(group_model), kv_cache_gb=0.25, prefix_cache_gb=0.02, tensor_parallel_size=2, backend="mpi",
        speculative_config=DRAFTS, **PATIENT,
    )  # fmt: skip

    async def main() -> list[list[int]]:
        async with running(config) as driver:
            driver.submit(*asked)
            await driver.until(lambda: all(len(driver.tokens[r.id]) > 8 for r in asked))
            pid = driver.engine.rank_pids[1]
            os.kill(pid, signal.SIGKILL)
            await driver.until(lambda: driver.downs and driver.ready.is_set())
            assert driver.engine.rank_pids[1] != pid
            left = [r for r in asked if r.id not in driver.finished]
            unfinished = [structs.replace(r, committed=driver.tokens[r.id]) for r in left]
            assert len(unfinished) >= 3 and all(r.committed for r in unfinished)
            await driver.generate(*unfinished)
            return [driver.tokens[r.id] for r in asked]

    assert asyncio.run(main()) == wanted


SPELL = {"type": "function", "function": {"name": "spell", "parameters": closed(word=LETTERS, loud={"const": True})}}


def reasoning_model(path: Path) -> Path:
    """A random llama with marks of reasoning and of calls, whose prompts end inside of reasoning."""
    tokenizer = tokenizer_of("hermes", path / "tokenizer")
    model = make_model("llama", path / "model", vocab_size=tokenizer.vocab_size, max_position_embeddings=8192)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / "tokenizer" / name, model / name)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [*tokenizer.eos_ids]}))
    return model


@pytest.mark.grows
def test_a_rank_is_killed_inside_a_call_and_inside_reasoning(tmp_path: Path):
    """Inside the call only without SOAK=1: its reasoning is resumed too, and each restart takes seconds."""
    model = reasoning_model(tmp_path)
    close = tokenizer_of("hermes", tmp_path / "again").encode("</think>", add_special_tokens=False)
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Spell a word."}],
        "tools": [SPELL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 0,
        "max_tokens": 500,
        "logit_bias": {str(close[0]): 2},
    }
    with group_server(model, 2, "mpi", speculative_config=DRAFTS) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=240)

        def answer(look: Callable[[int, int], object]) -> tuple[str, str, str, str | None]:
            """Its reasoning, the name and arguments of its call, and how it ended; `look` gets the lengths so far."""
            reasoning = name = arguments = ""
            for chunk in client.chat.completions.create(**request, stream=True):
                delta, finish = chunk.choices[0].delta, chunk.choices[0].finish_reason
                assert not delta.content
                reasoning += getattr(delta, "reasoning_content", None) or ""
                for call in delta.tool_calls or []:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
                look(len(reasoning), len(arguments))
            return reasoning, name, arguments, finish

        def kill(reasoned: int, called: int) -> None:
            if len(killed) < (SOAK and reasoned > 5) + (called > 10):
                killed.append(server.engine.rank_pids[1])
                os.kill(killed[-1], signal.SIGKILL)

        killed: list[int] = []
        undisturbed = answer(lambda *_: None)
        assert answer(kill) == undisturbed
        assert len(set(killed)) == server.engine.state.restarts == 1 + SOAK
    reasoning, name, arguments, finish = undisturbed
    assert len(reasoning) > 20 and name == "spell" and finish == "tool_calls"
    assert len(json.loads(arguments)["word"]) >= 90
