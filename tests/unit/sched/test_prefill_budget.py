"""The prefill budget on machines of any speed, and its bounds on a CPU and on a GPU."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.sched.prefill_budget import (
    MIN_CHUNK,
    ON_CPU,
    ON_GPU,
    PREFILL_ONLY,
    PrefillBudget,
    prefill_bounds,
)

TARGET_S = 0.25
machines = st.tuples(st.floats(1e-4, 1.0), st.floats(1e-6, 1.0))
"""Seconds of any step, and of each of its prompt tokens."""
decodes = st.lists(st.tuples(st.integers(0, 8), st.floats(0, 20)), min_size=1, max_size=12)
"""For each step: decoding rows, and the seconds that they take."""


@given(machine=machines, steps=decodes, bounds=st.sampled_from([ON_CPU, ON_GPU]))
def test_no_step_is_planned_beyond_its_bounds(machine, steps, bounds):
    """No step has more tokens than allowed, or than twice the one before, or takes too long, except the smallest."""
    fixed_s, token_s = machine
    budget = PrefillBudget(bounds, TARGET_S, 0.0)
    decode_before_s = math.inf
    for i, (decoding, decode_s) in enumerate(steps):
        tokens = budget.tokens(decoding)
        assert MIN_CHUNK <= tokens <= max(MIN_CHUNK, bounds.max_tokens - decoding)
        assert tokens <= bounds.first * 2**i
        if i and tokens > MIN_CHUNK:
            allowed_s = min(bounds.longest_s, max(PREFILL_ONLY * TARGET_S, decode_before_s))
            assert token_s * tokens <= allowed_s * (1 + 1e-9)
        budget.observe(tokens, fixed_s + token_s * tokens, decode_s)
        decode_before_s = decode_s


@pytest.mark.parametrize("decoding", [0, 3])
def test_a_fast_gpu_goes_to_the_most_at_once(decoding):
    budget = PrefillBudget(ON_GPU, TARGET_S, 0.0)
    sizes = []
    for _ in range(5):
        sizes.append(budget.tokens(decoding))
        budget.observe(sizes[-1], sizes[-1] / 20_000, 0.01)
    assert sizes == [256, 512, 1024, 2048 - decoding, 2048 - decoding]


def test_a_slow_gpu_stays_below_the_watchdog_however_long_decoding_takes():
    """100 tokens/s, and decoding rows that take 30 s: on a CPU prefill takes as long, here never longer than 2 s."""
    found = {}
    for name, bounds in {"cpu": ON_CPU, "gpu": ON_GPU}.items():
        budget = PrefillBudget(bounds._replace(max_tokens=10_000), TARGET_S, 0.0)
        for _ in range(12):
            tokens = budget.tokens(1)
            budget.observe(tokens, tokens / 100, 30.0)
        found[name] = budget.tokens(1)
    assert found == {"cpu": 3000, "gpu": 200}


def test_the_bounds_of_a_machine():
    cpu, gpu = (prefill_bounds(on_gpu=on_gpu, stages=1, max_tokens=None, rows=16) for on_gpu in (False, True))
    assert cpu == (16, 512, math.inf, True)
    assert gpu == (256, 2048, 2.0, False)
    assert prefill_bounds(on_gpu=True, stages=1, max_tokens=None, rows=4096).max_tokens == 4096
    assert prefill_bounds(on_gpu=True, stages=1, max_tokens=100, rows=16).max_tokens == 100
    assert PrefillBudget(prefill_bounds(on_gpu=True, stages=1, max_tokens=100, rows=16), TARGET_S, 0.0).tokens(0) == 100


def test_chunks_that_follow_each_other_through_stages_of_cpus_are_short():
    staged = prefill_bounds(on_gpu=False, stages=2, max_tokens=None, rows=16)
    assert staged == (16, 128, math.inf, True)
    assert prefill_bounds(on_gpu=False, stages=2, max_tokens=512, rows=16).max_tokens == 512
    assert prefill_bounds(on_gpu=False, stages=2, max_tokens=None, rows=256).max_tokens == 256
    assert prefill_bounds(on_gpu=True, stages=2, max_tokens=None, rows=16) == ON_GPU
