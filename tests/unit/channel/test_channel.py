"""Payloads between ranks, and what the watchdogs make of lost, silent and stuck ones. Ranks are threads here."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from patience import patiently, strict
from support.channels import (
    FAST,
    WAIT_S,
    Gatherer,
    RawPeer,
    Recorder,
    connect,
    credentials,
    group,
    heard,
    identity,
    listen,
    meeting,
    names,
    until,
)

from phalanx.dist import watchdog
from phalanx.dist.channel import LeaderChannel, WatchdogLimits, WorkerChannel
from phalanx.dist.peers import Admitted, Goodbye, GroupWelcome, Heartbeat, PeerFailure
from phalanx.errors import ConfigError, ExitCode, PeerLate, PeerLost, exit_code_of

# Payloads --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["tls", "unix"])
def control(request: pytest.FixtureRequest, private: Path) -> str:
    """Where a group meets: "" over TLS, or a Unix socket's path."""
    return "" if request.param == "tls" else str(private)


def test_payloads_arrive_whole_and_in_order_both_ways(control: str):
    with group(4, control=control) as ranks:
        assert [who.rank for who in ranks.ranks] == [0, 1, 2, 3]
        sent = [bytes([i]) * (i * i) for i in range(200)]
        for payload in sent:
            ranks.leader.broadcast(payload)
        for rank, worker in enumerate(ranks.workers, 1):
            assert [worker.receive() for _ in sent] == sent
            for i in range(3):
                worker.send(f"{rank}.{i}".encode())
        for i in range(3):
            assert ranks.leader.collect(WAIT_S) == [f"{rank}.{i}".encode() for rank in (1, 2, 3)]
        assert all(recorder.quiet for recorder in ranks.recorders)


def test_every_rank_knows_the_figures_of_its_connections(control: str):
    with group(3, control=control) as ranks:
        ranks.leader.broadcast(b"x")
        for worker in ranks.workers:
            assert worker.receive() == b"x"
        assert [link.peer for link in ranks.leader.links()] == [1, 2]
        assert [[link.peer for link in worker.links()] for worker in ranks.workers] == [[0], [0]]
        knows = not control and sys.platform == "linux"
        for link in ranks.leader.links():
            assert link.carries == "plans" and link.frames is None
            assert (link.segments is not None and link.segments > 0) == knows
            assert (link.round_trip_us is not None) == knows


def test_large_payloads_cross_each_other(control: str):
    big = bytes(range(256)) * (20_000_000 // 256)
    report = big[::-1][:4_000_000]  # a worker's messages have a lower limit
    with group(2, control=control) as ranks, ThreadPoolExecutor(2) as pool:
        down, up = pool.submit(ranks.leader.broadcast, big), pool.submit(ranks.workers[0].send, report)
        assert ranks.workers[0].receive() == big and ranks.leader.collect(WAIT_S) == [report]
        down.result(WAIT_S), up.result(WAIT_S)


def test_a_rank_that_does_not_answer_is_named():
    with group(3) as ranks:
        ranks.workers[0].send(b"here")
        until(lambda: ranks.leader._watchdog.peers[0].inbox.qsize())
        assert not ranks.leader.all_answered
        with pytest.raises(PeerLate, match=r"^rank 2 \(host2, pid \d+\) did not answer within 0\.1 s\.$") as late:
            ranks.leader.collect(0.1)
        assert exit_code_of(late.value) is ExitCode.STALLED


def test_a_leader_sees_whether_all_have_answered():
    with group(3) as ranks:
        for worker in ranks.workers:
            assert not ranks.leader.all_answered
            worker.send(b"here")
        until(lambda: ranks.leader.all_answered)
        assert ranks.leader.collect(0.0) == [b"here"] * 2 and not ranks.leader.all_answered


def test_a_group_of_one():
    listener, control = listen()
    leader = LeaderChannel(listener, meeting(control, 1), None, identity(0), FAST)
    assert leader.gather() == [identity(0)]
    leader.broadcast(b"nobody")
    assert leader.collect(0.0) == []
    leader.close("done")


def test_idle_ranks_turn_their_loops_a_few_times_a_second():
    """A turn costs about 0.1 ms, so a fixed number of turns a second is a fixed part of a core."""
    limits = replace(FAST, heartbeat_s=0.25)
    with group(3, limits) as ranks:
        before, started = [channel.wakeups for channel in ranks.channels], time.monotonic()
        time.sleep(1.5)
        wakeups = [channel.wakeups - count for channel, count in zip(ranks.channels, before, strict=True)]
        elapsed = time.monotonic() - started
        for count, peers in zip(wakeups, (2, 1, 1), strict=True):
            naps, beats = 2 * elapsed / limits.heartbeat_s, peers * elapsed / limits.heartbeat_s
            assert count <= naps + beats + 5


# Ends ------------------------------------------------------------------------------------------------------------


def test_the_leader_ends_the_group_in_order(control: str):
    with group(3, control=control) as ranks:
        ranks.leader.broadcast(b"last")
        ranks.leader.close("enough")
        for worker in ranks.workers:
            assert worker.receive() == b"last"
            assert worker.receive() is None and worker.receive() is None
        with pytest.raises(PeerLost):
            ranks.workers[0].send(b"too late")
        assert all(recorder.quiet for recorder in ranks.recorders)


def test_a_worker_that_leaves_by_itself_is_a_lost_one():
    with group(3) as ranks:
        ranks.workers[0].close("somebody stopped it")
        for recorder in (ranks.recorders[0], ranks.recorders[2]):
            failure = recorder.failure()
            assert (failure.code, failure.rank, failure.host) == (ExitCode.PEER_LOST, 1, "host1")
            assert "left: somebody stopped it" in str(failure)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_report_a_failure_that_one_rank_finds(rank: int):
    with group(3) as ranks:
        with pytest.raises(PeerLost, match="row 3 differs"):
            ranks.channels[rank].fail(ExitCode.DESYNC, "step 7: row 3 differs")
        failures = [recorder.failure() for recorder in ranks.recorders]
        assert len(set(failures)) == 1 and failures[0].code is ExitCode.DESYNC
        assert str(failures[0]).startswith(f"rank {rank} (host{rank}, pid ")
        with pytest.raises(PeerLost, match="row 3 differs"):
            ranks.workers[1].receive()
        with pytest.raises(PeerLost, match="row 3 differs"):
            ranks.leader.collect(None)


def test_a_cause_takes_the_place_of_a_symptom(monkeypatch: pytest.MonkeyPatch):
    """A rank's collective raises because another rank found a Desync and left: everybody says Desync."""
    monkeypatch.setattr(watchdog, "LEADER_PATIENCE_S", WAIT_S)
    monkeypatch.setattr(watchdog, "WORKER_PATIENCE_S", WAIT_S)
    with group(3) as ranks, ThreadPoolExecutor(2) as pool:
        symptom = pool.submit(ranks.workers[0].fail, ExitCode.CRASH, "connection lost in all_sum")
        cause = pool.submit(ranks.workers[1].fail, ExitCode.DESYNC, "row 3 differs")
        for recorder in ranks.recorders:
            failure = recorder.failure()
            assert (failure.code, failure.rank) == (ExitCode.DESYNC, 2)
        for task in (symptom, cause):
            assert isinstance(task.exception(WAIT_S), PeerLost)


# Peers that misbehave --------------------------------------------------------------------------------------------


def raw_workers(size: int, limits: WatchdogLimits = FAST) -> tuple[Gatherer, list[RawPeer]]:
    """A leader, and workers spoken by hand."""
    leader = Gatherer(size, limits)
    workers = [RawPeer.to(leader.port, credentials()[rank]) for rank in range(1, size)]
    for rank, raw in enumerate(workers, 1):
        raw.join(rank, size)
    for raw in workers:
        assert isinstance(raw.receive(), GroupWelcome)
    leader.gathered.result(WAIT_S)
    return leader, workers


def raw_worker(limits: WatchdogLimits = FAST) -> tuple[Gatherer, RawPeer]:
    leader, (raw,) = raw_workers(2, limits)
    return leader, raw


def test_a_closed_connection():
    leader, raw = raw_worker()
    raw.close()
    failure = leader.recorder.failure()
    assert (failure.code, failure.rank, failure.pid) == (ExitCode.PEER_LOST, 1, identity(1).pid)
    assert "connection" in str(failure)
    leader.close()


def test_last_words_count_more_than_that_their_rank_is_gone():
    leader, raw = raw_worker()
    said = PeerFailure.of(identity(1), ExitCode.CRASH, "crashed: IndexError: list index out of range")
    raw.send(Goodbye(str(said), said))
    raw.close()
    assert leader.recorder.failure() == said
    leader.close()


def test_workers_need_not_leave_together_when_the_group_ends():
    leader, workers = raw_workers(3)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(leader.channel.close, "enough")
        for raw in workers:
            while not isinstance(raw.receive(), Goodbye):
                pass
        workers[0].close()
        time.sleep(3 * watchdog.LEADER_PATIENCE_S)
        workers[1].close()
        closing.result(WAIT_S)
    assert leader.recorder.quiet
    leader.close()


def silence(silence_s: float) -> None:
    leader, raw = raw_worker(strict(silence_s))
    time.sleep(1.5 * silence_s)
    assert leader.recorder.quiet  # the limit while loading is a minute
    leader.channel.serving()
    failure = leader.recorder.failure()
    assert (failure.code, failure.rank) == (ExitCode.PEER_SILENT, 1)
    assert "rank 1 (host1" in str(failure) and "no sign of life for " in str(failure)
    said = raw.receive()
    while not isinstance(said, Goodbye):
        assert isinstance(said, Heartbeat)
        said = raw.receive()
    assert said.failure == failure
    raw.close()
    leader.close()


def test_silence_is_judged_while_serving_only():
    patiently(silence)


def beats_only(silence_s: float) -> None:
    leader, raw = raw_worker(strict(silence_s))
    leader.channel.serving()
    done = threading.Event()

    def beat() -> None:
        try:
            while not done.wait(0.05):
                raw.send(Heartbeat())
        except OSError:
            pass

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(PeerLost, match="takes no data"):
        for _ in range(100):
            leader.channel.broadcast(bytes(1 << 20))
    failure = leader.recorder.failure()
    assert (failure.code, failure.rank) == (ExitCode.PEER_SILENT, 1)
    done.set()
    thread.join()
    raw.close()
    leader.close()


def test_a_peer_that_beats_but_takes_no_data():
    patiently(beats_only)


@pytest.mark.parametrize(
    ("send", "text"), [(b"HTTP/1.1 200 OK", "broke the protocol"), (None, "sent Admitted out of turn")]
)
def test_a_member_that_sends_nonsense_is_lost(send: bytes | None, text: str):
    leader, raw = raw_worker()
    if send is None:
        raw.send(Admitted())
    else:
        raw.socket.sendall(send)
    failure = leader.recorder.failure()
    assert (failure.code, failure.rank) == (ExitCode.PEER_LOST, 1) and text in str(failure)
    raw.close()
    leader.close()


def worker_of_raw_leader(limits: WatchdogLimits) -> tuple[WorkerChannel, RawPeer, Recorder]:
    """A worker, and a leader spoken by hand."""
    listener, address = listen()
    recorder = Recorder()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(connect, address, limits=limits, recorder=recorder)
        raw = RawPeer.of(listener)
        raw.lead()
        raw.send(GroupWelcome(identity(0)))
        worker = joining.result(WAIT_S)
    return worker, raw, recorder


@pytest.mark.parametrize(("closes", "code"), [(True, ExitCode.PEER_LOST), (False, ExitCode.PEER_SILENT)])
def test_a_leader_that_is_gone_or_silent(closes: bool, code: ExitCode):
    def scenario(silence_s: float) -> None:
        worker, raw, recorder = worker_of_raw_leader(strict(silence_s))
        worker.serving()
        if closes:
            raw.close()
        failure = recorder.failure()
        assert (failure.code, failure.rank, failure.host) == (code, 0, "host0")
        raw.close()
        worker.close("")

    patiently(scenario)


def test_the_leader_has_the_last_word_on_a_rank_that_spoke_of_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "WORKER_PATIENCE_S", WAIT_S)
    worker, raw, recorder = worker_of_raw_leader(FAST)
    judged = PeerFailure.of(identity(1), ExitCode.PEER_LOST, "cannot be sent to: broken pipe")
    with ThreadPoolExecutor(1) as pool:
        speaking = pool.submit(worker.fail, ExitCode.CRASH, "crashed: IndexError: list index out of range")
        until(lambda: worker._watchdog._suspected)
        raw.send(Goodbye(str(judged), judged))
        assert recorder.failure() == judged
        assert isinstance(speaking.exception(WAIT_S), PeerLost)
    raw.close()


# Stuck steps -----------------------------------------------------------------------------------------------------


def test_the_rank_that_did_not_come_to_the_step_is_named_by_all():
    with group(3) as ranks:
        for channel in ranks.channels:
            channel.enter(41, WAIT_S)
            channel.leave(41)
        ranks.workers[1].enter(42, WAIT_S)
        until(lambda: heard(ranks.leader) == [(41, False), (42, True)])
        ranks.leader.enter(42, 0.1)
        failures = [recorder.failure() for recorder in ranks.recorders]
        assert len(set(failures)) == 1
        assert (failures[0].code, failures[0].rank) == (ExitCode.STALLED, 1)
        assert "stands at step 41 (which it has left) while the others are in step 42" in str(failures[0])


def test_when_all_are_in_the_step_all_are_named():
    with group(3) as ranks:
        for worker in ranks.workers:
            worker.enter(7, 0.1)  # they judge later than the leader
        until(lambda: heard(ranks.leader) == [(7, True)] * 2)
        ranks.leader.enter(7, 0.1)
        failures = [recorder.failure() for recorder in ranks.recorders]
        assert len(set(failures)) == 1 and failures[0].code is ExitCode.STALLED
        assert names(str(failures[0])) == [0, 1, 2] and "is inside step 7 for" in str(failures[0])


def test_a_worker_judges_after_the_grace_when_the_leader_does_not():
    with group(2, replace(FAST, stall_grace_s=0.2)) as ranks:
        ranks.leader.enter(7, WAIT_S)
        ranks.leader.leave(7)
        until(lambda: heard(ranks.workers[0]) == [(7, False)])
        ranks.workers[0].enter(7, 0.1)
        for recorder in ranks.recorders:
            failure = recorder.failure()
            assert (failure.code, failure.rank) == (ExitCode.STALLED, 1)
            assert "inside step 7" in str(failure)


def test_a_step_that_ends_in_time_is_no_stall():
    def scenario(limit_s: float) -> None:
        with group(2) as ranks:
            for step in range(20):
                for channel in ranks.channels:
                    channel.enter(step, limit_s)
                for channel in ranks.channels:
                    channel.leave(step)
            time.sleep(1.2 * limit_s)
            assert all(recorder.quiet for recorder in ranks.recorders)

    patiently(scenario)


# Limits and words ------------------------------------------------------------------------------------------------


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"limit of 1\.5 s is too short for a heartbeat every 1 s"):
        WatchdogLimits(heartbeat_s=1.0, silence_s=1.5)


def test_a_failure_is_one_line_that_names_host_rank_and_cause():
    one = PeerFailure.of(identity(3, pid=17), ExitCode.DESYNC, "row 3\nof step 4 differs")
    assert str(one) == "rank 3 (host3, pid 17) row 3 of step 4 differs"
    assert str(PeerFailure(code=ExitCode.STALLED, cause="rank 1 and rank 2 stand still")).startswith("rank 1 and")
