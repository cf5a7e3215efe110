"""A real engine process against mlx-lm's own one-at-a-time greedy generation, and its life and death."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from importlib.util import find_spec

import mlx.core as mx
import psutil
import pytest
from llguidance import LLMatcher
from mlx_lm.utils import load_model
from support.driver import ask, running
from support.grammars import GRAMMARS, reference
from support.models import EOS, make_model
from support.reference import reference_greedy

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.errors import EngineUnavailable
from phalanx.speculation_config import NgramSpeculation
from phalanx.types import Cancel, Finish, ResetPrefixCache

IN_GROUPS = ["qwen3", "qwen3_moe", "gpt_oss", "demo"]  # `ranks/test_lockstep.py` asks groups of ranks for theirs
FAMILIES = [
    "llama",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "deepseek_v3", "qwen3_next")),
    *(pytest.param(name, marks=pytest.mark.soak) for name in IN_GROUPS),
]


def config_for(path, **more) -> EngineConfig:
    return EngineConfig(
        model=str(path), **{"kv_cache_gb": 0.25, "prefix_cache_gb": 0.05, "max_num_batched_tokens": 48, **more}
    )


def prompts(n: int, vocab: int, longest: int = 150) -> list[list[int]]:
    rnd = random.Random(n)
    out = [[rnd.randrange(3, vocab) for _ in range(1 + (i * 37) % longest)] for i in range(n)]
    out[-1] = out[-2][:40] + out[-1][:10]  # a shared prefix
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared(llama):
    """What runs coroutines, and the driver of an engine of the llama that runs in them."""
    with asyncio.Runner() as runner:
        serving = running(config_for(llama))
        yield runner, runner.run(serving.__aenter__())
        runner.run(serving.__aexit__(None, None, None))


@pytest.fixture
def play(shared):
    """Runs a coroutine with the driver of the shared engine, which has recorded nothing yet."""
    runner, driver = shared
    for records in (driver.tokens, driver.logprobs, driver.scored, driver.finished, driver.downs):
        records.clear()
    return lambda scenario: runner.run(scenario(driver))


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_concurrent_prompts_equal_one_at_a_time(family, tmp_path):
    path = MODEL_DIR if family == "demo" else make_model(family, tmp_path / family)

    async def main():
        async with running(config_for(path)) as driver:
            vocab = driver.engine.info.vocab_size
            jobs = [
                {"prompt": p, "max_tokens": 8 + 5 * i % 41, "stop_ids": [i]} for i, p in enumerate(prompts(16, vocab))
            ]
            for i, job in enumerate(jobs):
                driver.submit(ask(str(i), job["prompt"], job["max_tokens"], stop_ids=job["stop_ids"]))
                if i % 4 == 3:
                    await driver.until(lambda i=i: len(driver.tokens[str(i - 3)]) > 2 or str(i - 3) in driver.finished)
            await driver.until(lambda: len(driver.finished) == len(jobs))
            again = await driver.generate(ask("again", jobs[5]["prompt"], 20))
            assert driver.finished["again"].cached_tokens > 0 or not driver.engine.info.supports_rollback
            return jobs, [driver.tokens[str(i)] for i in range(len(jobs))], again[0]

    jobs, got, again = asyncio.run(main())
    wanted = reference_greedy(path, [*jobs, {"prompt": jobs[5]["prompt"], "max_tokens": 20, "stop_ids": []}])
    assert [*got, again] == wanted


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dtype", "quantize"),
    [
        ("llama", mx.bfloat16, None),
        ("qwen3", mx.float16, {"bits": 4, "group_size": 64}),
        ("qwen3_moe", mx.bfloat16, {"bits": 8, "group_size": 32}),
        ("deepseek_v3", mx.bfloat16, None),
        ("gpt_oss", mx.bfloat16, {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
    ],
)
def test_checkpoints_of_16_bits_are_served_as_in_float32(family, dtype, quantize, tmp_path):
    """Whether their matrices stay in 16 bits, as with the native kernels, or not: nothing may be rounded."""
    path = make_model(family, tmp_path / family, dtype=dtype, quantize=quantize)

    async def main():
        async with running(config_for(path)) as driver:
            asked = prompts(8, driver.engine.info.vocab_size)
            answers = await driver.generate(*(ask(str(i), p, 40) for i, p in enumerate(asked)))
            return asked, list(answers)

    asked, got = asyncio.run(main())
    assert got == reference_greedy(path, [{"prompt": p, "max_tokens": 40, "stop_ids": []} for p in asked])


def test_without_the_native_kernels_the_tokens_are_the_same(llama, play):
    asked = prompts(4, 500)

    async def said(driver):
        answers = await driver.generate(*(ask(str(i), p, 30) for i, p in enumerate(asked)))
        return driver.engine.info.kernels, list(answers)

    async def main():
        async with running(config_for(llama, cpu_kernels=False)) as driver:
            return await said(driver)

    without, tokens = asyncio.run(main())
    assert without.startswith("MLX's own, on one thread (")
    kernels, same = play(said)
    assert same == tokens
    if find_spec("phalanx_cpu") and mx.default_device() == mx.Device(mx.cpu):
        assert kernels.startswith("native: ") and "precision exact" in kernels


def test_with_8_bit_activations_a_stream_goes_on_with_the_tokens_it_had(tmp_path):
    """`fast` rounds what it multiplies, so prompts must be read the way tokens are generated (design: Keyed
    sampling)."""
    path = make_model("llama", tmp_path / "llama", quantize={"bits": 4, "group_size": 64}, hidden_size=256)
    asked = prompts(6, 500)

    async def main():
        async with running(config_for(path, cpu_precision="fast")) as driver:
            whole = await driver.generate(*(ask(str(i), p, 60) for i, p in enumerate(asked)))
            resumed = await driver.generate(
                *(ask(f"r{i}", p, 60, committed=whole[i][: 10 + 7 * i]) for i, p in enumerate(asked))
            )
            return list(whole), list(resumed)

    whole, resumed = asyncio.run(main())
    assert resumed == whole
    assert len({tuple(tokens) for tokens in whole}) == len(asked)


def test_answers_under_a_grammar_by_an_engine_that_was_idle(llama):
    """It waits for the grammar as for a message. One that does not compile ends its sequence and nothing else."""
    prompt, model = prompts(4, 500)[1], load_model(llama)[0]
    names = ("person", "nested", "regex")
    wanted = [reference(model, llama, prompt, GRAMMARS[name], 60, EOS) for name in names]

    async def main():
        speculation = NgramSpeculation(control="always", num_speculative_tokens=5)
        async with running(config_for(llama, speculative_config=speculation)) as driver:
            broken = ask("broken", prompt, 60, stop_ids={EOS}, grammar=LLMatcher.grammar_from_regex("("))
            assert await driver.generate(broken) == [[]]
            alone = [
                (await driver.generate(ask(name, prompt, 60, stop_ids={EOS}, grammar=GRAMMARS[name])))[0]
                for name in names
            ]
            again = [
                ask(f"{name} again", prompt, 60, stop_ids={EOS}, grammar=GRAMMARS[name], committed=tokens[: 3 * i])
                for i, (name, tokens) in enumerate(zip(names, alone, strict=True))
            ]
            return alone, await driver.generate(*again), driver.finished

    alone, again, finished = asyncio.run(main())
    assert alone == wanted == again
    assert (finished["broken"].reason, finished["nested"].reason) == ("error", "stop")
    assert "regex" in finished["broken"].detail
    assert finished["nested"].accepted_tokens > 10


MIXED = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2**64 - 1, "logprobs": 3},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05, "seed": 7, "choice": 1},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 3},
    {"temperature": 0.0, "logit_bias": {9: -100.0, 11: 4.0}, "logprobs": 0},
]


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_after_a_kill(play):
    """Tokens depend on (seed, choice, position) and the logits, not on what else runs. The engine that was killed
    restarts, and names the signal."""
    prompt = prompts(4, 500)[2]

    async def main(driver):
        requests = [ask(f"alone{i}", prompt, 40, sampling=s) for i, s in enumerate(MIXED)]
        alone = [(await driver.generate(r))[0] for r in requests]
        noise = [ask(f"noise{i}", p, 60, sampling={"temperature": 1.0}) for i, p in enumerate(prompts(9, 500))]
        driver.submit(*noise)
        batch = await driver.generate(*(ask(f"batch{i}", prompt, 40, sampling=s) for i, s in enumerate(MIXED)))
        scored = {i: driver.logprobs[f"batch{i}"] for i in range(len(MIXED))}
        pid, restarts = driver.engine.pid, driver.engine.state.restarts
        os.kill(pid, signal.SIGKILL)
        await driver.until(lambda: driver.downs)
        assert "SIGKILL" in driver.downs[0][0] and driver.downs[0][1] is True
        with pytest.raises(EngineUnavailable, match="restarting"):
            driver.submit(ask("b", prompt, 20))
        await driver.until(driver.ready.is_set)
        assert driver.engine.pid != pid and driver.engine.state.restarts == restarts + 1
        resumed = await driver.generate(
            *(ask(f"r{i}", prompt, 40, sampling=s, committed=alone[i][: 3 * i]) for i, s in enumerate(MIXED))
        )
        return alone, batch, resumed, scored

    alone, batch, resumed, scored = play(main)
    assert batch == alone and resumed == alone
    assert len({tuple(tokens) for tokens in alone}) == len(MIXED)
    for i, sampling in enumerate(MIXED):
        wanted = sampling.get("logprobs")
        assert len(scored[i]) == (0 if wanted is None else 40)
        assert all(entry.token == token for entry, token in zip(scored[i], alone[i], strict=False))
        assert all(len(entry.top) == wanted for entry in scored[i])


def test_prompt_scores_are_those_of_the_whole_prompt_at_once(llama, play):
    prompt = prompts(3, 500, longest=400)[-1] * 4

    async def main(driver):
        await driver.generate(ask("warm", prompt, 2))  # a kept prefix must not hide the scores
        await driver.generate(ask("a", prompt, 2, prompt_logprobs=2))
        return driver.scored["a"]

    scored = play(main)
    model, _ = load_model(llama)
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    wanted = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert len(scored) == len(prompt) and scored[0] is None
    for i, entry in enumerate(scored[1:]):
        assert entry.token == prompt[i + 1]
        assert entry.logprob == pytest.approx(wanted[i, prompt[i + 1]].item(), abs=1e-3)
        assert entry.top[0][1] == pytest.approx(mx.max(wanted[i]).item(), abs=1e-3) and len(entry.top) == 2


def test_cancel_finish_and_reset_leave_nothing_behind(play):
    async def main(driver):
        await driver.generate(ask("warm", [5] * 30, 4))
        driver.engine.send(ResetPrefixCache())
        before = await driver.engine.ping()
        driver.submit(ask("a", [5] * 300, 100_000), ask("b", [6] * 20, 100_000), ask("c", [7] * 20, 100_000))
        await driver.until(lambda: len(driver.tokens["b"]) > 3)
        driver.engine.send(Cancel("a"))
        driver.engine.send(Finish("b", 2))
        driver.engine.send(Cancel("no such sequence"))
        await driver.until(lambda: {"a", "b"} <= set(driver.finished))
        driver.engine.send(Cancel("c"))
        await driver.until(lambda: "c" in driver.finished)
        driver.engine.send(ResetPrefixCache())
        after = await driver.engine.ping()
        assert (driver.finished["b"].reason, driver.finished["b"].n_tokens) == ("stop", 2)
        assert driver.finished["a"].reason == driver.finished["c"].reason == "cancelled"
        assert (after.running, after.waiting, after.kv_bytes, after.prefix_bytes) == (0, 0, 0, 0)
        assert after.active_bytes == before.active_bytes

    play(main)


def test_a_deadline_ends_with_its_reason(play):
    async def main(driver):
        await driver.generate(ask("a", [5] * 10, 100_000, timeout_s=0.02))
        assert driver.finished["a"].reason == "timeout" and "0.02 s" in driver.finished["a"].detail

    play(main)


def test_a_wedged_engine_is_killed_and_restarted_and_closing_leaves_no_process(llama):
    async def main():
        async with running(config_for(llama), stall_s=8.0) as driver:
            wedged = driver.engine.pid
            os.kill(wedged, signal.SIGSTOP)
            await driver.until(lambda: driver.downs)
            assert "did not answer" in driver.downs[0][0]
            await driver.until(driver.ready.is_set)
            await driver.generate(ask("c", [5] * 10, 3))
            driver.submit(ask("a", [5] * 10, 100_000))
            await driver.until(lambda: len(driver.tokens["a"]) > 2)
            return wedged, driver.engine.pid

    assert not any(psutil.pid_exists(pid) for pid in asyncio.run(main()))


def test_a_model_that_cannot_load_is_not_retried(tmp_path):
    (tmp_path / "config.json").write_text("{")

    async def main():
        with pytest.raises(AssertionError, match=r"config\.json"):
            async with running(config_for(tmp_path)):
                pass

    asyncio.run(main())
