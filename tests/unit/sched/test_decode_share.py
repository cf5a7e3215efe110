"""Streams beside prompts: rows keep their share of the time, chunks beside them are short, and everything ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import Simulation, make_config, make_request, reference
from support.examples import examples

from phalanx.sched.prefill_budget import (
    BESIDE_S,
    BESIDE_STEPS,
    COPY_SPEED,
    MIN_CHUNK,
    ON_CPU,
    ON_GPU,
    RECENT,
    PrefillBounds,
    PrefillBudget,
)

TARGET_S = 0.25
machines = st.tuples(st.floats(0, 1.0), st.floats(1e-6, 1.0))
"""Seconds of any chunk, and of each of its tokens."""
steps_s = st.lists(st.floats(1e-4, 20), min_size=1, max_size=60)
shares = st.floats(0, 0.95)
both = st.sampled_from([ON_CPU, ON_GPU])


@given(machine=machines, decodes=steps_s, bounds=both, share=shares)
def test_rows_decode_for_their_share_beside_an_endless_prompt(machine, decodes, bounds, share):
    """Whenever a chunk begins, rows have had their share of the time so far; no chunk is under 16 tokens."""
    fixed_s, token_s = machine
    budget = PrefillBudget(bounds, TARGET_S, share)
    prefill_s = decode_s = 0.0
    recent: list[float] = []
    for own_s in decodes:
        tokens = budget.tokens(4)
        took_s = fixed_s + token_s * tokens if tokens else 0.0
        if tokens:
            assert tokens >= MIN_CHUNK
            assert decode_s * (1 + 1e-9) + 1e-9 >= share * (decode_s + prefill_s)
        budget.observe(tokens, took_s, own_s)
        recent = [*recent, own_s][-RECENT:]
        prefill_s, decode_s = prefill_s + took_s, decode_s + min(recent)  # a slow step pays no more


@given(machine=machines, own_s=st.floats(1e-3, 20), share=shares)
def test_prompts_wait_no_longer_than_their_chunk_owes(machine, own_s, share):
    """Decoding that is longer than what was owed is no credit, and what is owed is paid: the prompt goes on."""
    fixed_s, token_s = machine
    budget = PrefillBudget(ON_CPU, TARGET_S, share)
    for _ in range(3):
        tokens = budget.tokens(4)
        took_s = fixed_s + token_s * tokens
        steps = 1
        budget.observe(tokens, took_s, own_s)
        while budget.tokens(4) == 0 and steps < 1000:
            budget.observe(0, 0.0, own_s)
            steps += 1
        expected = max(1, math.ceil(took_s * share / (1 - share) / own_s))
        if steps == 1000:
            assert expected >= 999
            return
        assert expected - 1 <= steps <= expected + 1


@given(machine=machines, decodes=steps_s)
def test_on_a_cpu_a_chunk_beside_rows_follows_their_step(machine, decodes):
    """As known from the last steps, of which the fastest counts."""
    fixed_s, token_s = machine
    budget = PrefillBudget(ON_CPU, TARGET_S, 0.0)
    recent = [math.inf]
    for own_s in decodes:
        tokens = budget.tokens(4)
        step_s = min(recent)
        if tokens > MIN_CHUNK and step_s < math.inf:
            assert token_s * tokens <= min(max(BESIDE_S, step_s), BESIDE_STEPS * step_s) * (1 + 1e-9)
        budget.observe(tokens, fixed_s + token_s * tokens, own_s)
        recent = [*recent, own_s][-RECENT:]


@pytest.mark.parametrize(("own_s", "tokens"), [(0.02, 40), (0.08, 100), (0.2, 200), (0.001, 16)])
def test_how_long_a_chunk_beside_rows_is(own_s, tokens):
    """1,000 tokens a second: two of the rows' steps, up to 100 ms or one of their steps."""
    budget = PrefillBudget(ON_CPU._replace(max_tokens=10_000), TARGET_S, 0.5)
    for _ in range(10):
        budget.observe(size := budget.tokens(0), size / 1000, 0.0)
    budget.observe(0, 0.0, own_s)
    for _ in range(RECENT - 1):
        budget.observe(0, 0.0, 2.0)  # behind chunks, or memory was moved
    assert budget.tokens(4) == tokens


@given(machine=machines, share=shares, bounds=both, n=st.integers(1, 20))
def test_a_prompt_alone_does_not_know_the_share(machine, share, bounds, n):
    fixed_s, token_s = machine
    owing, free = PrefillBudget(bounds, TARGET_S, share), PrefillBudget(bounds, TARGET_S, 0.0)
    for _ in range(n):
        assert owing.tokens(0) == free.tokens(0) >= MIN_CHUNK
        for budget in (owing, free):
            budget.observe(size := budget.tokens(0), fixed_s + token_s * size, 0.0)


@pytest.mark.parametrize("bounds", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_a_first_chunk_begins_at_the_speed_of_earlier_requests(bounds):
    """The short end of a prompt takes a step's fixed time, which tells little about a wide chunk."""
    budget = PrefillBudget(bounds, TARGET_S, 0.5)
    for _ in range(8):
        budget.observe(size := budget.tokens(0), 0.08 + size / 5000, 0.0)
    wide = budget.tokens(0)
    budget.observe(20, 0.08 + 20 / 5000, 0.0)
    assert budget.tokens(0) == wide == bounds.max_tokens


def test_a_slow_short_chunk_is_believed():
    """20 tokens that take longer than half the target: a wide chunk would take long, whatever a step's fixed time."""
    budget = PrefillBudget(ON_GPU, TARGET_S, 0.5)
    for _ in range(8):
        budget.observe(size := budget.tokens(0), size / 20_000, 0.0)
    budget.observe(20, 0.2, 0.0)
    assert budget.tokens(0) == 100


def test_what_was_owed_to_rows_that_ended_is_owed_no_more():
    budget = PrefillBudget(ON_CPU, TARGET_S, 0.5)
    budget.observe(16, 5.0, 0.1)
    assert budget.tokens(1) == 0
    assert budget.tokens(0) == MIN_CHUNK
    budget.observe(16, 5.0, 0.0)
    assert budget.tokens(1) == MIN_CHUNK


class Timed(Simulation):
    """A simulation whose steps take time, of which the scheduler learns as from the leader."""

    token_s, own_s = 0.01, 0.02

    def step(self) -> bool:
        going = super().step()
        if going:
            step = self.steps[-1]
            self.chunk = sum(sum(f.valid) for f in step.forwards if not f.sample)
            delayed_s = self.own_s if step.has_older_rows else 0.0
            self.scheduler.prefill_budget.observe(self.chunk, self.token_s * self.chunk, delayed_s)
        return going


def timed(share: float = 0.5) -> Timed:
    prefill = PrefillBounds(16, 64, follows_decoding=True)
    return Timed(make_config(prefill=prefill, decode_share=share, max_num_seqs=8, target_step_s=TARGET_S))


def test_steps_that_pay_compute_no_chunk():
    """A chunk of 16 tokens takes 160 ms, which are eight steps of the rows; the step that begins has one itself."""
    sim = timed()
    sim.submit(make_request("stream", [1, 2, 3], 200))
    sim.step()
    assert not sim.steps[-1].has_older_rows  # it has just finished its prompt: nothing delayed it
    sim.submit(make_request("long", [*range(500)], 1))
    chunks = []
    for _ in range(24):
        sim.step()
        chunks.append(sim.chunk)
        assert sim.steps[-1].has_older_rows
    assert chunks == 3 * [16, *7 * [0]]


def test_a_short_prompt_passes_a_long_one_beside_a_stream():
    sim = timed()
    sim.submit(make_request("stream", [1, 2, 3], 2000))
    sim.step()
    sim.submit(make_request("long", [*range(1500)], 1))
    for _ in range(3):
        sim.step()
    sim.submit(make_request("short", [*range(20)], 1))
    while "short" not in sim.finished:
        sim.step()
    assert len(sim.outputs["stream"]) < 40
    assert sim.scheduler.by_id["long"].to_prefill > 1400


@examples(60, soak=600)
@given(
    share=shares,
    pace=st.floats(1e-4, 0.1),
    own_s=st.floats(1e-3, 1.0),
    lengths=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 30)), min_size=1, max_size=12),
)
def test_everything_ends_with_its_own_tokens(share, pace, own_s, lengths):
    sim = timed(share)
    sim.token_s, sim.own_s = pace, own_s
    requests = [make_request(str(i), [i, *range(n)], most) for i, (n, most) in enumerate(lengths)]
    for request in requests:
        sim.submit(request)
        sim.step()
    sim.run()
    assert sim.outputs == {request.id: reference(request) for request in requests}


def test_decoding_without_a_prompt_is_no_credit():
    budget = PrefillBudget(ON_CPU, TARGET_S, 0.5)
    for _ in range(20):
        budget.observe(0, 0.0, 0.5)
    budget.observe(16, 1.2, 0.5)
    assert budget.tokens(4) == 0
    budget.observe(0, 0.0, 0.5)
    assert budget.tokens(4) == 0
    budget.observe(0, 0.0, 0.5)
    assert budget.tokens(4) >= MIN_CHUNK


def test_rows_are_still_owed_time_after_a_step_that_does_not_pay_it_all():
    budget = PrefillBudget(ON_CPU, TARGET_S, 0.5)
    budget.observe(16, 0.25, 0.1)  # 0.15 s are owed
    assert budget.still_owes
    budget.observe(0, 0.0, 0.1)
    assert not budget.still_owes and budget.tokens(4) == 0
    budget.observe(0, 0.0, 0.1)
    assert budget.tokens(4)


def test_a_step_copies_what_takes_as_long_as_the_rows_own_step():
    budget = PrefillBudget(ON_CPU, TARGET_S, 0.5)
    assert budget.copied_bytes == math.inf
    for seconds in (0.5, 0.25, 2.0):
        budget.observe(0, 0.0, seconds)
    assert budget.copied_bytes == COPY_SPEED / 4
    on_gpu = PrefillBudget(ON_GPU, TARGET_S, 0.5)
    on_gpu.observe(0, 0.0, 0.1)
    assert on_gpu.copied_bytes == math.inf


def test_a_step_that_is_slower_behind_a_chunk_is_owed_too_but_no_more_than_the_chunk():
    for slow_s, steps in ((0.1, 3), (0.2, 4), (0.3, 5), (9.0, 5)):
        budget = PrefillBudget(ON_CPU, TARGET_S, 0.5)
        budget.observe(0, 0.0, 0.1)
        budget.observe(16, 0.24, slow_s)
        paid = 1
        while budget.tokens(4) == 0:
            budget.observe(0, 0.0, 0.1)
            paid += 1
        assert paid == steps, slow_s
