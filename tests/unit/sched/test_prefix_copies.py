"""Prefixes are copied beside decoding rows in parts, and rows continue from them as if they were whole at once."""

from __future__ import annotations

import random

import pytest
from simulation import Simulation, make_config, make_request, reference

from phalanx.sched.plan import Restore, Share
from phalanx.sched.prefill_budget import COPY_SPEED, PrefillBounds

BYTES = 16  # per token


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed + 7 * i) % 50 for i in range(length)]


def simulation(copied: int, **more) -> Simulation:
    """One whose rows allow so many copied tokens per step."""
    prefill = PrefillBounds(64, 64, follows_decoding=True)
    sim = Simulation(make_config(prefill=prefill, page_tokens=16, bytes_per_token=BYTES, **more))
    sim.scheduler.prefill_budget.observe(0, 0.0, copied * BYTES / COPY_SPEED)
    return sim


def copies(sim: Simulation, since: int = 0) -> list[Restore | Share]:
    return [op for step in sim.steps[since:] for op in step.ops if isinstance(op, Restore | Share)]


def test_beside_a_decoding_row_a_prefix_is_copied_in_parts() -> None:
    sim = simulation(100)
    sim.submit(make_request("first", prompt_of(320), 1))
    sim.run()
    sim.submit(make_request("stream", prompt_of(10, 3), 200))
    sim.step()
    sim.submit(again := make_request("again", prompt_of(320), 3))
    since = len(sim.steps)
    sim.run()
    assert [(op.start, op.length) for op in copies(sim, since)] == [(0, 100), (100, 200), (200, 300), (300, 319)]
    assert all(any(f.sample for f in step.forwards) for step in sim.steps[since : since + 4])  # the stream goes on
    assert sim.outputs["again"] == reference(again) and sim.finished["again"].cached_tokens == 319


def test_alone_a_prefix_is_copied_at_once() -> None:
    sim = simulation(100)
    for name in ("first", "again"):
        sim.submit(make_request(name, prompt_of(320), 2))
        sim.run()
    assert [(op.start, op.length) for op in copies(sim)] == [(0, 319)]


def test_recurrent_state_is_copied_at_once() -> None:
    sim = simulation(100, recurrent=True, bytes_per_row=8)
    sim.submit(make_request("first", prompt_of(320), 2))
    sim.run()
    sim.submit(make_request("stream", prompt_of(10, 3), 200))
    sim.step()
    known = prompt_of(320) + sim.outputs["first"]
    sim.submit(again := make_request("again", known, 3))
    sim.run()
    assert [(op.start, op.length) for op in copies(sim)] == [(0, 321)] and sim.outputs["again"] == reference(again)


@pytest.mark.parametrize("live", [False, True])
def test_a_prefix_that_is_dropped_while_it_is_copied_leaves_what_was_copied(live: bool) -> None:
    sim = simulation(100)
    sim.submit(make_request("first", prompt_of(320), 300 if live else 1))
    while sim.step() and len(sim.outputs["first"]) < 3:
        pass
    sim.submit(make_request("stream", prompt_of(10, 3), 100))
    sim.step()
    sim.submit(again := make_request("again", prompt_of(320), 3))
    sim.step()
    sim.scheduler.cancel("first", sim.now) if live else None
    sim.scheduler.reset_prefix_cache()
    sim.run()
    assert [type(op) for op in copies(sim)] == [Share if live else Restore]
    assert sim.outputs["again"] == reference(again)
    assert sim.finished["again"].cached_tokens == 100 == sim.scheduler.counters.prefix_hits


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_row_that_ends_while_its_prefix_is_copied_reports_none_of_it(is_loaded: bool) -> None:
    sim = simulation(100)
    sim.submit(make_request("first", prompt_of(320), 1))
    sim.run()
    sim.submit(make_request("stream", prompt_of(10, 3), 100))
    sim.step()
    sim.submit(make_request("again", prompt_of(320), 3))
    sim.step()
    (row,) = [row for row in sim.scheduler.by_number.values() if row.request.id == "again"]
    assert row.prefix is not None and 0 < row.kv_len < row.prefix_len
    row.is_loaded = is_loaded
    assert (row.cached_tokens, row.disk_tokens) == (0, 0)
    if is_loaded:
        sim.run()
        assert sim.finished["again"].disk_tokens == sim.finished["again"].cached_tokens == 319


@pytest.mark.parametrize("seed", range(60))
def test_random_lives_give_the_reference(seed: int) -> None:
    """Few tokens of memory for rows and for prefixes, many common prefixes, cancellations, choices of one request."""
    rnd = random.Random(seed)
    sim = simulation(
        rnd.choice((1, 7, 30)), max_num_seqs=5, kv_budget=BYTES * rnd.choice((500, 2000)),
        prefix_budget=BYTES * rnd.choice((150, 400, 4000)), max_model_len=400, recurrent=rnd.random() < 0.2,
    )  # fmt: skip
    requests = {}
    for i in range(20):
        prompt = prompt_of(rnd.choice((20, 100, 200)), rnd.randrange(2)) + prompt_of(rnd.randrange(3), i)
        requests[str(i)] = request = make_request(str(i), prompt, rnd.randrange(1, 60))
        sim.submit(request)
        for _ in range(rnd.randrange(10)):
            sim.step()
        if rnd.random() < 0.2:
            sim.scheduler.cancel(str(rnd.randrange(i + 1)), sim.now)
    sim.run()
    for name, request in requests.items():
        if sim.finished[name].reason == "length":
            assert sim.outputs[name] == reference(request)
