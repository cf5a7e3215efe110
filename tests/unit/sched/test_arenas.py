"""Rows in arenas, which grow as a whole: what a row costs, and that a long prompt leaves the rows beside it alone."""

from __future__ import annotations

import random

import pytest
from simulation import VOCAB, Simulation, make_config, make_request, reference

from phalanx.sched import admission
from phalanx.sched.admission import Admission, KvLimits
from phalanx.sched.arena import ArenaLayout
from phalanx.sched.plan import Resize
from phalanx.sched.sequence import Sequence


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rnd = random.Random(seed)
    return [rnd.randrange(VOCAB) for _ in range(length)]


def test_making_room_never_takes_memory():
    """Rows of the other arena may have more tokens than its buffer since the last plan."""
    limits = KvLimits(max_num_seqs=4, max_model_len=4096, kv_budget=16 * 2560, bytes_per_token=16)
    layout = ArenaLayout(limits.n_arenas, limits.row_groups)
    room = Admission(limits, layout)
    long, short = (Sequence(n, make_request(str(n), [1] * length, 99), 0.0) for n, length in ((0, 1279), (1, 1023)))
    assert room.admit(long) and room.admit(short) and (long.arena, short.arena) == (1, 0)
    long.tokens += [1] * 400
    assert not room.reserve(layout.arenas[0], 2, 1024)
    assert room.used <= limits.kv_budget and layout.arenas[1].capacity == 1280


def test_one_long_row_does_not_inflate_the_short_ones():
    config = make_config(max_num_seqs=8, max_model_len=16384, kv_budget=16 * (8 * 2048 * 2), prefix_budget=0)
    assert config.limits.n_arenas == 4
    sim = Simulation(config)
    requests = [
        make_request("long", prompt_of(8000), 40),
        *(make_request(str(i), prompt_of(200, i), 40) for i in range(7)),
    ]
    for request in requests:
        sim.submit(request)
    sim.run()
    assert sim.outputs == {r.id: reference(r) for r in requests}
    assert sim.largest_kv < 16 * (9216 + 8 * 512)


def test_a_long_prompt_does_not_resize_the_rows_beside_it():
    """Not even where it is short enough for their arena."""
    config = make_config(max_num_seqs=8, max_model_len=8192, kv_budget=16 * 8 * 6656 * 2, prefix_budget=0)
    sim = Simulation(config)
    short = [make_request(str(i), prompt_of(100, i), 300) for i in range(7)]
    for request in short:
        sim.submit(request)
    for _ in range(20):
        sim.step()
    assert config.limits.long_threshold == 6656 and sim.scheduler.n_running == 7
    sim.submit(make_request("long", prompt_of(6000), 2))
    sim.run()
    assert max(op.capacity for step in sim.steps for op in step.ops if isinstance(op, Resize) and not op.arena) <= 1024
    assert sim.outputs["0"] == reference(short[0])


def test_agents_of_different_lengths_cost_their_own():
    limits = KvLimits(max_num_seqs=16, max_model_len=65536, kv_budget=16 * 80_000, bytes_per_token=16)
    layout = ArenaLayout(limits.n_arenas, limits.row_groups)
    room = Admission(limits, layout)
    assert all(room.admit(Sequence(n, make_request(str(n), [1] * n, 99), 0.0)) for n in (60_000, 8_001, 8_000))


@pytest.mark.parametrize("seed", range(40))
def test_no_admission_makes_other_rows_longer(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(admission, "GRANULE", 8)
    monkeypatch.setattr(admission, "MIN_THRESHOLD", 32)
    rnd = random.Random(seed)
    sim = Simulation(make_config(max_num_seqs=6, max_model_len=512, kv_budget=16 * rnd.choice((600, 1500, 9000))))
    arenas, admit = sim.scheduler.layout.arenas, sim.scheduler.admission.admit

    def checked(seq: Sequence) -> bool:
        before = [(arena, arena.capacity) for arena in arenas if arena.rows]
        admitted = admit(seq)
        assert all(arena.capacity <= max(capacity, 40) for arena, capacity in before)
        return admitted

    monkeypatch.setattr(sim.scheduler.admission, "admit", checked)
    requests = [make_request(str(i), prompt_of(rnd.choice((5, 30, 90, 200, 400)), i), 60) for i in range(14)]
    for request in requests:
        sim.submit(request)
        for _ in range(rnd.randrange(12)):
            sim.step()
    sim.run()
    assert sim.outputs == {r.id: reference(r) for r in requests}


def test_a_row_that_grows_long_changes_arena():
    config = make_config(max_num_seqs=2, max_model_len=4096, kv_budget=16 * 4096 * 2, prefix_budget=0)
    sim = Simulation(config)
    threshold = config.limits.long_threshold
    requests = [make_request("a", prompt_of(threshold - 20), 60), make_request("b", prompt_of(30, 1), 90)]
    for request in requests:
        sim.submit(request)
    sim.run()
    assert sim.outputs == {r.id: reference(r) for r in requests}
