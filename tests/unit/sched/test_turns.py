"""Rows by turns between owners: a greedy neighbour delays nobody, and one owner alone is served as it arrives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import VOCAB, Simulation, make_config, make_request, reference
from support.examples import examples

from phalanx.sched.sequence import Sequence
from phalanx.sched.waiting import WaitingQueue


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rnd = random.Random(seed)
    return [rnd.randrange(VOCAB) for _ in range(length)]


def sequence(number: int, owner: str) -> Sequence:
    return Sequence(number, make_request(str(number), [1], owner=owner), 0.0)


def owners_of_rows(sim: Simulation) -> list[str]:
    return sorted(row.request.owner for row in sim.scheduler.layout.rows())


def greedy(sim: Simulation, n: int, owner: str = "greedy", tokens: int = 500) -> list:
    requests = [make_request(f"{owner} {i}", prompt_of(20, i), tokens, owner=owner) for i in range(n)]
    for request in requests:
        sim.submit(request)
    return requests


def test_turns():
    queue = WaitingQueue()
    sequences = [sequence(i, owner) for i, owner in enumerate("aaabbc")]
    for seq in sequences:
        queue.append(seq)
    rows = {"a": 1, "c": 1}
    order = []
    for seq in queue.by_turns(rows):
        order.append(seq.number)
        rows[seq.request.owner] = rows.get(seq.request.owner, 0) + 1
        queue.remove(seq)
    assert order == [3, 0, 4, 5, 1, 2]
    assert len(queue) == 0


def test_one_owner_is_served_in_order_of_arrival_and_what_lost_its_row_first():
    queue = WaitingQueue()
    for i in (3, 4, 5):
        queue.append(sequence(i, ""))
    lost = [sequence(1, ""), sequence(2, "")]
    for seq in reversed(lost):
        queue.put_first(seq)
    assert [seq.number for seq in queue.by_turns({"": 7})] == [1, 2, 3, 4, 5]
    queue.remove(lost[0])
    assert (len(queue), bool(queue)) == (4, True)


def test_a_newcomer_gets_a_row_in_the_next_step_although_all_are_taken():
    sim = Simulation(make_config(max_num_seqs=4))
    theirs = greedy(sim, 12)
    for _ in range(5):
        sim.step()
    assert owners_of_rows(sim) == ["greedy"] * 4
    mine = make_request("mine", prompt_of(10, 99), 3, owner="me")
    sim.submit(mine)
    sim.step()
    assert owners_of_rows(sim) == ["greedy"] * 3 + ["me"]
    assert len(sim.outputs["mine"]) == 1
    sim.run()
    assert sim.outputs == {request.id: reference(request) for request in [*theirs, mine]}


def test_rows_that_become_free_go_to_the_owner_with_fewest():
    sim = Simulation(make_config(max_num_seqs=4))
    greedy(sim, 12, tokens=40)
    sim.step()
    greedy(sim, 6, "other", tokens=400)
    while any(f"greedy {i}" not in sim.finished for i in range(3)):
        sim.step()
    sim.step()
    assert owners_of_rows(sim) == ["greedy"] * 2 + ["other"] * 2


def test_what_makes_way_is_not_computed_again():
    sim = Simulation(make_config(max_num_seqs=2))
    theirs = [make_request(f"g{i}", prompt_of(200, i), 30, owner="greedy") for i in range(2)]
    for request in theirs:
        sim.submit(request)
    while len(sim.outputs["g1"]) < 10:
        sim.step()
    before = sim.scheduler.counters.prefill_tokens
    sim.submit(make_request("mine", prompt_of(10, 99), 2, owner="me"))
    sim.run()
    assert sim.scheduler.counters.preemptions == 1
    assert sim.scheduler.counters.prefill_tokens - before < 50  # the newcomer's 10 and a rest of the other's 210
    assert {r.id: sim.outputs[r.id] for r in theirs} == {r.id: reference(r) for r in theirs}


def test_a_newcomer_gets_memory_too():
    config = make_config(max_num_seqs=8, kv_budget=4 * 256 * 16, bytes_per_token=16, max_model_len=512)
    sim = Simulation(config)
    theirs = greedy(sim, 4, tokens=200)
    sim.step()
    assert owners_of_rows(sim) == ["greedy"] * 4
    mine = make_request("mine", prompt_of(20, 99), 100, owner="me")
    sim.submit(mine)
    sim.step()
    assert owners_of_rows(sim) == ["greedy"] * 3 + ["me"]
    sim.run()
    assert sim.outputs == {request.id: reference(request) for request in [*theirs, mine]}


def test_rows_that_grow_do_not_push_a_neighbour_out():
    config = make_config(max_num_seqs=8, kv_budget=6 * 256 * 16, bytes_per_token=16, max_model_len=1024)
    sim = Simulation(config)
    theirs = greedy(sim, 3, tokens=600)
    sim.step()
    mine = make_request("mine", prompt_of(20, 99), 220, owner="me")
    sim.submit(mine)
    sim.step()
    while "mine" not in sim.finished:
        assert "me" in owners_of_rows(sim)
        sim.step()
    sim.run()
    assert sim.scheduler.counters.preemptions > 0
    assert sim.outputs == {request.id: reference(request) for request in [*theirs, mine]}


@pytest.mark.parametrize("owners", [2, 5])
def test_no_owner_is_preempted_for_another_that_has_a_row(owners):
    sim = Simulation(make_config(max_num_seqs=2))
    for i in range(owners):
        greedy(sim, 3, f"owner {i}", tokens=20)
    sim.run()
    assert sim.scheduler.counters.preemptions == 0
    assert len(sim.finished) == 3 * owners


@examples(12, soak=300)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.sampled_from((3, 6, 64)))
def test_every_owner_that_waits_has_a_row_or_all_have_one(rnd, rows, kv_rows):
    config = make_config(max_num_seqs=rows, kv_budget=kv_rows * 512 * 16, max_model_len=512)
    sim = Simulation(config)
    requests = []
    for i in range(40):
        owner = rnd.choice("abcd")
        tokens = rnd.randint(1, 60)
        requests.append(make_request(str(i), prompt_of(rnd.randint(1, 150), i), tokens, owner=owner))
        sim.submit(requests[-1])
        for _ in range(rnd.randint(0, 4)):
            sim.step()
            held = owners_of_rows(sim)
            waiting = {seq.request.owner for seq in sim.scheduler.waiting.by_turns({})}
            if not waiting <= set(held):
                assert len(held) == len(set(held)) or len(held) < rows  # no one has two, or memory is short
    sim.run()
    assert sim.outputs == {request.id: reference(request) for request in requests}
