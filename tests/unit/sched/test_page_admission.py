"""Rows that take memory by the page: each costs its own tokens; nothing grows, is freed or goes to another arena."""

from __future__ import annotations

from simulation import Simulation, half_right, make_config, make_request, reference

from phalanx.sched.plan import Move, Resize
from phalanx.sched.sequence import Sequence

BYTES = 16  # per token


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed + 7 * i) % 50 for i in range(length)]


def paged(**more) -> Simulation:
    draft = more.pop("draft", None)
    return Simulation(make_config(page_tokens=16, bytes_per_token=BYTES, **more), draft=draft)


def rows_of(sim: Simulation) -> list[Sequence]:
    return sim.scheduler.layout.rows()


def operations(sim: Simulation, kind: type) -> list:
    return [op for step in sim.steps for op in step.ops if isinstance(op, kind)]


def test_a_long_row_beside_short_ones_costs_its_own_tokens() -> None:
    """Agents of 6,000, 800 and 800 tokens in a budget of 8,000."""
    sim = paged(max_model_len=8192, kv_budget=8000 * BYTES, max_num_batched_tokens=512, prefix_budget=0)
    requests = [make_request(str(n), prompt_of(n, n), 50) for n in (6000, 801, 800)]
    for request in requests:
        sim.submit(request)
    sim.step()
    assert sim.scheduler.n_running == 3 and sim.scheduler.admission.used == (6016 + 816 + 816) * BYTES
    sim.run()
    assert sim.outputs == {r.id: reference(r) for r in requests}
    assert sim.scheduler.counters.preemptions == 0


def test_buffers_are_sized_once_and_never_again() -> None:
    sim = paged(max_num_seqs=8, max_model_len=2048, max_num_batched_tokens=512, draft=half_right(1))
    for turn in range(3):
        for i in range(12):
            sim.submit(make_request(f"{turn}/{i}", prompt_of(1 + 150 * i % 1700, i), 5 + 20 * i))
        sim.run()
    assert operations(sim, Resize) == [Resize(0, 8, 2048)]
    assert all(op.src_arena == op.arena == 0 for op in operations(sim, Move))
    assert sim.scheduler.admission.used == 0


def test_what_a_row_will_compute_counts_before_it_does() -> None:
    sim = paged(max_model_len=2048, kv_budget=2048 * BYTES, max_num_batched_tokens=64)
    sim.submit(make_request("long", prompt_of(1900), 10))
    sim.step()
    assert sim.scheduler.admission.used == 1904 * BYTES
    sim.submit(make_request("short", prompt_of(200, 1), 10))
    sim.step()
    assert sim.scheduler.n_running == 1
    sim.run()
    assert sim.largest_kv <= 2048 * BYTES and {"long", "short"} <= sim.finished.keys()


def test_the_newest_row_gives_way_where_rows_outgrow_the_budget() -> None:
    sim = paged(max_model_len=512, kv_budget=600 * BYTES, max_num_batched_tokens=64, prefix_budget=0)
    requests = [make_request(str(i), prompt_of(150, i), 250) for i in range(4)]
    for request in requests:
        sim.submit(request)
    sim.run()
    assert sim.outputs == {r.id: reference(r) for r in requests}
    assert sim.scheduler.counters.preemptions > 0 and sim.largest_kv <= 600 * BYTES


def test_drafts_take_no_memory_that_is_not_free() -> None:
    """A row ends where its memory does: drafts are cut to the rest of its last page."""
    budget = 112 * BYTES
    sim = paged(max_model_len=112, kv_budget=budget, draft=half_right(3), prefix_budget=0)
    request = make_request("a", prompt_of(60), 52)
    sim.submit(request)
    sim.run()
    assert sim.outputs["a"] == reference(request) and sim.drafted > 0 and sim.largest_kv <= budget


def test_recurrent_state_counts_once_for_each_row() -> None:
    sim = paged(max_model_len=512, kv_budget=1000, bytes_per_row=300, recurrent=True, prefix_budget=0)
    for i in range(3):
        sim.submit(make_request(str(i), prompt_of(4, i), 3))
    sim.step()
    assert sim.scheduler.n_running == 1 and [row.room for row in rows_of(sim)] == [16]
    assert sim.scheduler.admission.used == 16 * BYTES + 300
    sim.run()
    assert len(sim.finished) == 3
