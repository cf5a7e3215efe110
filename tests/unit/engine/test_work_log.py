"""What is counted for each sequence from the plans: chunks, steps, preemptions, where it left the nearest prefix."""

from __future__ import annotations

from phalanx.engine.work_log import WorkLog
from phalanx.sched.admission import KvLimits
from phalanx.sched.commit import commit_tokens
from phalanx.sched.plan import Step
from phalanx.sched.prefill_budget import PrefillBounds
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.types import Finished, Sampling, SequenceRequest, SequenceWork, StopRule

CONFIG = SchedulerConfig(
    limits=KvLimits(max_num_seqs=4, max_model_len=512, kv_budget=1 << 20, bytes_per_token=1),
    prefill=PrefillBounds(first=32, max_tokens=32),
    target_step_s=0.1,
    decode_share=0.5,
    prefix_budget=1 << 20,
)


class World:
    """A scheduler whose rows draw the token 7, and a log of its plans."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(CONFIG)
        self.log = WorkLog(self.scheduler)

    def plan(self) -> Step:
        """The next plan, which the log counts."""
        step = self.scheduler.schedule(0.0)
        assert step is not None
        self.log.note(step)
        return step

    def run(self, id: str, prompt: list[int], n: int = 3, owner: str = "") -> Finished:
        """Compute one sequence alone. Returns its end."""
        stop = StopRule(max_tokens=n)
        self.scheduler.submit(
            SequenceRequest(id=id, group=id, prompt=prompt, sampling=Sampling(), stop=stop, owner=owner), 0.0
        )
        while True:
            step = self.plan()
            rows = [self.scheduler.by_number[n] for f in step.forwards if f.sample for n in f.seqs]
            self.scheduler.apply([commit_tokens(row, row.kv_len, 1, [7]) for row in rows], 0.0)
            for event in map(self.log.with_work, self.scheduler.take_events()):
                if isinstance(event, Finished):
                    return event


def test_chunks_and_steps_of_a_sequence_are_counted() -> None:
    end = World().run("a", list(range(100)))
    assert (end.work.chunks, end.work.steps, end.work.preemptions) == (4, 3, 0)  # of 32 tokens, the last one fed alone


def test_a_prompt_that_nothing_resembles_has_no_nearest_prefix() -> None:
    end = World().run("a", list(range(100)))
    assert (end.work.nearest_tokens, end.work.left_at) == (0, 0)


def test_the_end_says_where_the_prompt_left_the_kept_prefix() -> None:
    world = World()
    world.run("a", list(range(100)))
    end = world.run("b", [*range(50), 200, *range(51, 100)])
    assert end.cached_tokens == end.work.left_at == 50
    assert end.work.nearest_tokens == 102  # the first one's prompt, and all but the last of its answer's tokens


def test_sequences_that_are_admitted_together_each_say_what_they_reuse() -> None:
    """Of a live row, which is no entry."""
    world = World()
    prompts = {"a": [*range(100)], "b": [*range(60), 300], "c": [*range(40), 300]}
    for id, prompt in prompts.items():
        stop = StopRule(max_tokens=50)
        world.scheduler.submit(SequenceRequest(id=id, group=id, prompt=prompt, sampling=Sampling(), stop=stop), 0.0)
        while id == "a" and world.scheduler.by_id["a"].kv_len < 96:
            world.plan()
    world.plan()
    work = {row.id: (row.work.nearest_tokens, row.work.left_at) for row in world.log.progress()}
    assert (work["b"], work["c"]) == ((60, 60), (40, 40))


def test_a_miss_says_how_little_was_in_common() -> None:
    world = World()
    world.run("a", list(range(100)))
    end = world.run("b", [*range(5), 200, *range(6, 100)])
    assert end.cached_tokens == 0
    assert (end.work.nearest_tokens, end.work.left_at) == (102, 5)


def test_another_owners_prefix_is_not_told_of() -> None:
    world = World()
    world.run("a", list(range(100)), owner="one")
    end = world.run("b", [*range(50), 200], owner="two")
    assert (end.work.nearest_tokens, end.work.left_at) == (0, 0)


def test_progress_shows_the_rows() -> None:
    world = World()
    stop = StopRule(max_tokens=3)
    world.scheduler.submit(
        SequenceRequest(id="a", group="a", prompt=list(range(100)), sampling=Sampling(), stop=stop), 0.0
    )
    step = world.scheduler.schedule(0.0)
    assert step is not None
    world.log.note(step)
    (row,) = world.log.progress()
    assert (row.id, row.computed, row.known, row.work) == ("a", 32, 100, SequenceWork(chunks=1))
    sequence = world.scheduler.by_id["a"]
    sequence.cached_tokens, sequence.disk_tokens = 20, 10
    (row,) = world.log.progress()
    assert (row.cached_tokens, row.disk_tokens) == (20, 10)


def test_a_row_that_is_taken_away_counts() -> None:
    world = World()
    stop = StopRule(max_tokens=30)
    world.scheduler.submit(
        SequenceRequest(id="a", group="a", prompt=list(range(40)), sampling=Sampling(), stop=stop), 0.0
    )
    for _ in range(2):
        step = world.scheduler.schedule(0.0)
        assert step is not None
        world.log.note(step)
        rows = [world.scheduler.by_number[n] for f in step.forwards if f.sample for n in f.seqs]
        world.scheduler.apply([commit_tokens(row, row.kv_len, 1, [7]) for row in rows], 0.0)
    world.scheduler._preempt(world.scheduler.by_id["a"])
    step = world.scheduler.schedule(0.0)
    assert step is not None
    world.log.note(step)
    assert world.log.progress()[0].work.preemptions == 1
