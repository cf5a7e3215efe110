"""The journal on the fake engine, stepped by hand: resume, quarantine, limits, slow readers."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import EngineError, EngineUnavailable, Quarantined, QueueFull, SlowClient
from phalanx.server.sequences.journal import TRIAL_TOKENS, UNREAD_TOKENS, Journal
from phalanx.server.sequences.output_queue import OutputQueue, StreamEnd
from phalanx.server.sequences.queue_room import TOKEN_BYTES
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.supervision.fake_engine import FakeEngine, hashed
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

    def __init__(self, max_num_seqs: int = 2, queue: int = 2, prompt_bytes: int = 1 << 20, **engine) -> None:
        self.now = 100.0
        self.engine = FakeEngine(manual=True, max_num_seqs=max_num_seqs, clock=lambda: self.now, **engine)
        self.metrics = ServerMetrics("tiny")
        self.journal = Journal(
            self.engine,
            self.metrics,
            max_num_seqs=max_num_seqs,
            queue=queue,
            prompt_bytes=prompt_bytes,
            clock=lambda: self.now,
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
        async with asyncio.timeout(60):
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


@pytest.mark.parametrize(
    ("committed", "crashes", "beside", "is_alone"),
    [([], False, 0, True), ([], False, 1, False), ([], True, 0, False), ([7], False, 0, False)],
)
def test_a_speed_counts_where_one_engine_computed_the_whole_request_alone(
    committed, crashes, beside, is_alone, bench, monkeypatch
):
    """The time of an answer's first tokens is not known where another engine computed them."""
    found: list[bool] = []
    monkeypatch.setattr(bench.metrics.speeds, "finished", lambda *args, is_alone: found.append(is_alone))
    bench.submit(request(committed=committed), *(request(f"r/{i + 1}", 20) for i in range(beside)))
    bench.engine.step()
    if crashes:
        bench.engine.crash()
        bench.engine.recover()
    for _ in range(8):
        bench.engine.step()
    assert found == [is_alone]


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


def test_readers_are_told_of_a_pause_and_its_end(bench):
    (_, output), (_, over) = bench.submit(request("a/0")), bench.submit(request("b/0", 1))
    bench.engine.step()
    read(output), read(over)
    bench.engine.crash()
    assert read(output) == [] and output.is_paused and not over.is_paused
    bench.engine.recover()
    assert read(output) == [] and not output.is_paused


def test_what_waits_for_a_trial_is_paused(bench):
    (_, first), (_, second) = bench.submit(request("a/0", 40)), bench.submit(request("b/0", 40))
    crash(bench, 2)
    assert (first.is_paused, second.is_paused) == (False, True)
    for _ in range(TRIAL_TOKENS):
        bench.engine.step()
    assert not first.is_paused and not second.is_paused


def crash(bench: Bench, times: int = 1) -> None:
    for _ in range(times):
        bench.engine.crash("killed by signal 9")
        bench.engine.recover()


def running(bench: Bench) -> set[str]:
    return set(bench.engine._rows)


LONG = 3 * TRIAL_TOKENS


def test_after_two_crashes_what_was_computed_is_tried_one_at_a_time(bench):
    _, one = bench.submit(request("a/0", LONG), request("a/1", LONG))
    _, waiting = bench.submit(request("b/0", LONG))
    crash(bench)
    assert running(bench) == {"a/0", "a/1", "b/0"}
    crash(bench)
    assert running(bench) == {"a/0"}
    _, new = bench.submit(request("c/0", LONG))
    assert running(bench) == {"a/0"}  # a new one waits as well
    for _ in range(TRIAL_TOKENS):
        bench.engine.step()
    assert running(bench) == {"a/1"}
    for _ in range(TRIAL_TOKENS):
        bench.engine.step()
    assert running(bench) == {"a/0", "a/1", "b/0", "c/0"}
    for _ in range(2 * LONG):
        bench.engine.step()
    events = read(one)
    for i in (0, 1):
        assert tokens_of(events, i) == expected(request(), LONG)
    for output in (waiting, new):
        assert tokens_of(read(output)) == expected(request(), LONG)
    assert bench.journal.unfinished == 0


def test_a_sequence_that_crashes_the_engine_alone_is_quarantined_and_no_other(bench):
    """The engine crashes whenever it has computed two tokens of "a/1" more."""
    _, bad = bench.submit(request("a/1", LONG))
    _, good = bench.submit(request("b/0", LONG))
    crashes = 0
    for _ in range(20 * LONG):
        if (row := bench.engine._rows.get("a/1")) is not None and row.produced >= 2:
            crash(bench)
            crashes += 1
        bench.engine.step()
    assert len(tokens_of(read(bad))) < TRIAL_TOKENS
    with pytest.raises(Quarantined, match="killed by signal 9"):
        read(bad)
    assert tokens_of(read(good)) == expected(request(), LONG)
    assert crashes == 4  # two with others, two alone


def test_crashes_without_a_cause_lose_nothing(bench):
    """A sequence that was alone in a crash is tried last, and passes as soon as no crash meets it again."""
    _, output = bench.submit(request("a/0", LONG), request("a/1", LONG))
    for _ in range(12):
        crash(bench)
        for _ in range(TRIAL_TOKENS + 5):
            bench.engine.step()
    for _ in range(2 * LONG):
        bench.engine.step()
    events = read(output)
    assert [tokens_of(events, i) for i in (0, 1)] == [expected(request(), LONG)] * 2


def test_a_trial_ends_with_its_client(bench):
    slots, _ = bench.submit(request("a/0", LONG))
    _, output = bench.submit(request("b/0", LONG))
    crash(bench, 2)
    assert running(bench) == {"a/0"}
    bench.journal.release(slots)
    assert running(bench) == {"b/0"}
    for _ in range(LONG + 1):
        bench.engine.step()
    assert tokens_of(read(output)) == expected(request(), LONG)


def test_a_short_sequence_ends_within_its_trial(bench):
    _, first = bench.submit(request("a/0", 4))
    _, second = bench.submit(request("b/0", 4))
    crash(bench, 2)
    for _ in range(8):
        bench.engine.step()
    for output in (first, second):
        assert tokens_of(read(output)) == expected(request(), 4)


def test_a_stop_string_found_while_the_sequence_waits(bench):
    """It is in tokens that came before the crash; no engine knows the sequence."""
    slots, output = bench.submit(request("a/0", LONG))
    bench.submit(request("b/0", LONG))
    bench.engine.step()
    crash(bench, 2)
    bench.journal._suspects[0].slots.finish(0, 1)
    for _ in range(TRIAL_TOKENS):
        bench.engine.step()
    assert running(bench) == {"a/0"}
    slots.finish(0, 1)
    bench.engine.step()
    assert read(output)[-1][1].finished.reason == "stop"
    assert bench.journal.unfinished == 0


def test_min_tokens_hold_in_a_trial(bench):
    bench.submit(request("a/0", stop=StopRule(max_tokens=LONG, min_tokens=2 * TRIAL_TOKENS)))
    crash(bench, 2)
    stop = bench.engine.received[-1].request.stop
    assert stop.min_tokens == stop.max_tokens == TRIAL_TOKENS


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
    last = bench.journal.reserve(1)
    last.submit([request("x/0")])
    for given_back in (slots[1], last):
        bench.journal.release(given_back)
    assert bench.journal.unfinished == 1
    bench.journal.reserve(3)


def test_one_request_may_have_more_choices_than_there_are_places(bench):
    """A batch of prompts that was refused until there is room for all of it would be refused for ever."""
    large = bench.journal.reserve(9)
    with pytest.raises(QueueFull):
        bench.journal.reserve(1)
    bench.journal.release(large)
    small = bench.journal.reserve(1)
    with pytest.raises(QueueFull):
        bench.journal.reserve(9)
    bench.journal.release(small)
    bench.journal.reserve(9)


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
        await asyncio.wait_for(quiet, 60)

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


def test_one_key_may_hold_all_places_but_keeps_no_other_out():
    bench = Bench(max_num_seqs=2, queue=6)
    asyncio.run(bench.engine.start())
    greedy = [bench.journal.reserve(4, "greedy") for _ in range(2)]
    with pytest.raises(QueueFull):
        bench.journal.reserve(1, "greedy")
    bench.journal.reserve(4, "me")  # half of the eight places is an equal share
    with pytest.raises(QueueFull):
        bench.journal.reserve(1, "me")
    third = bench.journal.reserve(3, "third")
    with pytest.raises(QueueFull):
        bench.journal.reserve(1, "third")
    bench.journal.release(third)
    bench.journal.reserve(8, "third")  # it holds none: one request of any size
    for slots in greedy:
        bench.journal.release(slots)
    assert bench.journal.unfinished == 12
    bench.journal.reserve(2, "greedy")  # a third of the places
    with pytest.raises(QueueFull):
        bench.journal.reserve(1, "greedy")


def test_a_place_is_counted_for_its_owner_until_its_sequence_ends():
    bench = Bench(max_num_seqs=1, queue=0)
    asyncio.run(bench.engine.start())
    slots = bench.journal.reserve(1, "a")
    slots.submit([request("a/0", 1)])
    with pytest.raises(QueueFull):
        bench.journal.reserve(1, "a")
    bench.engine.step()
    bench.journal.reserve(1, "a")


def test_prompts_that_wait_have_so_much_memory_and_no_key_has_it_all():
    bench = Bench(max_num_seqs=2, queue=100, prompt_bytes=100 * TOKEN_BYTES)
    asyncio.run(bench.engine.start())
    greedy = [bench.journal.reserve(1, "greedy") for _ in range(3)]
    greedy[0].hold_prompts(60)
    greedy[1].hold_prompts(40)
    with pytest.raises(QueueFull, match="--max-body-mb") as refused:
        greedy[2].hold_prompts(1)
    assert refused.value.retry_after >= 1.0
    with bench.journal.reserve(1, "me") as mine:
        mine.hold_prompts(1000)  # the first of a key is never too large
        with pytest.raises(QueueFull), bench.journal.reserve(1, "me") as another:
            another.hold_prompts(1)
    with bench.journal.reserve(1, "me") as mine:
        mine.hold_prompts(30)
        with bench.journal.reserve(1, "me") as another:
            another.hold_prompts(20)  # half of it is an equal share
    bench.journal.release(greedy[0])
    bench.journal.release(greedy[0])
    greedy[2].hold_prompts(60)


def test_a_crash_is_counted_for_the_first_of_every_owner():
    """The engine serves owners by turns, so that the second owner's first sequence may have had a row."""
    bench = Bench(max_num_seqs=2, queue=30)
    asyncio.run(bench.engine.start())
    for owner in ("a", "b"):
        for i in range(4):
            bench.journal.reserve(1, owner).submit([request(f"{owner}{i}/0", owner=owner)])
    bench.engine.crash()
    crashed = {entry.request.id for entry in bench.journal._entries.values() if entry.crashes}
    assert crashed == {"a0/0", "a1/0", "b0/0", "b1/0"}
