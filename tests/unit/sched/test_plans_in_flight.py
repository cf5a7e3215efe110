"""What the scheduler plans while outcomes are out (design: Plans in flight). Plans return when a test says so."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from simulation import make_config, make_request

from phalanx.sched import admission
from phalanx.sched.admission import Admission, KvLimits
from phalanx.sched.arena import ArenaLayout
from phalanx.sched.commit import commit_tokens
from phalanx.sched.plan import Free, Step, Store
from phalanx.sched.scheduler import Scheduler
from phalanx.sched.sequence import Sequence
from phalanx.types import Finished, Tokens

PROMPT = [i % 50 for i in range(300)]


def scheduler(*requests: tuple[str, int], row_groups: int = 2, **more) -> Scheduler:
    """Requests of (name, tokens of the prompt) have been submitted."""
    config = make_config(**{"max_num_seqs": 8, "prefix_budget": 0, **more})
    made = Scheduler(replace(config, limits=replace(config.limits, row_groups=row_groups)))
    for name, length in requests:
        made.submit(make_request(name, [len(name), *PROMPT[: length - 1]], 1000, owner=name), 0.0)
    return made


def plan(scheduler: Scheduler) -> Step:
    step = scheduler.schedule(1.0)
    assert step is not None
    return step


def back(scheduler: Scheduler, step: Step, tokens: int = 1) -> None:
    """A plan returns: each row that it samples for gets so many tokens, as if drafts had been right."""
    scheduler.apply(
        [
            commit_tokens(seq, seq.kv_len, valid, [1] * min(tokens, valid))
            for forward in step.forwards
            if forward.sample
            for number, valid in zip(forward.seqs, forward.valid, strict=True)
            for seq in [scheduler.by_number[number]]
        ],
        1.0,
    )


def sampled(step: Step) -> set[int]:
    return {number for forward in step.forwards if forward.sample for number in forward.seqs}


def test_chunks_follow_each_other():
    made = scheduler(("a", 40), max_num_batched_tokens=16, first_chunk=16)
    steps = [plan(made) for _ in range(3)]
    assert [forward.valid for step in steps for forward in step.forwards] == [(16,), (16,), (7,), (1,)]
    assert [[c.computed for c in step.commits] for step in steps] == [[], [16], [32]]
    assert made.schedule(1.0) is None and not made.idle  # the only row is in flight
    back(made, steps[-1])
    (commit,) = plan(made).commits
    assert (commit.computed, commit.kv_len, len(commit.tokens)) == (40, 40, 1)  # the last chunk is in it


def test_row_groups_take_turns():
    made = scheduler(("a", 2), ("b", 2), ("c", 2), row_groups=2)
    first, second = plan(made), plan(made)
    assert (sampled(first), sampled(second)) == ({0, 2}, {1})  # a new row goes where the fewest are
    assert made.schedule(1.0) is None
    for _ in range(3):
        back(made, first)
        first, second = second, plan(made)
        assert sampled(second) == ({0, 2} if sampled(first) == {1} else {1})
    back(made, first)
    back(made, second)
    assert sampled(plan(made)) == sampled(first)  # neither is in flight: it has waited longest


def test_a_row_that_finishes_its_prompt_waits_for_its_group():
    made = scheduler(("a", 2), row_groups=1)
    first = plan(made)
    made.submit(make_request("b", PROMPT[:20], 9), 1.0)
    second = plan(made)
    assert [forward.sample for forward in second.forwards] == [False]
    assert made.schedule(1.0).forwards == ()  # it says what the chunk has computed; nothing can be sampled
    assert made.schedule(1.0) is None
    back(made, first)
    assert sampled(plan(made)) == {0, 1}


@pytest.mark.parametrize("how", ["cancel", "finish", "give up", "timeout"])
def test_a_row_in_flight_ends_when_its_plan_returns(how: str):
    made = scheduler(("a", 20), prefix_budget=1 << 18)
    if how == "timeout":
        made.by_id["a"].request = replace(made.by_id["a"].request, timeout_s=2.0)
        made.by_id["a"].deadline = 2.0
    for _ in range(3):
        back(made, plan(made))
    step = plan(made)
    made.take_events()
    match how:
        case "cancel":
            made.cancel("a", 2.0)
        case "finish":
            made.finish("a", 2, 2.0)
        case "give up":
            made.give_up(0, "error", "why", 2.0)
    assert made.schedule(2.0) is None and made.take_events() == [] and "a" in made.by_id
    made.cancel("a", 2.0)  # the first ending counts
    back(made, step)
    tokens, finished = made.take_events()
    assert isinstance(tokens, Tokens) and isinstance(finished, Finished)
    reason, n = {
        "cancel": ("cancelled", 4),
        "finish": ("stop", 2),
        "give up": ("error", 4),
        "timeout": ("timeout", 4),
    }[how]
    assert (finished.reason, finished.n_tokens) == (reason, n)
    after = plan(made)
    store, free = [op for op in after.ops if isinstance(op, Store | Free)]
    assert isinstance(store, Store) and isinstance(free, Free)
    assert store.length == (22 if how == "finish" else 23) and len(after.commits) == 1


def test_a_stop_that_the_row_finds_itself_gives_way_to_one_that_was_found_before():
    made = scheduler(("a", 20))
    back(made, plan(made))
    back(made, plan(made))
    step = plan(made)
    seq = made.by_id["a"]
    made.finish("a", 1, 1.0)
    commit = replace(commit_tokens(seq, seq.kv_len, 1, [1]), finish="length")
    made.take_events()
    made.apply([commit], 1.0)
    assert step.forwards and [e.n_tokens for e in made.take_events() if isinstance(e, Finished)] == [1]


def test_what_gives_way_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """The older row needs memory, and the newer one, which would give way, is in flight."""
    monkeypatch.setattr(admission, "GRANULE", 8)
    made = scheduler(("a", 15), ("bb", 15), kv_budget=16 * 16 * 2)
    a, b = plan(made), plan(made)
    back(made, a)
    a = plan(made)
    assert (sampled(a), sampled(b)) == ({0}, {1})
    back(made, a)
    assert len(made.by_id["a"].tokens) == 17
    made.submit(make_request("c", [3], 9, owner="c"), 1.0)
    waits = plan(made)
    assert (waits.forwards, waits.ops) == ((), ())  # and nothing new takes what becomes free
    back(made, b)
    goes_on = plan(made)
    assert sampled(goes_on) == {0} and made.by_id["bb"].slot < 0 and made.counters.preemptions == 1


def test_a_buffer_keeps_positions_in_flight():
    """Making room for another arena cuts this one to what its rows have, drafts in flight included."""
    limits = KvLimits(max_num_seqs=4, max_model_len=1024, kv_budget=16 * 1024, bytes_per_token=16, row_groups=2)
    layout = ArenaLayout(limits.n_arenas, limits.row_groups)
    room = Admission(limits, layout)
    seq = Sequence(0, make_request("a", PROMPT[:255], 99), 0.0)
    assert room.admit(seq) and room.reserve(layout.arenas[0], 1, 300) and layout.arenas[0].capacity == 512
    seq.kv_len, seq.in_flight = 254, 9
    assert not room.reserve(layout.arenas[1], 1, 768) and layout.arenas[0].capacity == 512
    seq.in_flight = 1
    assert room.reserve(layout.arenas[1], 1, 768) and layout.arenas[0].capacity == 256
