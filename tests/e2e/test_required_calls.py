"""Calls that have to be made, of a real engine with a model of random weights: they are never malformed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import openai
import pytest
from msgspec.structs import replace
from support.models import make_model
from support.scripted_model import TEMPLATES, tokenizer_of
from support.serving import CONFIG, running_server

from phalanx.speculation_config import NgramSpeculation
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get-weather", "wind")]


@pytest.fixture(scope="module", params=TEMPLATES)
def client(request, tmp_path_factory) -> Iterator[openai.OpenAI]:
    path = tmp_path_factory.mktemp("model") / request.param
    model = make_model("llama", path / "model", vocab_size=320, max_position_embeddings=8192)
    tokenizer_of(request.param, path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / "tokenizer" / name, model / name)
    ids = json.loads((path / "tokenizer" / "config.json").read_text())["eos_token_id"]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    engine = replace(
        CONFIG.engine,
        model=str(model),
        kv_cache_gb=0.25,
        prefix_cache_gb=0.05,
        speculative_config=NgramSpeculation(num_speculative_tokens=4),
    )
    with (
        running_server(Tokenizer.load(model), EngineProcess(engine), replace(CONFIG, engine=engine)) as running,
        openai.OpenAI(base_url=running.base_url, api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "wind"}}], ids=["any", "named"]
)
def test_calls_follow_the_schema(client, choice):
    def ask(seed, **options):
        return client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], tools=TOOLS, tool_choice=choice,
            parallel_tool_calls=False, temperature=1.5, seed=seed, max_tokens=200, **options,
        )  # fmt: skip

    ended = 0
    for seed in range(6):
        plain = ask(seed, extra_body={"num_speculative_tokens": 0}).choices[0]
        (drafted,) = ask(seed).choices
        assert [call.function for call in drafted.message.tool_calls or []] == [
            call.function for call in plain.message.tool_calls or []
        ]
        assert drafted.message.content == plain.message.content
        if plain.finish_reason == "length":  # it reasons without end
            continue
        ended += 1
        assert plain.finish_reason == "tool_calls" and not plain.message.content
        (call,) = plain.message.tool_calls
        assert call.function.name == "wind" or choice == "required"
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"unit", "days"}
        assert arguments["unit"] in ("celsius", "kelvin") and 1 <= arguments["days"] <= 7
    assert ended > 0


def test_a_loop_reuses_all_that_the_engine_computed(client):
    """The random model writes escapes and blanks that no template would repeat."""
    messages = [{"role": "user", "content": "hello"}]
    computed = reused = 0
    for turn in range(6):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, tool_choice="required", temperature=1.5, seed=turn,
            max_tokens=200, parallel_tool_calls=False, extra_body={"reasoning_effort": "none"},
        )  # fmt: skip
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached >= computed
        reused += computed > 0
        message = answer.choices[0].message
        if not message.tool_calls:  # it reasons without end: nothing is remembered
            computed = 0
            continue
        computed = answer.usage.total_tokens - 1  # the last token, which no forward has seen
        call = {"id": message.tool_calls[0].id, "type": "function", "function": message.tool_calls[0].function}
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"result {turn}"}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert reused > 0
