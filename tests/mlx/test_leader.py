"""When a leader tells the server what a step brought."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.models import make_model
from support.speculation import Engine, Post, load, random_prompts

from phalanx.engine.link import SingleRank
from phalanx.engine.trace import Trace
from phalanx.sched.plan import Order, Step
from phalanx.spec.drafters import RandomDrafter
from phalanx.types import (
    Batch,
    Finished,
    Ping,
    Pong,
    RankStats,
    Sampling,
    SequenceRequest,
    Shutdown,
    StopRule,
    Submit,
    Tokens,
)


class Journal(Post):
    """What the leader did, in order: forwards, waits for the device, and tokens, ends and pongs sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def send(self, message) -> None:
        super().send(message)
        if isinstance(message, Pong):
            self.lines.append("pong")
        if isinstance(message, Batch):
            self.lines += [f"{len(e.tokens)} sent" for e in message.events if isinstance(e, Tokens)]
            self.lines += ["end sent" for e in message.events if isinstance(e, Finished)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    return load(make_model("llama", tmp_path_factory.mktemp("leader") / "llama"))


@pytest.fixture
def engine(loaded, monkeypatch: pytest.MonkeyPatch) -> Engine:
    runner, vocab = loaded
    journal = Journal()
    made = Engine(runner, vocab, batched=16, post=journal)
    forward, written_caches = runner.forward, runner.written_caches

    def noted(fwd, kv_len, hidden):
        journal.lines.append(f"forward {len(fwd.seqs)}x{len(fwd.tokens[0])}")
        return forward(fwd, kv_len, hidden)

    def waits():
        journal.lines.append("wait")
        return written_caches()

    monkeypatch.setattr(runner, "forward", noted)
    monkeypatch.setattr(runner, "written_caches", waits)
    return made


def submit(engine: Engine, name: str, prompt: Sequence[int], n: int) -> None:
    sampling, stop = Sampling(temperature=0.0), StopRule(max_tokens=n)
    engine.take(Submit(SequenceRequest(id=name, group=name, prompt=list(prompt), sampling=sampling, stop=stop)))


def steps(engine: Engine, n: int) -> list[str]:
    engine.post.lines.clear()
    for _ in range(n):
        engine.step()
    return engine.post.lines


def test_tokens_are_sent_while_the_next_step_computes_and_an_end_at_once(engine):
    submit(engine, "one", [5, 6, 7], 4)
    step = ["forward 1x1", "1 sent", "wait"]
    assert steps(engine, 1)[-2:] == ["forward 1x1", "wait"]
    assert steps(engine, 3) == [*step, *step, *step]
    assert steps(engine, 1)[:2] == ["1 sent", "end sent"]
    assert len(engine.post.answers["one"].tokens) == 4
    assert steps(engine, 2) == []


def test_a_trace_has_the_cost_of_every_plan(engine, tmp_path):
    engine.leader._trace = Trace(str(tmp_path / "trace"))
    submit(engine, "one", [5, 6, 7], 4)
    steps(engine, 6)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_bytes().splitlines()]
    kinds = [next(iter(line)) for line in lines]
    assert kinds == ["message", *["plan", "cost"] * (len(kinds) // 2)] and len(kinds) > 8
    assert all(plan["plan"]["id"] == cost["cost"]["id"] for plan, cost in zip(lines[1::2], lines[2::2], strict=True))


def test_the_next_step_begins_early_while_a_prompt_waits_for_its_turn(engine, monkeypatch):
    """It holds no chunk of the prompt, as rows are owed more time than this step takes."""
    budget = engine.scheduler.prefill_budget
    monkeypatch.setattr(engine._runner, "may_dispatch_next", lambda forwards: len(forwards) == 1)
    begun: list[bool] = []
    monkeypatch.setattr(engine._runner, "dispatch_next", lambda tokens: begun.append(True))
    submit(engine, "one", [5, 6, 7], 40)
    steps(engine, 3)
    submit(engine, "two", list(range(10, 90)), 4)
    steps(engine, 1)
    begun.clear()
    monkeypatch.setattr(budget, "tokens", lambda decoding: 0)
    monkeypatch.setattr(type(budget), "still_owes", True)
    steps(engine, 2)
    assert begun == [True, True]
    monkeypatch.setattr(type(budget), "still_owes", False)
    steps(engine, 1)
    assert begun == [True, True]


def test_tokens_do_not_wait_for_a_prompt(engine):
    submit(engine, "one", [5, 6, 7], 40)
    steps(engine, 2)
    submit(engine, "two", list(range(10, 50)), 4)
    first, second, *_ = steps(engine, 1)
    assert (first, second[:7]) == ("1 sent", "forward")


def test_the_prefill_budget_learns_of_rows_that_a_chunk_delays(engine, monkeypatch):
    """A row that finishes its own prompt in the step was not delayed: what it decodes pays nothing."""
    told: list[tuple[int, bool]] = []
    observe = engine.scheduler.prefill_budget.observe

    def noted(tokens, prefill_s, decode_s):
        told.append((tokens, decode_s > 0))
        observe(tokens, prefill_s, 1.0 if decode_s else 0.0)  # rows get all that is owed

    monkeypatch.setattr(engine.scheduler.prefill_budget, "observe", noted)
    submit(engine, "one", [5, 6, 7], 40)
    steps(engine, 2)
    submit(engine, "two", list(range(10, 35)), 4)
    steps(engine, 3)
    assert told == [(2, False), (0, True), (16, True), (8, True), (0, True)]


def test_the_prefill_budget_does_not_learn_of_waits_while_chunks_follow_each_other(engine, monkeypatch):
    """A wait of 1,000 s, which no step of the test has: without it, what remains of a chunk's time is negative."""
    told: list[float] = []
    staged, begin = engine.leader._staged, engine.leader._staged.begin

    def waited(step):
        begin(step)
        staged.waited_s = 1000.0

    monkeypatch.setattr(staged, "begin", waited)
    monkeypatch.setattr(engine.scheduler.prefill_budget, "observe", lambda tokens, prefill_s, _: told.append(prefill_s))
    submit(engine, "one", list(range(10, 35)), 4)
    steps(engine, 2)
    assert told[0] < 0 < told[1]  # the second step also samples: it is alone in flight, and its rows do wait


def test_tokens_do_not_wait_for_rows_that_are_moved(engine):
    submit(engine, "one", [5, 6, 7], 6)
    submit(engine, "two", [8, 9, 10], 40)
    while engine.scheduler.by_id.keys() != {"two"}:
        steps(engine, 1)
    assert steps(engine, 1)[:3] == ["1 sent", "1 sent", "end sent"]
    assert engine.post.lines[3].startswith("forward")


@pytest.mark.parametrize("why", ["other ranks", "rows in turn"])
def test_tokens_do_not_wait_where_a_forward_is_waited_for(engine, monkeypatch, why):
    submit(engine, "one", [5, 6, 7], 40)
    steps(engine, 1)
    runner = engine.leader.runner
    if why == "other ranks":
        group = SimpleNamespace(
            size=2, foreign=False, begin=lambda step: None, finish=list, judge=lambda step, sums: None
        )
        monkeypatch.setattr(runner, "reducer", group)
    else:
        monkeypatch.setattr(runner, "facts", replace(runner.facts, one_row="a reason"))
    assert steps(engine, 1)[:2] == ["1 sent", "forward 1x1"]


def test_tokens_do_not_wait_for_a_draft_model(engine, loaded):
    class Slow(RandomDrafter):
        computes = True

        def draft(self, wanted):
            engine.post.lines.append("draft")
            return super().draft(wanted)

    engine.speculate(Slow(loaded[1]), 2)
    submit(engine, "one", random_prompts(1, 300)[0][:8], 40)
    steps(engine, 2)
    lines = steps(engine, 1)
    assert lines[1:] == ["draft", "forward 1x3", "wait"] and lines[0].endswith("sent")


def test_an_answered_ping_says_that_all_before_it_was_said(engine):
    submit(engine, "one", [5, 6, 7], 40)
    steps(engine, 2)
    engine.post.lines.clear()
    engine.take(Ping(3))
    engine.step()
    engine.leader.answer_pings()
    assert engine.post.lines[-2:] == ["1 sent", "pong"]


class OneWorker(SingleRank):
    """The leader's link to a worker: what was sent to it, and reports that come when the test says so."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int | str] = []
        self.report: RankStats | None = None
        self.waited = False

    def send(self, order: Order) -> None:
        self.sent.append(order.plan.id if isinstance(order.plan, Step) else type(order.plan).__name__)

    def request_reports(self) -> None:
        self.sent.append("report")

    def take_reports(self, *, wait: bool) -> list[RankStats] | None:
        self.waited = wait
        report, self.report = self.report, None
        return None if report is None else [report]


def worker_at(step: int) -> RankStats:
    return RankStats(
        rank=1, stage=0, layers=None, host="b", pid=2, steps=step, matches=step, reductions=0, active_bytes=0,
        peak_bytes=0, rss_bytes=0,
    )  # fmt: skip


def test_a_ping_does_not_drain_the_pipeline(loaded):
    """The report goes behind the plans in flight, and further plans follow it before it is answered."""
    worker, post = OneWorker(), Journal()
    engine = Engine(*loaded, batched=16, post=post, link=worker, plans_ahead=2)
    pongs = []
    submit(engine, "one", list(range(5, 205)), 2)

    def turn() -> None:
        engine.step()
        engine.leader.answer_pings()
        pongs.append(post.lines.count("pong"))

    turn()
    engine.take(Ping(1))
    turn()
    engine.take(Ping(2))
    turn()
    assert worker.sent == [1, 2, 3, 4, "report", 5]
    assert not worker.waited and pongs == [0, 0, 0]
    worker.report = worker_at(4)
    turn()
    assert worker.sent == [1, 2, 3, 4, "report", 5, 6] and pongs[-1] == 1
    turn()
    assert worker.sent == [1, 2, 3, 4, "report", 5, 6, 7, "report"] and pongs[-1] == 1


def test_a_ping_while_ranks_report_has_the_next_report_and_an_idle_leader_waits_for_it(loaded):
    worker, post = OneWorker(), Journal()
    engine = Engine(*loaded, batched=16, post=post, link=worker, plans_ahead=1)
    engine.take(Ping(1))
    engine.leader.answer_pings()
    engine.take(Ping(2))
    worker.report = worker_at(0)
    engine.leader.answer_pings()
    assert worker.sent == ["report"] and worker.waited and post.lines == ["pong"]
    engine.leader.answer_pings()
    assert worker.sent == ["report", "report"]
    worker.report = worker_at(0)
    engine.leader.answer_pings()
    assert post.lines == ["pong", "pong"]


def test_a_shutdown_sends_workers_nothing(loaded, monkeypatch):
    """The Goodbye that closes the link ends them: a worker that left before it would be reported as lost."""
    worker, post = OneWorker(), Journal()
    engine = Engine(*loaded, batched=16, post=post, link=worker)
    monkeypatch.setattr(post, "drain", lambda *, block: [Shutdown()], raising=False)
    engine.leader.run()
    assert worker.sent == []
