"""Speculation in the scheduler's simulation: no draft changes a token, or takes room it was not given (A2, A7)."""

from __future__ import annotations

import pytest
from simulation import VOCAB, Simulation, half_right, make_config, make_request, next_token, reference

from phalanx.sched.commit import accept
from phalanx.sched.forwards import computed
from phalanx.sched.plan import Forward

PROMPTS = [[(7 * i + j) % VOCAB for j in range(1 + 19 * i % 90)] for i in range(12)]


def oracle(k: int):
    """Always right, and k tokens whatever is of use."""

    def draft(tokens: list[int], room: int) -> list[int]:
        history = list(tokens)
        for _ in range(k):
            history.append(next_token(history))
        return history[len(tokens) :]

    return draft


def hostile(k: int):
    """Always wrong."""
    return lambda tokens, room: [(token + 1) % VOCAB for token in oracle(k)(tokens, room)]


def run(draft, *, max_tokens: int = 60, **config) -> Simulation:
    """All prompts, a few of them with stop ids."""
    sim = Simulation(make_config(**config), 2, draft)
    requests = [
        make_request(str(i), p, max_tokens + i, stop_ids=[i] if i % 3 == 0 else []) for i, p in enumerate(PROMPTS)
    ]
    for i, request in enumerate(requests):
        sim.submit(request)
        if i % 2:
            sim.step()
    sim.run()
    assert sim.outputs == {r.id: reference(r) for r in requests}
    return sim


def sampling(sim: Simulation) -> list[Forward]:
    return [f for step in sim.steps for f in step.forwards if f.sample]


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("k", range(1, 9))
def test_every_width_and_concurrency(k, rows):
    right, wrong = (run(draft(k), max_num_seqs=rows) for draft in (oracle, hostile))
    assert right.accepted == right.drafted > 0
    assert wrong.accepted == 0 < wrong.drafted
    assert len(wrong.steps) > len(right.steps)


def test_rows_of_one_forward_have_different_widths():
    sim = run(half_right(1), max_num_seqs=8)
    assert any(len(set(f.valid)) > 2 for f in sampling(sim))
    assert 0 < sim.accepted < sim.drafted


def test_padding_is_left_out_where_much_would_be_computed():
    never, above_32 = (run(half_right(2), max_num_seqs=12, pack_above=limit) for limit in (None, 32))
    assert not any(f.packed for f in sampling(never))
    for forward in sampling(above_32):
        rows, tokens, widest = len(forward.valid), sum(forward.valid), max(forward.valid)
        assert forward.packed == (tokens < rows * widest > 32)
        assert computed(rows, tokens, widest, pack_above=32) == (tokens if forward.packed else rows * widest)
        assert computed(rows, tokens, widest, pack_above=None) == rows * widest
    packed = [f.packed for f in sampling(above_32)]
    assert any(packed) and not all(packed)


def test_an_answer_takes_no_more_steps_than_it_must():
    sim = Simulation(make_config(), draft=oracle(4))
    sim.submit(make_request("a", [1, 2, 3], 21))
    sim.run()
    # The first token comes with the last chunk of the prompt, then five at a time.
    assert [f.valid for f in sampling(sim)] == [(1,), (5,), (5,), (5,), (5,)]


def test_nothing_is_drafted_beyond_the_last_token():
    sim = Simulation(make_config(), draft=oracle(8))
    sim.submit(make_request("a", [1, 2, 3], 7))
    sim.run()
    assert [f.valid for f in sampling(sim)] == [(1,), (6,)]
    assert sim.finished["a"].n_tokens == 7


@pytest.mark.parametrize("most", [0, 2])
def test_a_request_may_want_fewer(most):
    sim = Simulation(make_config(), draft=oracle(8))
    sim.submit(make_request("a", [1, 2, 3], 14, max_drafts=most))
    sim.submit(make_request("b", [4, 5, 6], 14))
    sim.run()
    widest = {"a": 0, "b": 0}
    for forward in sampling(sim):
        for number, valid in zip(forward.seqs, forward.valid, strict=True):
            widest["ab"[number]] = max(widest["ab"[number]], valid)
    assert widest == {"a": 1 + most, "b": 9}
    assert {done.n_tokens for done in sim.finished.values()} == {14}


def test_a_step_is_not_wider_than_its_budget():
    sim = run(oracle(8), max_num_seqs=8, max_num_batched_tokens=16)
    cells = [sum(len(row) for f in step.forwards if f.sample for row in f.tokens) for step in sim.steps]
    assert max(cells) <= 16
    assert sim.drafted


def test_drafts_end_where_the_context_does():
    """Buffers hold 256 tokens, the context as many; half the rows are a few tokens from its end."""
    sim = Simulation(make_config(max_model_len=256), 1, oracle(8))
    requests = [make_request(str(i), [i] * (250 if i % 2 else 5), 40) for i in range(4)]
    for request in requests:
        sim.submit(request)
    sim.run()
    assert sim.scheduler.admission.limits.max_model_len == 256
    assert all(sim.outputs[r.id] == reference(r)[: 256 - len(r.prompt)] for r in requests)


def test_drafts_end_one_before_the_context():
    """The token drawn after them is the last one that the context holds."""
    sim = Simulation(make_config(max_model_len=256), draft=oracle(8))
    sim.submit(make_request("a", [1] * 250, 40))
    sim.run()
    assert [f.valid for f in sampling(sim)] == [(1,), (5,)]


@pytest.mark.parametrize("most", [1, 8, 12, 20, 36])
def test_logits_of_a_step_are_bounded(most):
    """Rows x (k + 1) tokens, what pads the rows included; one per row is always allowed."""
    config = {"max_num_seqs": 4, "max_logits": most}
    sim = run(half_right(1), **config)
    areas = [sum(len(f.tokens) * len(f.tokens[0]) for f in step.forwards if f.sample) for step in sim.steps]
    assert max(areas) <= max(4, most)
    widest = max(max(f.valid) for f in sampling(run(oracle(8), **config)))
    assert widest >= min(9, most // 4)
    assert bool(sim.drafted) is (most > 4)


def test_no_row_gives_way_to_a_draft():
    """Memory for two rows of 256 tokens: drafts that would need more are cut, nobody is preempted for them."""
    counts = []
    for draft in (None, oracle(8)):
        sim = Simulation(make_config(kv_budget=2 * 256 * 16, prefix_budget=0), 1, draft)
        for i in range(2):
            sim.submit(make_request(str(i), [i] * 200, 56))
        sim.run()
        counts.append(sim.scheduler.counters.preemptions)
        assert sim.largest_kv <= 2 * 256 * 16
        assert sim.outputs["1"] == reference(make_request("1", [1] * 200, 56))
    assert counts == [0, 0]
    assert sim.drafted


def test_rows_with_recurrent_state_are_never_drafted_for():
    sim = run(oracle(4), recurrent=True, bytes_per_row=64)
    assert all(f.valid == (1,) * len(f.valid) for f in sampling(sim))


def test_accepting_one_draft_too_many_is_noticed():
    """The control: the same run fails when the acceptance rule is wrong."""
    sim = Simulation(make_config(), draft=half_right(3))
    sim.accept = lambda drafts, sampled: [*drafts, sampled[-1]][: len(accept(drafts, sampled)) + 1]
    request = make_request("a", [1, 2, 3], 60)
    sim.submit(request)
    sim.run()
    assert sim.outputs["a"] != reference(request)
