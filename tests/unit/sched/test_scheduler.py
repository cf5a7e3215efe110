"""The scheduler against the simulation: outputs equal the reference whatever happens around a row (A1, A2, A9)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from simulation import VOCAB, Simulation, make_config, make_request, reference
from support.examples import examples

from phalanx.errors import Desync
from phalanx.sched.plan import Evict, Forward, Resize, Restore, Share


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rnd = random.Random(seed)
    return [rnd.randrange(VOCAB) for _ in range(length)]


def test_one_request():
    sim = Simulation(make_config())
    request = make_request("a", prompt_of(5), 7)
    sim.submit(request)
    sim.run()
    assert sim.outputs["a"] == reference(request)
    assert sim.finished["a"].reason == "length" and sim.finished["a"].n_tokens == 7


def test_the_first_token_comes_with_the_last_chunk():
    sim = Simulation(make_config())
    sim.submit(make_request("a", prompt_of(20), 1))
    sim.step()
    assert len(sim.outputs["a"]) == 1
    assert [f.sample for f in sim.steps[0].forwards] == [False, True]


def test_sixteen_ragged_requests_equal_the_reference():
    sim = Simulation(make_config(max_num_seqs=16, max_num_batched_tokens=96))
    requests = [make_request(str(i), prompt_of(1 + 37 * i % 300, i), 5 + i * 7, stop_ids=[i]) for i in range(40)]
    for i, request in enumerate(requests):
        sim.submit(request)
        if i % 3 == 0:
            sim.step()
    sim.run()
    assert sim.outputs == {r.id: reference(r) for r in requests}
    assert {f.reason for f in sim.finished.values()} == {"stop", "length"}


def test_a_short_prompt_does_not_wait_for_a_long_one():
    sim = Simulation(make_config(max_num_batched_tokens=64))
    sim.submit(make_request("long", prompt_of(1500), 1))
    sim.step()
    sim.submit(make_request("short", prompt_of(10, 1), 1))
    sim.step()
    assert "short" in sim.finished and "long" not in sim.finished


def test_a_long_prompt_stalls_a_stream_for_one_chunk_at_most():
    sim = Simulation(make_config(max_num_batched_tokens=64))
    sim.submit(make_request("stream", prompt_of(5), 200))
    sim.step()
    sim.submit(make_request("long", prompt_of(1500, 1), 1))
    while "long" not in sim.finished:
        before = len(sim.outputs["stream"])
        sim.step()
        assert len(sim.outputs["stream"]) == before + 1
        assert sum(sum(f.valid) for f in sim.steps[-1].forwards) <= 64


def test_a_finished_prefix_is_reused():
    sim = Simulation(make_config())
    first = make_request("a", prompt_of(100), 10)
    sim.submit(first)
    sim.run()
    again = make_request("b", first.prompt + sim.outputs["a"][:5] + [1, 2], 10)
    sim.submit(again)
    sim.run()
    assert sim.outputs["b"] == reference(again)
    assert sim.finished["b"].cached_tokens == 105
    assert any(isinstance(op, Restore) for step in sim.steps for op in step.ops)


def test_a_prefix_is_not_shared_between_salts():
    sim = Simulation(make_config())
    sim.submit(make_request("a", prompt_of(100), 2, owner="key 1"))
    sim.run()
    sim.submit(make_request("b", prompt_of(100), 2, owner="key 2"))
    sim.submit(make_request("c", prompt_of(100), 2, owner="key 1"))
    sim.submit(make_request("d", prompt_of(100), 2, owner="key 1", cache_salt="mine"))
    sim.run()
    sim.submit(make_request("e", prompt_of(100), 2, owner="key 1", cache_salt="mine"))
    sim.run()
    assert sim.finished["b"].cached_tokens == 0
    assert sim.finished["c"].cached_tokens == 99
    assert sim.finished["d"].cached_tokens == 0
    assert sim.finished["e"].cached_tokens == 99


def test_choices_share_their_prompts_prefill():
    sim = Simulation(make_config(prefix_budget=1 << 18))
    for choice in range(4):
        sim.submit(make_request(f"r/{choice}", prompt_of(150), 6, group="r", choice=choice))
    sim.run()
    assert sim.scheduler.counters.prefill_tokens == 149  # once, not four times
    assert sum(isinstance(op, Share) for step in sim.steps for op in step.ops) == 3
    assert sim.outputs["r/3"] == reference(make_request("x", prompt_of(150), 6))


def test_resetting_the_prefix_cache_evicts_everything():
    sim = Simulation(make_config())
    sim.submit(make_request("a", prompt_of(100), 2))
    sim.run()
    assert sim.ranks[0][1].entries
    sim.scheduler.reset_prefix_cache()
    sim.run()
    assert not sim.ranks[0][1].entries and sim.scheduler.prefix.used == 0


def test_an_idle_engine_holds_no_rows():
    sim = Simulation(make_config())
    sim.submit(make_request("a", prompt_of(100), 2))
    sim.run()
    assert sim.scheduler.admission.used == 0 and sim.scheduler.idle
    assert sim.steps[-1].ops[-1] == Resize(0, 0, 0)


def test_memory_pressure_preempts_the_newest_and_loses_nothing():
    config = make_config(kv_budget=6 * 256 * 16, max_model_len=1024, max_num_seqs=4, prefix_budget=0)
    sim = Simulation(config)
    requests = [make_request(str(i), prompt_of(100, i), 600) for i in range(3)]
    for request in requests:
        sim.submit(request)
    sim.run()
    assert sim.scheduler.counters.preemptions > 0
    assert sim.largest_kv <= config.limits.kv_budget
    assert sim.outputs == {r.id: reference(r) for r in requests}


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_cancel(when: str):
    sim = Simulation(make_config(max_num_seqs=1))
    other = make_request("other", prompt_of(10, 3), 30)
    if when == "waiting":
        sim.submit(other)
        sim.step()
        sim.submit(make_request("a", prompt_of(500), 50))
    else:
        sim.submit(make_request("a", prompt_of(500), 50))
        sim.submit(other)
        sim.step()
        while when == "decoding" and len(sim.outputs["a"]) < 3:
            sim.step()
    assert (sim.scheduler.by_id["a"].slot >= 0) == (when != "waiting")
    sim.scheduler.cancel("a", sim.now)
    n_steps = len(sim.steps)
    sim.run()
    assert sim.finished["a"].reason == "cancelled"
    assert all(0 not in f.seqs for s in sim.steps[n_steps:] for f in s.forwards if when != "waiting")
    assert sim.outputs["other"] == reference(other)


def test_finish_clips_output_and_prefix():
    sim = Simulation(make_config())
    sim.submit(make_request("a", prompt_of(60), 50))
    while len(sim.outputs["a"]) < 9:
        sim.step()
    sim.scheduler.finish("a", 4, sim.now)
    sim.run()
    assert sim.finished["a"].reason == "stop" and sim.finished["a"].n_tokens == 4
    follow = make_request("b", prompt_of(60) + sim.outputs["a"], 5)
    sim.submit(follow)
    sim.run()
    assert sim.finished["b"].cached_tokens == 64
    assert sim.outputs["b"] == reference(follow)


def test_deadline_ends_waiting_and_running_requests():
    sim = Simulation(make_config(max_num_seqs=1))
    sim.submit(make_request("a", prompt_of(10), 1000, timeout_s=20.0))
    sim.submit(make_request("b", prompt_of(10, 1), 1000, timeout_s=5.0))
    sim.run()
    assert sim.finished["a"].reason == "timeout" and 10 < sim.finished["a"].n_tokens < 25
    assert sim.finished["b"].reason == "timeout" and sim.finished["b"].n_tokens == 0


def test_a_held_sequence_gets_no_row_and_others_do():
    sim = Simulation(make_config())
    for name in ("first", "second"):
        sim.submit(make_request(name, prompt_of(5)))
    first, second = sim.scheduler.by_number
    step = sim.scheduler.schedule(0.0, held={first})
    assert [forward.seqs for forward in step.forwards][-1] == (second,)
    assert not sim.scheduler.idle_except({first}) and not sim.scheduler.idle
    waiting = Simulation(make_config())
    waiting.submit(make_request("only", prompt_of(5)))
    assert waiting.scheduler.schedule(0.0, held={0}) is None
    assert waiting.scheduler.idle_except({0}) and not waiting.scheduler.idle_except(set())
    assert waiting.scheduler.schedule(0.0) is not None


@pytest.mark.parametrize("steps", [0, 3])
def test_giving_up_a_row_says_why(steps):
    sim = Simulation(make_config())
    sim.submit(make_request("a", prompt_of(5)))
    for _ in range(steps):
        sim.step()
    sim.scheduler.give_up(0, "length", "nothing is left", 1.0)
    sim.scheduler.give_up(0, "error", "it has ended already", 1.0)
    *_, finished = sim.scheduler.take_events()
    assert (finished.reason, finished.detail) == ("length", "nothing is left")
    sim.run()
    assert sim.scheduler.idle and sim.scheduler.n_running == 0


def test_resume_continues_from_committed_tokens():
    request = make_request("a", prompt_of(70), 20)
    wanted = reference(request)
    sim = Simulation(make_config())
    sim.submit(make_request("a", request.prompt, 20, committed=wanted[:8]))
    sim.run()
    assert sim.outputs["a"] == wanted and sim.finished["a"].n_tokens == 20


def test_min_tokens_and_stop_ids():
    request = make_request("a", prompt_of(5), 30)
    wanted = reference(request)
    sim = Simulation(make_config())
    sim.submit(make_request("a", request.prompt, 30, stop_ids=[wanted[4]]))
    sim.run()
    assert sim.outputs["a"] == wanted[: wanted.index(wanted[4]) + 1]
    assert sim.finished["a"].stop_id == wanted[4]


def test_a_prompt_beyond_the_context_is_answered_not_queued():
    sim = Simulation(make_config(max_model_len=100))
    sim.submit(make_request("a", prompt_of(100), 1))
    assert sim.finished["a"].reason == "error" and "100 tokens" in sim.finished["a"].detail
    sim.submit(make_request("b", prompt_of(90), 50))
    sim.run()
    assert sim.finished["b"].n_tokens == 10


@pytest.mark.parametrize("start", [1, 2, 20])
def test_with_recurrent_state_a_prompt_that_goes_on_differently_starts_from_the_checkpoint(start):
    """`start`: tokens of the answer's start, which comes behind the checkpoint."""
    question = [(7 * i) % VOCAB for i in range(70)]
    for config in (make_config(recurrent=True, bytes_per_row=64), make_config(recurrent=True, page_tokens=16)):
        sim = Simulation(config)
        first = make_request("first", [*question, *[1] * start], checkpoint=len(question))
        plain = make_request("plain", [*[2] * 30, *question])
        other = make_request("other", [*question, *[3] * start, *question])
        for request in (first, plain, other):
            sim.submit(request)
            sim.run()
            assert sim.outputs[request.id] == reference(request)
        assert [sim.finished[name].cached_tokens for name in ("first", "plain", "other")] == [0, 0, len(question)]


def test_recurrent_rows_are_never_padded_and_start_alone():
    sim = Simulation(make_config(recurrent=True, bytes_per_row=64))
    requests = [make_request(str(i), prompt_of(n, i), 12) for i, n in enumerate([1, 40, 40, 1, 7])]
    for request in requests:
        sim.submit(request)
    started: set[int] = set()
    sim.run()
    for forward in (f for s in sim.steps for f in s.forwards):
        assert all(v == len(t) for v, t in zip(forward.valid, forward.tokens, strict=True))
        assert forward.sample or len(forward.seqs) == 1
        assert set(forward.seqs) <= started or len(forward.seqs) == 1
        started.update(forward.seqs)
    assert sim.outputs == {r.id: reference(r) for r in requests}


def test_tampered_mirror_is_a_desync_that_names_the_step():
    sim = Simulation(make_config())
    sim.submit(make_request("a", prompt_of(5), 20))
    sim.step()
    sim.ranks[1][0].rows[0, 0].kv_len += 1
    with pytest.raises(Desync, match="step 2"):
        sim.run()


@examples(40, soak=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_lives(data: st.DataObject):
    """Random arrivals, cancels, server stops, deadlines, chunk sizes and budgets: survivors equal the reference."""
    draw = data.draw
    max_num_seqs = draw(st.integers(1, 6))
    recurrent = draw(st.booleans())
    config = make_config(
        max_num_seqs=max_num_seqs,
        max_model_len=draw(st.sampled_from([600, 1024, 5000])),
        kv_budget=16 * 5120 * draw(st.sampled_from([1, 2, 8])),
        max_num_batched_tokens=draw(st.integers(1, 80)),
        prefix_budget=draw(st.sampled_from([0, 4096, 1 << 18])),
        recurrent=recurrent,
        bytes_per_row=32 if recurrent else 0,
    )
    sim = Simulation(config, n_workers=2)
    stems = [prompt_of(n, n) for n in (20, 200, 400)]
    requests, touched = {}, set()
    for i in range(draw(st.integers(1, 14))):
        stem = draw(st.sampled_from(stems))
        prompt = stem[: draw(st.integers(0, len(stem)))] + prompt_of(draw(st.integers(1, 30)), i)
        request = make_request(
            f"r{i}", prompt, draw(st.integers(1, 60)), stop_ids=[i % VOCAB], group=f"g{i // 2}", choice=i % 2
        )
        requests[request.id] = request
        sim.submit(request)
        for _ in range(draw(st.integers(0, 6))):
            sim.step()
        if draw(st.integers(0, 4)) == 0:
            victim = draw(st.sampled_from(sorted(requests)))
            if victim not in sim.finished:
                touched.add(victim)
                if draw(st.booleans()):
                    sim.scheduler.cancel(victim, sim.now)
                else:
                    sim.scheduler.finish(victim, draw(st.integers(0, len(sim.outputs[victim]))), sim.now)
        if draw(st.integers(0, 9)) == 0:
            sim.scheduler.reset_prefix_cache()
        if draw(st.integers(0, 5)) == 0:
            sim.scheduler.prefill_budget.observe(
                draw(st.integers(16, 64)), draw(st.floats(0.001, 10)), draw(st.floats(0, 10))
            )
    sim.run()
    assert set(sim.finished) == set(requests)
    assert sim.largest_kv <= config.limits.kv_budget
    assert sim.scheduler.idle and sim.scheduler.admission.used == 0
    for name, request in requests.items():
        if name in touched:
            assert sim.outputs[name] == reference(request)[: len(sim.outputs[name])]
        else:
            assert sim.outputs[name] == reference(request), name


@pytest.mark.parametrize("decoding", [False, True])
def test_chunks_start_small_and_follow_the_machines_speed(decoding: bool):
    """A first chunk that takes minutes on a slow machine would look like a stall. Alone, prefill takes longer steps."""
    limits = {"max_num_batched_tokens": 513, "first_chunk": 16, "target_step_s": 1.0, "max_model_len": 8192}
    sim = Simulation(make_config(**limits, decode_share=0.0))
    if decoding:
        sim.submit(make_request("other", prompt_of(3), 500))
        sim.step()
    sim.submit(make_request("a", prompt_of(4000), 1))

    def step() -> int:
        sim.step()
        return sum(sum(f.valid) for f in sim.steps[-1].forwards if not f.sample)

    sizes = []
    for tokens_per_second in (1000, 1000, 1000, 1000, 1000, 1000, 100, 1000, 3):
        sizes.append(step())
        sim.scheduler.prefill_budget.observe(sizes[-1], sizes[-1] / tokens_per_second, 0.1)
    follow = [100, 200] if decoding else [400, 513]
    assert sizes == [16, 32, 64, 128, 256, 512, 512 if decoding else 513, *follow]
    assert step() == 16
    sim.scheduler.prefill_budget.observe(16, 16.0, 30.0)  # 1 token/s, and decoding takes 30 s: prefill may take as long
    assert step() == 30


def test_evictions_stay_within_the_budget():
    sim = Simulation(make_config(prefix_budget=16 * 250))
    for i in range(8):
        sim.submit(make_request(str(i), prompt_of(100, i), 1))
        sim.run()
        kept = sum(len(e) for e in sim.ranks[0][1].entries.values())
        assert 16 * kept == sim.scheduler.prefix.used <= 16 * 250
    assert any(isinstance(op, Evict) for s in sim.steps for op in s.ops)
    assert isinstance(sim.steps[0].forwards[0], Forward)
