"""`phalanx.LLM` on the fake engine: arguments, order, numbers of requests under way, interrupts, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import fake_engine, make_tokenizer

import phalanx
from phalanx.errors import ConfigError, EngineError, EngineUnavailable, InvalidRequest, ModelNotFound, PhalanxError
from phalanx.offline import llm as module
from phalanx.offline.llm import LLM
from phalanx.offline.outputs import RequestOutput
from phalanx.offline.sampling_params import SamplingParams, StructuredOutputsParams
from phalanx.supervision.fake_engine import FakeEngine
from phalanx.types import Submit

ROWS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    make_tokenizer(path)
    return path


@pytest.fixture
def engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The fakes that LLMs start instead of processes."""
    found: list[FakeEngine] = []
    tokenizer = make_tokenizer(folder)

    def start(config: Any) -> FakeEngine:
        found.append(fake_engine(tokenizer, max_num_seqs=config.max_num_seqs))
        return found[-1]

    monkeypatch.setattr(module, "EngineProcess", start)
    return found


@pytest.fixture
def llm(folder: Path, engines: list[FakeEngine]) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=ROWS) as found:
        yield found


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [answer.text for output in outputs for answer in output.outputs]


def test_the_names_are_at_the_package_and_importing_it_is_light() -> None:
    assert phalanx.LLM is LLM
    assert phalanx.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = phalanx.Nothing
    program = "import sys, phalanx; sys.exit(str([name for name in sys.modules if name.startswith('phalanx.')] or ''))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr.strip() == ""


def test_a_grammar_reaches_the_engine_or_is_refused_by_name(llm: LLM, engines: list[FakeEngine]) -> None:
    sent: list[Any] = []
    send = engines[0].send
    engines[0].send = lambda message: (sent.append(message), send(message))  # type: ignore[method-assign,assignment]
    for form in ({"json": {"type": "integer"}}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'}, {"regex": "a"}):
        llm.generate("x", SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(**form)))
    grammars = [message.request.grammar for message in sent if isinstance(message, Submit)]
    assert len(set(grammars)) == 4 and all(grammars)
    for form, words in [({"json": {"not": {}}}, "structured_outputs.json cannot be compiled"), ({}, "exactly one of")]:
        with pytest.raises(InvalidRequest, match=words):
            llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(**form)))


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"hello {i}" for i in range(20)]
    greedy = SamplingParams(temperature=0, max_tokens=5)
    together = llm.generate(prompts, greedy)
    assert [output.prompt for output in together] == prompts
    assert texts(together) == texts([llm.generate(prompt, greedy)[0] for prompt in prompts])
    assert len({output.request_id for output in together}) == 20
    assert all(output.outputs[0].finish_reason == "length" for output in together)
    assert all(len(output.outputs[0].token_ids) == 5 for output in together)


def test_every_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a", "b", "c"], params)] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="3 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, 3, [{"max_tokens": 1}]])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        llm.generate("a", params)


def test_prompts_may_be_token_ids(llm: LLM) -> None:
    text = llm.generate({"prompt": "hello"}, SamplingParams(temperature=0, max_tokens=4))[0]
    ids = llm.generate([{"prompt_token_ids": text.prompt_token_ids}], SamplingParams(temperature=0, max_tokens=4))[0]
    assert ids.outputs == text.outputs
    assert (text.prompt, ids.prompt) == ("hello", None)
    assert llm.generate([]) == []


def test_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hello"}]
    other = [*one, {"role": "assistant", "content": "fox"}]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    first, second = llm.chat([one, [*other, one[0]]], greedy)
    assert llm.chat(one, greedy)[0].outputs == first.outputs
    assert first.prompt == "<user>hello<eos><assistant>"
    assert second.prompt_token_ids[: len(first.prompt_token_ids) - 3] == first.prompt_token_ids[:-3]
    (continued,) = llm.chat(other, greedy, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt == "<user>hello<eos><assistant>fox"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", {}, "prompt is empty"),
        (["a", "b"], {"max_tokens": 0}, "prompt 0: max_tokens must be at least 1"),
        ("a", {"temperature": "hot"}, "prompt 0: temperature: Expected `float | null`, got `str`"),
        ("a", {"top_p": 1.5}, "top_p must be from 0 to 1"),
        ("a", {"n": 0}, "n must be from 1"),
        ("a", {"logprobs": 21}, "logprobs must be from 0 to 20"),
        (["a", "b"], {"prompt_logprobs": -1}, "prompt 0: prompt_logprobs must be from 0 to 20, not -1"),
        ("a", {"prompt_logprobs": 21}, "prompt_logprobs must be from 0 to 20"),
        ("a", {"prompt_logprobs": "1"}, "prompt_logprobs must be a whole number, not '1'"),
        ("a", {"prompt_logprobs": True}, "prompt_logprobs must be a whole number, not True"),
        (["a", "a" * 4096], {}, "prompt 1: This model's maximum context length"),
        ([{"text": "a"}], {}, "prompt 0 has the keys text"),
        ([{"prompt_token_ids": [999]}], {}, "999"),
        (["a", {"prompt_token_ids": "a"}], {}, "prompt 1: prompt_token_ids is a str"),
        ([{"prompt": ["a", "b"]}], {}, "prompt 0: prompt is a list"),
        ([["a", "b"]], {}, "prompt 0: a list has to be of token ids"),
        ([{"prompt_token_ids": ["1"]}], {}, "prompt 0: a list has to be of token ids"),
        ([{"prompt_token_ids": [[5], [6]]}], {}, "prompt 0: a list has to be of token ids"),
    ],
)
def test_bad_requests_are_named_and_the_next_one_is_answered(
    llm: LLM, prompts: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, SamplingParams(**params))
    assert message in str(caught.value)
    assert len(llm.generate("a", SamplingParams(max_tokens=2))) == 1


def test_a_bad_conversation_is_named(llm: LLM) -> None:
    for messages, message in (([{"role": "king", "content": "x"}], "'king'"), ([], "messages is empty")):
        with pytest.raises(InvalidRequest, match=message):
            llm.chat([messages])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 3}, "There is no setting 'max_num_seq'. Did you mean 'max_num_seqs'?"),
        ({"gpu_memory_utilization": 0.9}, "There is no setting 'gpu_memory_utilization'."),
        ({"max_num_seqs": 0}, "max_num_seqs=0: expected `int` >= 1."),
        ({"max_num_seqs": "4"}, "max_num_seqs='4': expected `int`, got `str`."),
        ({"dtype": "int8"}, "dtype='int8'"),
        (
            {"max_num_seqs": 4000, "max_num_batched_tokens": 512},
            "--max-num-batched-tokens 512 is less than --max-num-seqs 4000",
        ),
        ({"speculative_config": {"method": "guess"}}, "guess"),
    ],
)
def test_bad_settings_are_named_before_anything_starts(
    engines: list[FakeEngine], folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(folder, **settings)
    assert message in str(caught.value)
    assert engines == []


def test_an_absent_model_is_an_error_and_leaves_no_thread(engines: list[FakeEngine], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        LLM(tmp_path / "absent")
    assert not any(thread.name == "phalanx LLM" for thread in threading.enumerate())


def test_an_engine_that_does_not_start_is_an_error_and_leaves_no_thread(
    engines: list[FakeEngine], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeEngine):
        async def start(self) -> None:
            raise EngineError("no such backend")

    monkeypatch.setattr(module, "EngineProcess", lambda config: Failing())
    with pytest.raises(EngineError, match="no such backend"):
        LLM(folder)
    assert not any(thread.name == "phalanx LLM" for thread in threading.enumerate())


def test_a_closed_llm_says_so(folder: Path, engines: list[FakeEngine]) -> None:
    llm = LLM(folder)
    llm.close()
    llm.close()
    assert engines[0].state.phase == "stopped"
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate("a")


def test_an_llm_that_is_dropped_ends_its_engine(folder: Path, engines: list[FakeEngine]) -> None:
    llm = LLM(folder)
    del llm
    assert engines[0].state.phase == "stopped"


def test_closing_ends_what_another_thread_waits_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(make_tokenizer(folder), manual=True)
    monkeypatch.setattr(module, "EngineProcess", lambda config: engine)
    llm = LLM(folder)
    caught: list[PhalanxError] = []

    def ask() -> None:
        try:
            llm.generate("a")
        except PhalanxError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not engine.received:
        time.sleep(0.01)
    llm.close()
    thread.join(120)
    assert [type(error) for error in caught] == [EngineUnavailable]


def test_a_fork_does_not_end_its_parents_engine(llm: LLM, engines: list[FakeEngine]) -> None:
    pid = os.fork()
    if pid == 0:
        llm.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert engines[0].state.phase == "ready"


def test_a_fork_is_told_that_the_llm_is_its_parents(llm: LLM) -> None:
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        try:
            llm.generate("a")
        except EngineUnavailable:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(llm.generate("a", SamplingParams(max_tokens=1))) == 1
