"""Supervisors: what is started again, what is not, how it is stopped, and whose processes are left alone (L3, L4)."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from phalanx.cluster import host_verbs, identity, supervisor
from phalanx.cluster.host_status import since_loaded
from phalanx.cluster.host_verbs import LogLines, LogRequest
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.supervisor import RunDirectory, Spec, start, stop, supervise
from phalanx.errors import ClusterError
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import read_credentials

COUNTING = """
import pathlib, sys
log = pathlib.Path(sys.argv[1])
log.write_text(log.read_text() + "x" if log.exists() else "x")
sys.exit(int(sys.argv[2 + min(len(log.read_text()) - 1, len(sys.argv) - 3)]))
"""


@pytest.fixture
def place(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path)
    found.run.mkdir(parents=True)
    return found


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may take long to end a process."""
    monkeypatch.setattr(supervisor, "LAST_S", 120.0)
    monkeypatch.setattr(supervisor, "KILL_HOLD_S", 600.0)


@pytest.fixture
def handlers() -> Iterator[None]:
    """A supervisor in this process replaces its signal handlers."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def spec(*command: str) -> Spec:
    return Spec(role="server", command=list(command), variables={"MARK": "1"}, log="log")


@pytest.mark.parametrize(
    ("statuses", "runs", "last"),
    [
        ((0,), 1, 0),  # ended in order
        ((64,), 1, 64),  # a flag is wrong: a restart cannot help
        ((65,), 1, 65),
        ((1, 70, 64), 3, 64),
        ((1,) * 20 + (64,), 21, 64),  # what may pass is tried for ever
    ],
)
def test_which_exit_codes_are_restarted(place, handlers, monkeypatch, tmp_path, statuses, runs, last):
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", COUNTING))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
    log = tmp_path / "runs"
    assert supervise(spec(str(log), *map(str, statuses)), place) == last
    assert log.read_text() == "x" * runs
    outcome = place.read_outcome()
    assert outcome is not None and outcome.status == last
    assert place.running() == [] and not place.child.exists() and not place.supervisor.exists()


WAITING = """
import pathlib, sys, time
if pathlib.Path(sys.argv[1]).exists():
    sys.exit(64)
time.sleep(1e6)
"""


@pytest.mark.parametrize("lacking", ["process", "disk"])
def test_a_start_that_the_system_refuses_is_tried_again(place, handlers, monkeypatch, tmp_path, lacking):
    """Other programs may have taken all processes, or the disk; later there is room again."""
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", WAITING))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
    refused, before = tmp_path / "refused", psutil.Process().children()
    owner, name = (subprocess, "Popen") if lacking == "process" else (identity, "write")
    works = getattr(owner, name)

    def refuse_once(*args, **kwargs):
        if not refused.exists() and (lacking == "process" or args[0] == place.child):
            refused.touch()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return works(*args, **kwargs)

    monkeypatch.setattr(owner, name, refuse_once)
    assert supervise(spec(str(refused)), place) == 64
    outcome = place.read_outcome()
    assert refused.exists() and outcome is not None and outcome.restarts == 1
    assert psutil.Process().children() == before, "the first process runs on"


def test_secrets_are_readable_by_the_owner_alone(place, handlers, monkeypatch):
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", ""))
    supervise(spec(), place)
    assert place.spec.stat().st_mode & 0o077 == 0
    assert place.read_spec() == spec()


def test_files_are_readable_by_the_owner_alone(place, monkeypatch):
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", "raise SystemExit(1)"))
    monkeypatch.setenv("HOME", str(place.run.parent.parent))
    credentials, _ = make_credentials(["a", "b"])
    place.run.chmod(0o755)
    with pytest.raises(ClusterError, match="did not start"):
        start(replace(spec(), files={"cluster.json": "k"}, credentials=credentials), place)
    assert place.run.stat().st_mode & 0o077 == 0
    files = {file.name: file for file in place.run.iterdir()}
    assert set(files) == {"cluster.json", "credentials.json"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in files.values())
    assert read_credentials(files["credentials.json"]) == credentials


@pytest.fixture
def asked(monkeypatch) -> Callable[[RunDirectory, LogRequest], list[LogLines]]:
    """What a host answers to a request for its logs."""

    def ask(place: RunDirectory, request: LogRequest) -> list[LogLines]:
        said: list[LogLines] = []
        stdin = io.TextIOWrapper(io.BytesIO(msgspec.json.encode(request) + b"\n"))
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(host_verbs, "answer", said.append)
        assert host_verbs.run_verb("logs", place) == 0
        return said

    return ask


def test_logs_are_there_after_a_failed_start_and_after_the_end(place, monkeypatch, asked):
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", "raise SystemExit('no such module')"))
    monkeypatch.setenv("HOME", str(place.run.parent.parent))
    monkeypatch.setattr(identity, "strays", list)
    with pytest.raises(ClusterError, match="Nothing was started here"):
        asked(place, LogRequest(lines=9, follow=False))
    with pytest.raises(ClusterError, match="did not start"):
        start(spec(), place)
    stop(place, timeout_s=1.0, force=False)
    assert not place.spec.exists()
    first, over = asked(place, LogRequest(lines=9, follow=False))
    assert first.lines == ["no such module"] and over.over
    (over,) = asked(place, LogRequest(lines=9, follow=False, group=False))
    assert over.over, "there is no gateway"
    (Path.home() / spec().log).unlink()
    with pytest.raises(ClusterError, match="cannot be read: No such file"):
        asked(place, LogRequest(lines=9, follow=False))


def test_the_log_of_a_gateway_is_asked_for_alone_and_is_not_that_of_an_earlier_cluster(place, monkeypatch, asked):
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", "raise SystemExit('gone')"))
    monkeypatch.setenv("HOME", str(place.run.parent.parent))
    layout = ReplicaLayout(replicas={"0": ("a",), "1": ("b",)}, gateway="a")
    for one, where in ((spec(), place), (replace(spec(), role="gateway", log="gate"), place.gateway)):
        with pytest.raises(ClusterError):
            start(replace(one, layout=layout), where)
    found = asked(place, LogRequest(lines=9, follow=False, group=False))
    assert [(one.of, one.lines) for one in found] == [("gateway", ["gone"]), ("", [])]
    with pytest.raises(ClusterError):
        start(spec(), place)
    found = asked(place, LogRequest(lines=9, follow=False))
    assert [(one.of, one.lines) for one in found] == [("", ["gone"]), ("", [])]


def test_a_fault_before_the_model_was_loaded_again_is_mended():
    lost = "rank 1: PeerFailure: rank 0 (a, pid 7) is gone"
    assert list(since_loaded([lost, "rank 1: joined in 0.1 s"])) == [lost, "rank 1: joined in 0.1 s"]
    loaded = "rank 1: loaded in 0.1 s: bfloat16"
    assert list(since_loaded([lost, loaded, "x"])) == [loaded, "x"]
    assert list(since_loaded([loaded, lost])) == [loaded, lost]


def test_a_supervisor_that_ends_before_it_reads_is_named(place, monkeypatch):
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", "raise SystemExit('no such module')"))
    monkeypatch.setenv("HOME", str(place.run.parent.parent))
    long = spec("x" * (1 << 20))  # more than a pipe holds, so that nobody reads it
    with pytest.raises(ClusterError, match="did not start: no such module"):
        start(long, place)


LEAVING = """
import os, pathlib
scratch = pathlib.Path(os.environ["XDG_RUNTIME_DIR"])
empty, first = not any(scratch.iterdir()), not (scratch.parent / "again").exists()
(scratch / "left").mkdir()
(scratch.parent / "again").touch()
os._exit(1 if first else 64 if empty else 65)
"""


def test_files_of_a_killed_process_are_removed(place, handlers, monkeypatch):
    monkeypatch.setattr(supervisor, "PROGRAM", (sys.executable, "-c", LEAVING))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    assert supervise(spec(), place) == 64
    assert (place.scratch / "left").exists()
    stop(place, timeout_s=1, force=False)
    assert not place.run.exists()


class Pair:
    """A supervisor's PID files, made of ordinary processes."""

    def __init__(self, place: RunDirectory, *children: str) -> None:
        self.processes = [subprocess.Popen([sys.executable, "-c", child]) for child in children]
        for file, process in zip((place.supervisor, place.child), self.processes, strict=False):
            while identity.record(process.pid).arguments != ["-c", children[self.processes.index(process)]]:
                time.sleep(0.01)
            identity.write(file, identity.record(process.pid))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


SLEEPER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
)


def test_stop_ends_the_processes_of_the_pid_files(place):
    pair = Pair(place, SLEEPER)
    found, killed, left = stop(place, timeout_s=120, force=False)
    assert len(found) == 1 and str(pair.processes[0].pid) in found[0]
    assert (killed, left) == ([], []) and pair.processes[0].wait() == -signal.SIGTERM
    assert not place.run.exists()


def test_a_gateway_beside_a_server_ends_with_it_or_alone(tmp_path):
    place = RunDirectory(tmp_path)
    for run_dir in (place, place.gateway):
        run_dir.run.mkdir(parents=True)
    assert place.gateway.run == tmp_path / ".phalanx/gateway"
    server, gateway = Pair(place, SLEEPER), Pair(place.gateway, SLEEPER)
    try:
        found, killed, left = stop(place.gateway, timeout_s=10, force=False)
        assert len(found) == 1 and (killed, left) == ([], [])
        assert gateway.processes[0].wait() == -signal.SIGTERM and server.processes[0].poll() is None
        assert place.run.exists() and not place.gateway.run.exists()
        place.gateway.run.mkdir()
        again = Pair(place.gateway, SLEEPER)
        found, killed, left = stop(place, place.gateway, timeout_s=10, force=False)
        assert len(found) == 2 and (killed, left) == ([], [])
        assert [pair.processes[0].wait() for pair in (server, again)] == [-signal.SIGTERM] * 2
        assert not place.run.parent.exists()
    finally:
        for pair in (server, gateway):
            pair.end()


def test_sigkill_follows_the_timeout_and_sets_a_hold(place):
    pair = Pair(place)
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    pair.processes.append(process)
    identity.write(place.supervisor, identity.record(process.pid))
    begun = time.monotonic()
    _, killed, left = stop(place, timeout_s=0.5, force=False)
    assert time.monotonic() - begun >= 0.5
    assert len(killed) == 1 and left == [] and process.wait() == -signal.SIGKILL
    assert 0 < place.held_s() <= 600
    assert place.hold.exists() and not place.supervisor.exists()
    place.hold.write_text("inf")  # as far off as the clock may have been set back
    assert place.held_s() == supervisor.KILL_HOLD_S


@pytest.mark.parametrize("text", ['{"pid":' * 50_000, '{"pid": -1, "created": 1, "program": "a", "arguments": []}', ""])
def test_a_damaged_file_of_a_run_directory_names_no_process(place, text):
    for file in (place.supervisor, place.spec, place.outcome):
        file.write_text(text)
    assert place.named() == (None, None) and place.read_spec() is None and place.read_outcome() is None


@pytest.mark.parametrize("field", ["pid", "created", "program", "arguments"])
def test_a_process_that_is_not_the_one_is_left_alone(place, field):
    pair = Pair(place, SLEEPER, SLEEPER + "  # another program, at once")
    victim = pair.processes[1].pid
    known = json.loads(place.supervisor.read_text())
    changed = {"pid": victim, "created": known["created"] - 100, "program": "/bin/sleep", "arguments": ["x"]}
    place.supervisor.write_text(json.dumps({**known, field: changed[field]}))
    place.child.unlink()
    try:
        assert place.running() == []
        assert stop(place, timeout_s=1, force=False) == ([], [], [])
        assert all(process.poll() is None for process in pair.processes)
    finally:
        pair.end()


AGAIN = """
import os, sys
if not sys.orig_argv[0].startswith("/Library"):
    print("recorded?", flush=True)
    sys.stdin.readline()
    os.execv(sys.executable, ["/Library/Python.app/Contents/MacOS/Python", "-c", sys.orig_argv[2]])
"""


def test_a_python_that_executes_itself_again_is_the_same_process(place):
    """A framework Python of macOS does, at any time after its record was written. Its id and start time stay."""
    command = [sys.executable, "-c", AGAIN + SLEEPER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "recorded?\n"
    before = identity.record(process.pid)
    identity.write(place.supervisor, before)
    process.stdin.write("\n")
    process.stdin.flush()
    while not "".join(psutil.Process(process.pid).cmdline()).startswith("/Library"):  # empty while it executes
        time.sleep(0.01)
    assert identity.record(process.pid) == before
    found, _, left = stop(place, timeout_s=120, force=False)
    assert len(found) == 1 and left == [] and process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("executable", "program"),
    [
        ("/usr/bin/python3.11", "/usr/bin/python3.11"),
        *(
            (f"{framework}/{rest}", framework)
            for framework in (
                "/Library/Frameworks/Python.framework/Versions/3.12",
                "/opt/homebrew/Cellar/python@3.13/3.13.1/Frameworks/Python.framework/Versions/3.13",
                "/Applications/Xcode.app/Contents/Developer/Library/Frameworks/Python3.framework/Versions/3.9",
            )
            for rest in ("bin/python3", "Resources/Python.app/Contents/MacOS/Python")
        ),
    ],
)
def test_the_interpreter_of_a_framework_is_one_program(executable, program):
    assert identity.program_of(executable) == program


@pytest.mark.parametrize("text", ["", "{", "17"])
def test_a_torn_pid_file_is_none(place, text):
    place.supervisor.write_text(text)
    assert place.running() == [] and stop(place, timeout_s=1, force=False) == ([], [], [])


def test_only_one_is_started(place):
    pair = Pair(place, SLEEPER)
    try:
        with pytest.raises(ClusterError, match="Something is running here already"):
            start(spec("version"), place)
    finally:
        pair.end()


def test_descendants_of_a_process_end_with_it(place):
    child = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('on', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    identity.write(place.supervisor, identity.record(process.pid))
    (below,) = psutil.Process(process.pid).children()
    _, killed, left = stop(place, timeout_s=0.5, force=False)
    assert "sleep" in killed[-1] and left == []  # a busy machine may not have ended its parent by then
    with suppress(psutil.NoSuchProcess):
        assert not (below.is_running() and below.cmdline())  # without arguments it has ended but for its traces
    process.wait()


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ("python -m phalanx rank demo --socket x", True),
        ("/venv/bin/python /venv/bin/phalanx serve demo", True),
        ("phalanx agent --host x", True),
        ("python -m phalanx host supervise", True),
        ("python -m phalanx gateway --port 8080 --replicas .phalanx/gateway/replicas.toml", True),
        ("python -m phalanx gateway --replicas mine.toml", False),
        ("python -m phalanx host status", False),
        ("python -m phalanx up hosts.json", False),
        ("vi phalanx rank", False),
        ("grep phalanx serve", False),
        ("python -m mlx_lm.server", False),
        ("", False),
    ],
)
def test_which_commands_are_of_a_group(command, ours):
    assert identity.is_group_member(command.split()) is ours


def test_this_process_is_no_stray():
    assert os.getpid() not in [process.pid for process in identity.strays()]
