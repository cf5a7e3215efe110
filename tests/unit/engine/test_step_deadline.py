"""How long a step may take (A6: a rank that stands still is found, a slow one is not taken for it)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.step_deadline import FACTOR, UNMEASURED, StepDeadline
from phalanx.sched.plan import Forward, Step


def step(prefill: int = 0, rows: int = 1, width: int = 1) -> Step:
    forwards = [Forward(0, 0, tuple(range(rows)), ((1,) * width,) * rows, (width,) * rows, sample=True)]
    if prefill:
        forwards.append(Forward(0, rows, (99,), ((1,) * prefill,), (prefill,), sample=False))
    return Step(1, (), (), tuple(forwards), 0)


def test_before_anything_was_measured_there_is_much_time():
    assert StepDeadline(10.0).limit(step()) == 10.0 * UNMEASURED


def test_fast_steps_get_the_least_limit():
    clock = StepDeadline(10.0)
    clock.observe(100, 0.1, 0.01)
    assert clock.limit(step(prefill=100)) == 10.0


def test_slow_machines_get_more():
    clock = StepDeadline(10.0)
    clock.observe(100, 50.0, 4.0)  # 0.5 s a token, 4 s a decoding step
    assert clock.limit(step()) == FACTOR * 4.0
    assert clock.limit(step(prefill=200)) == FACTOR * (200 * 0.5 + 4.0)


def test_a_verification_may_take_as_many_times_longer_as_it_has_tokens():
    """Also when wide steps were last seen so long ago that what they took is forgotten."""
    clock = StepDeadline(1.0)
    clock.observe(0, 0.0, 27.0, width=9)
    for _ in range(500):
        clock.observe(0, 0.0, 3.0)
    assert clock.limit(step(width=9)) == FACTOR * 27.0
    assert clock.limit(step()) == FACTOR * 3.0


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 100), st.floats(1e-6, 100)), min_size=1, max_size=50))
def test_a_step_like_the_last_one_is_never_too_slow(seen):
    clock = StepDeadline(1.0)
    for tokens, prefill_s, decode_s in seen:
        clock.observe(tokens, prefill_s if tokens else 0.0, decode_s)
    tokens, prefill_s, decode_s = seen[-1]
    assert clock.limit(step(prefill=tokens)) >= (prefill_s if tokens else 0.0) + decode_s
