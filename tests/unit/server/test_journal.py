"""The journal on the fake engine, stepped by hand: resume, quarantine, limits, slow readers."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import EngineError, EngineUnavailable, InvalidRequest, Quarantined, QueueFull, SlowClient
from phalanx.server.journal import UNREAD_TOKENS, Journal
from phalanx.server.metrics import Metrics
from phalanx.server.output_queue import OutputQueue, StreamEnd
from phalanx.supervision.client import FakeEngine, hashed
from phalanx.types import (
    Batch,
    Cancel,
    EngineStats,
    Finish,
    PromptScored,
    Sampling,
    SequenceRequest,
    StopRule,
    Submit,
    Tokens,
)

PROMPT = [1, 2, 3]


def request(name: str = "r/0", max_tokens: int = 8, **fields) -> SequenceRequest:
    defaults = {"sampling": Sampling(seed=7), "stop": StopRule(max_tokens=max_tokens)}
    return SequenceRequest(id=name, group=name.split("/")[0], prompt=PROMPT, **{**defaults, **fields})


class Bench:
    """A journal, a fake engine stepped by hand and a clock set by hand."""

    def __init__(self, max_num_seqs: int = 2, queue: int = 2, **engine) -> None:
        self.now = 100.0
        self.engine = FakeEngine(manual=True, max_num_seqs=max_num_seqs, clock=lambda: self.now, **engine)
        self.metrics = Metrics("tiny")
        self.journal = Journal(
            self.engine, self.metrics, max_num_seqs=max_num_seqs, queue=queue, clock=lambda: self.now
        )

    def submit(self, *requests: SequenceRequest):
        slots = self.journal.reserve(len(requests))
        slots.submit(requests)
        return slots, slots.output


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    asyncio.run(bench.engine.start())
    return bench


def read(output: OutputQueue):
    async def soon():
        async with asyncio.timeout(5):
            return await output.read()

    return asyncio.run(soon())


def tokens_of(events, index: int = 0) -> list[int]:
    return [token for i, event in events if i == index and isinstance(event, Tokens) for token in event.tokens]


def expected(sequence: SequenceRequest, n: int) -> list[int]:
    draw = hashed(256)
    return [draw(sequence, position) for position in range(n)]


def test_events_of_a_group_arrive_by_index(bench):
    first, second = request("r/0", 2), request("r/1", 1, sampling=Sampling(seed=7, choice=1))
    _, output = bench.submit(first, second)
    bench.engine.step()
    bench.engine.step()
    events = read(output)
    assert tokens_of(events, 0) == expected(first, 2)
    assert tokens_of(events, 1) == expected(second, 1) != expected(first, 1)
    assert [(i, e.finished.reason) for i, e in events if isinstance(e, StreamEnd)] == [(1, "length"), (0, "length")]
    assert bench.journal.unfinished == 0


@pytest.mark.parametrize("crashes_at", [0, 1, 5, 7])
def test_a_crash_is_invisible(bench, crashes_at):
    _, output = bench.submit(request())
    for _ in range(crashes_at):
        bench.engine.step()
    bench.engine.crash()
    bench.engine.recover()
    resumed = bench.engine.received[-1]
    assert isinstance(resumed, Submit) and resumed.request.committed == expected(request(), crashes_at)
    for _ in range(8 - crashes_at):
        bench.engine.step()
    events = read(output)
    assert tokens_of(events) == expected(request(), 8)
    assert isinstance(events[-1][1], StreamEnd) and events[-1][1].finished.n_tokens == 8


def test_a_resumed_request_has_less_time_and_no_second_scoring(bench):
    _, output = bench.submit(request(timeout_s=10.0, prompt_logprobs=1))
    bench.now += 1.0
    bench.engine.step()
    bench.engine.crash()
    bench.now += 3.0
    bench.engine.recover()
    resumed = bench.engine.received[-1].request
    assert resumed.timeout_s == pytest.approx(6.0)
    assert resumed.prompt_logprobs is None
    bench.engine.step()
    assert len([event for _, event in read(output) if isinstance(event, PromptScored)]) == 1


def test_second_crash_quarantines_running_sequences_but_not_waiting_ones(bench):
    _, computed = bench.submit(request("a/0"), request("a/1"))
    _, waiting = bench.submit(request("b/0"))
    for _ in range(2):
        bench.engine.crash("killed by signal 9")
        bench.engine.recover()
    with pytest.raises(Quarantined, match="killed by signal 9"):
        read(computed)
    assert bench.journal.unfinished == 1
    bench.engine.step()
    assert tokens_of(read(waiting)) == expected(request("b/0"), 1)


def test_crashes_of_two_requests_do_not_add_up(bench):
    slots, _ = bench.submit(request("a/0"))
    bench.engine.crash()
    bench.engine.recover()
    bench.journal.release(slots)
    _, output = bench.submit(request("b/0"))
    bench.engine.crash()
    bench.engine.recover()
    bench.engine.step()
    assert tokens_of(read(output)) == expected(request(), 1)


def test_an_engine_that_stays_away_ends_everything(bench):
    _, output = bench.submit(request())
    bench.engine.crash("out of memory", will_restart=False)
    with pytest.raises(EngineError, match="out of memory"):
        read(output)
    with pytest.raises(EngineUnavailable, match="out of memory"):
        bench.journal.reserve(1)
    assert bench.journal.unfinished == 0


def test_events_before_a_failure_are_read_first(bench):
    _, output = bench.submit(request())
    bench.engine.step()
    bench.engine.crash("gone", will_restart=False)
    assert tokens_of(read(output)) == expected(request(), 1)
    with pytest.raises(EngineError, match="gone"):
        read(output)


def test_no_new_requests_while_restarting(bench):
    bench.engine.crash("killed by signal 9")
    with pytest.raises(EngineUnavailable, match="restarting: killed by signal 9"):
        bench.journal.reserve(1)
    bench.engine.recover()
    bench.journal.reserve(1)


def test_places_are_counted_from_the_reservation_on(bench):
    slots = [bench.journal.reserve(1), bench.journal.reserve(2)]
    with pytest.raises(QueueFull) as caught:
        bench.journal.reserve(2)
    assert 1.0 <= caught.value.retry_after <= 30.0
    with pytest.raises(InvalidRequest):
        bench.journal.reserve(5)  # never possible
    last = bench.journal.reserve(1)
    last.submit([request("x/0")])
    for given_back in (slots[1], last):
        bench.journal.release(given_back)
    assert bench.journal.unfinished == 1
    bench.journal.reserve(3)


def test_a_finished_choice_frees_its_place(bench):
    bench.submit(request("a/0", 1), request("a/1", 5))
    bench.engine.step()
    assert bench.journal.unfinished == 1


def test_release_cancels_unfinished_sequences(bench):
    slots, _ = bench.submit(request("a/0", 1), request("a/1", 5))
    bench.engine.step()
    bench.journal.release(slots)
    bench.journal.release(slots)
    assert [m for m in bench.engine.received if isinstance(m, Cancel)] == [Cancel("a/1")]
    assert bench.journal.unfinished == 0


def test_a_slow_reader_is_cancelled(bench):
    _, output = bench.submit(request(max_tokens=UNREAD_TOKENS + 10))
    for _ in range(UNREAD_TOKENS):
        bench.engine.step()
    assert bench.journal.unfinished == 1
    bench.engine.step()
    assert bench.journal.unfinished == 0
    assert bench.engine.received[-1] == Cancel("r/0")
    assert len(tokens_of(read(output))) == UNREAD_TOKENS + 1
    with pytest.raises(SlowClient):
        read(output)


def test_finish_is_confirmed_by_the_engine(bench):
    slots, output = bench.submit(request())
    for _ in range(5):
        bench.engine.step()
    slots.finish(0, 3)
    assert bench.engine.received[-1] == Finish("r/0", 3)
    assert bench.journal.unfinished == 1
    bench.engine.step()
    ended = read(output)[-1][1]
    assert (ended.finished.reason, ended.finished.n_tokens) == ("stop", 3)


@pytest.mark.parametrize("told_before", [True, False])
def test_finish_around_a_crash(bench, told_before):
    slots, output = bench.submit(request())
    for _ in range(5):
        bench.engine.step()
    if told_before:
        slots.finish(0, 3)
    bench.engine.crash()
    if not told_before:
        slots.finish(0, 3)
    bench.engine.recover()
    ended = read(output)[-1][1]
    assert (ended.finished.reason, ended.finished.n_tokens) == ("stop", 3)
    assert not isinstance(bench.engine.received[-1], Submit) or bench.engine.received[-1].request.committed == []


def test_lost_count_is_an_error_not_wrong_text(bench):
    _, output = bench.submit(request())
    bench.engine.emit_batch(Batch(1, [Tokens("r/0", 1, [5])]))
    with pytest.raises(EngineError, match="lost count"):
        read(output)
    assert bench.engine.received[-1] == Cancel("r/0")


def test_quiet_when_the_last_request_ended(bench):
    async def scenario():
        slots, _ = bench.submit(request(max_tokens=1))
        other = bench.journal.reserve(1)
        quiet = asyncio.create_task(bench.journal.wait_until_idle())
        bench.engine.step()
        await asyncio.sleep(0)
        assert not quiet.done()
        bench.journal.release(other)
        bench.journal.release(slots)
        await asyncio.wait_for(quiet, 5)

    asyncio.run(scenario())


def test_counters_never_fall(bench):
    def total() -> float:
        return bench.metrics.registry.get_sample_value("phalanx:prefix_cache_hits_total", {"model_name": "tiny"})

    bench.metrics.stats(EngineStats(prefix_hits=10, running=3))
    assert total() == 10
    bench.engine.crash()
    bench.engine.recover()
    assert total() == 10
    bench.metrics.stats(EngineStats(prefix_hits=4))
    assert total() == 14
