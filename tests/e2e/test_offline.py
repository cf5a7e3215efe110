"""`phalanx.LLM` on real engines: equal to `phalanx generate`, alone, in a batch, on one rank or two; nothing stays."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.driver import PATIENT
from support.serving import SETTINGS

from phalanx import LLM, RequestOutput, SamplingParams
from phalanx.errors import EngineUnavailable, InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(temperature=1, max_tokens=12, seed=7)
DRAWN = SamplingParams(temperature=1, max_tokens=12)
PROMPTS = [f"hello {'world ' * (i % 5)}{i}" for i in range(20)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def processes_of(model: Path) -> list[int]:
    """Processes below this one that serve a model: ranks, perhaps their launcher."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.is_running() and str(model) in child.cmdline()]


def test_generate_says_the_same(llm: LLM, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "generate", str(tiny_model), "--prompt", PROMPTS[0], "--raw", "--json"]
    flags = ["--temperature", "0", "--max-tokens", "16", "--memory-guard-gb", "0.2", "--kv-cache-gb", "0.1"]
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    expected = json.loads(ended.stdout)
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids) == (expected["text"], expected["tokens"])
    assert answer.finish_reason == expected["finish_reason"]
    assert {**output.usage, "prompt_tokens_details": None} == {**expected["usage"], "prompt_tokens_details": None}
    assert set(output.timing) == {"queue", "prefill", "ttft", "tpot"}


def test_twenty_prompts_on_four_rows_are_answered_as_each_alone(llm: LLM) -> None:
    assert tokens(llm.generate(PROMPTS, GREEDY)) == [tokens(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS]


def test_a_seed_repeats_and_without_one_answers_differ(llm: LLM) -> None:
    first = tokens(llm.generate(PROMPTS[:6], SEEDED))
    assert tokens(llm.generate(PROMPTS[:6][::-1], SEEDED)) == first[::-1]
    assert tokens(llm.generate([PROMPTS[0]] * 2, SEEDED)) == [first[0], first[0]]
    drawn = tokens(llm.generate([PROMPTS[0]] * 4, DRAWN))
    assert len({tuple(one) for one in drawn}) > 1


def test_n_answers_per_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1, max_tokens=12, seed=7, n=2)
    outputs = llm.generate(PROMPTS[:3], params)
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0, 1]] * 3
    assert all(output.outputs[0].token_ids != output.outputs[1].token_ids for output in outputs)
    assert outputs[0].outputs[0].token_ids == tokens(llm.generate(PROMPTS[0], SEEDED))[0]


def test_a_stop_text_ends_the_answer_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=16, stop=stop))
    answer = cut.outputs[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    assert answer.token_ids == whole.outputs[0].token_ids[: len(answer.token_ids)]
    first = whole.outputs[0].token_ids[0]
    (ended,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[first]))
    assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([first], "stop")


def test_chat_is_the_template_and_the_same_tokens(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    outputs = llm.chat(conversations, GREEDY)
    assert all(PROMPTS[i] in (output.prompt or "") for i, output in enumerate(outputs))
    prompts = [{"prompt_token_ids": output.prompt_token_ids} for output in outputs]
    assert tokens(llm.generate(prompts, GREEDY)) == tokens(outputs)
    assert tokens(llm.chat(conversations[0], GREEDY)) == tokens(outputs)[:1]


def test_tools_are_the_templates(llm: LLM) -> None:
    """As with vLLM: the template shows them, and a call is text. This template knows none, and says so."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    with pytest.raises(InvalidRequest, match="does not show tools") as caught:
        llm.chat([{"role": "user", "content": PROMPTS[0]}], GREEDY, tools=tools)
    assert caught.value.param == "tools"


def test_log_probabilities(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2))
    answer = output.outputs[0]
    assert answer.logprobs is not None and output.prompt_logprobs is not None
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1
        assert entry[token].logprob == max(one.logprob for one in entry.values())
        assert sum(math.exp(one.logprob) for one in entry.values()) <= 1.0
    assert output.prompt_logprobs[0] is None
    for token, scored in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert scored is not None
        assert {2, 1} <= {one.rank for one in scored.values()}
        assert token in scored
    assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].logprobs is None


@pytest.mark.full
def test_two_ranks_say_the_same_and_are_gone_after_close(llm: LLM, tiny_model: Path) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    before = processes_of(tiny_model)
    with LLM(tiny_model, tensor_parallel_size=2, **PATIENT, **SETTINGS) as two:
        assert tokens(two.generate(PROMPTS, GREEDY)) == expected
        assert len(processes_of(tiny_model)) >= len(before) + 2  # a launcher (mpirun) counts as well
    assert processes_of(tiny_model) == before
    with pytest.raises(EngineUnavailable, match="closed"):
        two.generate("a")


def test_a_script_that_forgets_to_close_leaves_no_process(tiny_model: Path) -> None:
    program = (
        "import os, sys, psutil; from phalanx import LLM, SamplingParams;"
        f"llm = LLM({str(tiny_model)!r}, **{SETTINGS!r});"
        "print(len(llm.generate(['a', 'b'], SamplingParams(max_tokens=3))));"
        "print(*[child.pid for child in psutil.Process().children(recursive=True)])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    answered, pids = ended.stdout.splitlines()
    assert answered == "2"
    assert pids.split()
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.split())
    assert "Traceback" not in ended.stderr
