"""What the supervisor makes of the end of a group: who is named, and when it starts again."""

from __future__ import annotations

import asyncio
import errno
import shutil
import signal
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.config import EngineConfig
from phalanx.dist.collective_backend import ChosenBackend
from phalanx.errors import ConfigError, ExitCode, HostUnreachable
from phalanx.supervision import engine_connection
from phalanx.supervision.client import EngineState
from phalanx.supervision.fake_engine import FAKE_INFO
from phalanx.supervision.process import LINE_CHARS, RDMA_COOL_DOWN_S, EngineProcess
from phalanx.supervision.rank_launcher import End, RankProcesses
from phalanx.supervision.restarts import FIRST_STARTS
from phalanx.supervision.wire import engine_codec
from phalanx.types import Failed, Ready


def ended(**statuses: int) -> RankProcesses:
    """A group whose processes have ended so."""
    processes: dict[str, Any] = {
        name.replace("_", " "): SimpleNamespace(returncode=status, pid=1) for name, status in statuses.items()
    }
    return RankProcesses(processes, [])


def engine(
    ranks: RankProcesses, *words: str, failure: str = "", code: ExitCode = ExitCode.PEER_LOST, backend: str = "ring"
) -> EngineProcess:
    process = EngineProcess(EngineConfig(model="demo", tensor_parallel_size=2, join_seconds=7.0))
    process._ranks = ranks
    process._choice = ChosenBackend(backend, "asked for")
    process._stderr_tail = deque(words, maxlen=20)
    process._failure = Failed("PeerFailure", failure, code) if failure else None
    return process


def test_a_rank_that_a_signal_ended_is_the_cause():
    process = engine(ended(rank_0=70, rank_1=-9), failure="rank 1 (here, pid 5) closed its connection")
    assert process._describe_end(End("rank 1", -9)) == "rank 1 was ended by SIGKILL (out of memory, or killed by hand)"


def test_mpirun_says_which_rank_a_signal_ended():
    notice = ("prterun noticed that process rank 3 with PID 77 on node vm exited on", "signal 15 (Terminated).")
    process = engine(ended(mpirun=143), "-----", *notice, "-----", failure="something later")
    assert process._describe_end(End("mpirun", 143)) == "rank 3 (vm, pid 77) was ended by SIGTERM"


def test_the_leaders_verdict_is_the_cause_otherwise():
    process = engine(ended(rank_0=72, rank_1=72), failure="rank 1 (here, pid 5) Desync: step 4")
    assert process._describe_end(End("rank 0", 72)) == "rank 1 (here, pid 5) Desync: step 4"


@pytest.mark.parametrize("status", [1, 64, 143])
def test_what_a_restart_cannot_help_is_not_tried_again_whatever_a_launcher_ends_with(status):
    process = engine(ended(mpirun=status), failure="rank 0 ModelUnsupported: no", code=ExitCode.CONFIG)
    assert process._exit_code(End("mpirun", status)) == ExitCode.CONFIG


@pytest.mark.parametrize("status, code", [(72, ExitCode.DESYNC), (1, ExitCode.CRASH), (-9, ExitCode.CRASH)])
def test_otherwise_the_process_says_how_it_ended(status, code):
    assert engine(ended(rank_0=status), failure="rank 1 left")._exit_code(End("rank 0", status)) == code
    assert engine(ended(rank_0=status))._exit_code(End("rank 0", status)) == code


@pytest.mark.parametrize("statuses", [{"rank_0": -14, "rank_1": -14}, {"rank_0": -14, "rank_1": 75}])
def test_ranks_that_could_not_join_are_named_with_their_ports(statuses):
    words = [f"rank {r}: joining 2 ranks over ring at 127.0.0.1:700{r}, 7 s at most" for r in range(2)]
    said = engine(ended(**statuses), *words)._describe_end(End("rank 0", -14))
    assert "could not join" in said and "at 127.0.0.1:7000 within 7 s" in said
    assert ("rank 1" in said and "127.0.0.1:7001 within 7 s" in said) == (statuses["rank_1"] == -14)


JOINS = [
    ({"rank_0": -14, "rank_1": -14}, "starting", True),
    ({"rank_0": 75, "rank_1": 70}, "starting", True),
    ({"rank_0": 70, "rank_1": 75}, "restarting", True),
    ({"mpirun": 142}, "starting", True),
    ({"mpirun": 75}, "starting", True),
    ({"rank_0": 75, "rank_1": 70}, "ready", False),
    ({"rank_0": 75, "rank_1": -9}, "starting", False),
    ({"rank_0": 64, "rank_1": 75}, "starting", False),
    ({"rank_0": 1, "rank_1": 70}, "starting", False),
]


@pytest.mark.parametrize("statuses, phase, expected", JOINS, ids=str)
def test_a_start_whose_ranks_do_not_come_together_is_no_crash(statuses, phase, expected):
    process = engine(ended(**statuses))
    process._state = EngineState(phase=phase)
    process._ready_at = 0.0 if phase == "ready" else None
    first = min((status, name.replace("_", " ")) for name, status in statuses.items())
    assert process._failed_to_join(End(first[1], first[0])) == expected


class Unjoined(EngineProcess):
    """Its first starts end by the deadline for joining, the next one by a crash that no restart mends."""

    def __init__(self, unjoined: int) -> None:
        super().__init__(EngineConfig(model="demo", tensor_parallel_size=2))
        self.starts = 0
        self._unjoined = unjoined

    async def _run_once(self, directory: Path) -> End:
        self.starts += 1
        statuses = {"rank_0": -14} if self.starts <= self._unjoined else {"rank_0": 64}
        self._ranks = ended(**statuses)
        return End("rank 0", statuses["rank_0"])


@pytest.mark.parametrize("unjoined", [1, FIRST_STARTS - 1, FIRST_STARTS])
def test_failed_joins_are_tried_again_without_telling_the_journal(unjoined, monkeypatch, tmp_path):
    monkeypatch.setattr("phalanx.supervision.restarts.FIRST_PAUSE_S", 0.0)
    process, downs = Unjoined(unjoined), []
    monkeypatch.setattr(process, "emit_down", lambda reason, *, will_restart: downs.append((reason, will_restart)))
    asyncio.run(process._supervise(tmp_path))
    assert process.starts == min(unjoined + 1, FIRST_STARTS)
    assert [will_restart for _, will_restart in downs] == [False]
    assert ("could not join" in downs[0][0]) == (unjoined == FIRST_STARTS)


def test_the_last_words_are_the_cause_when_nobody_says_one():
    process = engine(ended(rank_0=1), "Traceback ...", "ZeroDivisionError: division by zero", "-----", " ")
    assert "ZeroDivisionError" in process._describe_end(End("rank 0", 1))


def test_rdma_devices_get_time_after_a_kill():
    for backend, ranks, pause in [
        ("jaccl", ended(rank_0=70, rank_1=-9), RDMA_COOL_DOWN_S),
        ("jaccl-ring", ended(rank_0=-9, rank_1=70), RDMA_COOL_DOWN_S),
        ("jaccl", ended(rank_0=72, rank_1=72), 0.1),
        ("ring", ended(rank_0=70, rank_1=-9), 0.1),
    ]:
        assert engine(ranks, backend=backend)._cooled_down(0.1) == pause


def test_signals_are_found_under_mpirun_as_well():
    assert ended(mpirun=128 + 14).ended_by(signal.SIGALRM) == ["mpirun"]
    assert ended(rank_0=-14, rank_1=0).ended_by(signal.SIGALRM) == ["rank 0"]


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file or directory", "mpirun"), ConfigError("--backend mpi: no mpirun.")]
)
def test_ranks_that_cannot_be_started_end_it_with_the_reason(monkeypatch, tmp_path, error):
    async def none(*_: object, **__: object) -> RankProcesses:
        raise error

    monkeypatch.setattr("phalanx.supervision.process.start_ranks", none)
    process = engine(ended())
    asyncio.run(process._supervise(tmp_path))
    assert process.state.phase == "failed"
    assert "the ranks could not be started" in process.state.reason
    assert "mpirun" in process.state.reason


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EADDRINUSE])
@pytest.mark.parametrize("has_served", [False, True])
def test_a_machine_without_room_for_ranks_is_tried_again(monkeypatch, tmp_path, number, has_served):
    """Another program, or another user, may have taken all there is for a moment."""
    tries = 0

    async def full(*_: object, **__: object) -> RankProcesses:
        nonlocal tries
        tries += 1
        raise OSError(number if tries <= 2 * FIRST_STARTS else errno.ENOENT, "why")

    process = engine(ended())
    process._restarts._has_served = has_served
    monkeypatch.setattr("phalanx.supervision.restarts.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(process, "_start_ranks", full)
    asyncio.run(process._supervise(tmp_path))
    assert tries == (2 * FIRST_STARTS + 1 if has_served else FIRST_STARTS)
    assert "could not be started" in process.state.reason
    assert not list(tmp_path.iterdir()), "a socket is left"


@pytest.mark.parametrize("number", [32, 40, 77])
def test_a_signal_without_a_name_ends_a_rank_and_not_the_supervisor(number):
    assert engine(ended(rank_0=-number))._describe_end(End("rank 0", -number)) == f"rank 0 was ended by signal {number}"
    notice = f"process rank 1 with PID 7 on node b exited on signal {number}"
    assert f"signal {number}" in engine(ended(mpirun=1), notice)._describe_end(End("mpirun", 1))


def test_a_rank_that_logs_without_end_keeps_nobody_waiting(capsys):
    async def main() -> int:
        stream = asyncio.StreamReader()
        stream.feed_data(b"x" * 60_000 + b"\n" + b"y\n" * 1000)
        stream.feed_eof()
        forwarding = asyncio.create_task(engine(ended())._forward_log("rank 0", SimpleNamespace(stderr=stream)))
        turns = 0
        while not forwarding.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(main()) > 1000
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "x" * LINE_CHARS and len(rest) < 30


def test_an_engine_whose_supervisor_crashes_has_failed(monkeypatch):
    async def main() -> EngineProcess:
        process = engine(ended())
        monkeypatch.setattr(process, "_start_ranks", lambda *_: 1 / 0)
        await process.start()
        await asyncio.wait([process._supervisor])
        await asyncio.sleep(0)
        state = process.state
        await process.close()
        return state

    state = asyncio.run(main())
    assert (state.phase, state.exit_code) == ("failed", ExitCode.CRASH)
    assert "ZeroDivisionError" in state.reason


def test_a_host_that_is_away_is_waited_for_and_named(monkeypatch, tmp_path):
    """It is no crash, however often it is tried."""
    tries = 0

    async def away(*_: object, **__: object) -> RankProcesses:
        nonlocal tries
        tries += 1
        raise HostUnreachable("The agent of b at 10.0.0.2 port 32330 cannot be used: no answer.", remedy="Is b on?")

    async def main() -> None:
        begun = time.time()
        process = engine(ended())
        monkeypatch.setattr(process, "_start_ranks", away)
        supervision = asyncio.create_task(process._supervise(tmp_path))
        while tries <= 2 * FIRST_STARTS:
            await asyncio.sleep(0.01)
            assert not supervision.done()
        assert process.state.phase == "starting" and process.state.restarts == 0
        assert begun - 1 <= process.state.down_since <= begun + 60
        assert "The agent of b at 10.0.0.2" in process.state.reason and "Is b on?" in process.state.reason
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)

    monkeypatch.setattr("phalanx.supervision.process.HOST_RETRY_S", 0.01)
    asyncio.run(main())


class Group(RankProcesses):
    """A group without processes, whose end is given; without one it never ends."""

    def __init__(self, end: End | None) -> None:
        super().__init__({}, [])
        self._end = end

    async def first_end(self) -> End:
        if self._end is None:
            await asyncio.Event().wait()
        assert self._end is not None
        return self._end


def test_a_host_that_is_back_is_not_blamed_while_its_rank_loads(monkeypatch, tmp_path):
    away = HostUnreachable("The agent of b cannot be used: no answer.")
    starts: list[RankProcesses | HostUnreachable] = [Group(End("rank 1", -9)), away, away, Group(None)]
    seen: list[str] = []

    async def main() -> None:
        process = engine(ended())

        async def start(*_: object, **__: object) -> RankProcesses:
            seen.append(process.state.reason)
            if isinstance(found := starts.pop(0), HostUnreachable):
                raise found
            return found

        monkeypatch.setattr(process, "_start_ranks", start)
        supervision = asyncio.create_task(process._supervise(tmp_path))
        while starts:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert process.state.phase == "restarting" and process.state.reason.startswith("rank 1 was ended by SIGKILL")
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)

    monkeypatch.setattr("phalanx.supervision.process.HOST_RETRY_S", 0.01)
    asyncio.run(main())
    assert seen[3].startswith("The agent of b cannot be used")


def test_ranks_that_were_launched_and_not_started_are_ended(monkeypatch, tmp_path):
    """SIGTERM at once: there is nobody yet to take a Shutdown."""
    monkeypatch.setattr("phalanx.supervision.process.EXIT_WAIT_S", 3600.0)
    signals: list[signal.Signals] = []

    class Rank(SimpleNamespace):
        def send_signal(self, number: signal.Signals) -> None:
            signals.append(number)
            self.returncode = -number

    async def main() -> str:
        process = EngineProcess(EngineConfig(model="demo"))
        monkeypatch.setattr("phalanx.supervision.process.start_ranks", start)
        await process.launch()
        assert process._directory is not None
        directory = str(process._directory.path)
        await process.close()
        assert signals == [signal.SIGTERM]
        assert process.state.phase == "stopped"
        return directory

    async def start(*_: object, **__: object) -> RankProcesses:
        return RankProcesses({"rank 0": Rank(returncode=None, pid=1)}, [])

    assert not Path(asyncio.run(main())).exists()


def test_ranks_start_again_where_the_directory_for_sockets_was_cleaned_away(monkeypatch):
    """As systemd does with what lies in /tmp for ten days."""
    seen: list[Path] = []

    async def start(_config: object, _choice: object, path: Path, **_: object) -> RankProcesses:
        assert path.parent.is_dir()
        seen.append(path.parent)
        shutil.rmtree(path.parent)
        raise OSError(errno.EAGAIN, "why")

    async def main() -> None:
        process = EngineProcess(EngineConfig(model="demo"))
        monkeypatch.setattr("phalanx.supervision.process.start_ranks", start)
        monkeypatch.setattr("phalanx.supervision.restarts.FIRST_PAUSE_S", 0.0)
        await process.start()
        assert process._supervisor is not None
        await process._supervisor
        await process.close()

    asyncio.run(main())
    assert len(set(seen)) == FIRST_STARTS


def test_a_place_that_takes_no_directory_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("phalanx.supervision.process.runtime_dir", lambda: tmp_path / "gone")
    with pytest.raises(
        ConfigError, match=f"No directory for sockets and temporary files can be made in {tmp_path}/gone: No such file"
    ):
        asyncio.run(EngineProcess(EngineConfig(model="demo")).start())


def test_a_launch_that_fails_is_reported_by_the_supervision(monkeypatch):
    async def none(*_: object, **__: object) -> RankProcesses:
        raise FileNotFoundError(2, "No such file or directory", "python")

    async def main() -> None:
        process = EngineProcess(EngineConfig(model="demo"))
        monkeypatch.setattr("phalanx.supervision.process.start_ranks", none)
        await process.launch()
        assert process.state.phase == "starting"
        await process.start()
        assert process._supervisor is not None
        await process._supervisor
        assert process.state.phase == "failed" and "the ranks could not be started" in process.state.reason
        await process.close()

    asyncio.run(main())


def test_an_engine_is_ready_once_what_its_ranks_said_before_is_printed(monkeypatch, capsys):
    """The log comes another way than `Ready`, under mpirun through another process."""
    monkeypatch.setattr(engine_connection, "LOG_WAIT_S", 120.0)

    async def main() -> None:
        process = engine(ended())
        process._log_complete.clear()  # as a launch does
        messages, log = asyncio.StreamReader(), asyncio.StreamReader()
        messages.feed_data(engine_codec().encode(Ready(FAKE_INFO, 1)))
        receiving = asyncio.create_task(process._receive_messages((messages, SimpleNamespace())))
        for _ in range(20):
            await asyncio.sleep(0)
        assert process.state.phase == "starting"
        log.feed_data(b"rank 0: kernels: native\nrank 0: serving\n")
        log.feed_eof()
        await process._forward_log("mpirun", SimpleNamespace(stderr=log))
        while process.state.phase != "ready":
            await asyncio.sleep(0)
        messages.feed_eof()
        await receiving

    asyncio.run(main())
    assert capsys.readouterr().err == "rank 0: kernels: native\n"


def test_a_log_that_does_not_come_holds_up_nothing(monkeypatch):
    monkeypatch.setattr(engine_connection, "LOG_WAIT_S", 0.0)

    async def main() -> None:
        process = engine(ended())
        process._log_complete.clear()
        messages = asyncio.StreamReader()
        messages.feed_data(engine_codec().encode(Ready(FAKE_INFO, 1)))
        messages.feed_eof()
        await process._receive_messages((messages, SimpleNamespace()))
        assert process.info == FAKE_INFO

    asyncio.run(main())
