"""A host's side of cluster commands: the verbs of `phalanx host`, which other machines run here through ssh.

A verb reads one JSON object from stdin and prints one (`watch`: one every second).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Struct

from phalanx.cluster import links, machine
from phalanx.cluster.argument_flags import flag_value
from phalanx.cluster.check_results import Examination, ExamineRequest
from phalanx.cluster.checks import examine, gather
from phalanx.cluster.file_transfer import Manifest, ModelFile, ReceivedFile, finish, inventory, take
from phalanx.cluster.host_status import report
from phalanx.cluster.links import MeasureRequest, ReachRequest, SetupRequest, is_there, measure, set_up, undo
from phalanx.cluster.releases import InstallFolder, ReleaseRequest
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.ssh import ANSWER
from phalanx.cluster.supervisor import (
    GATEWAY,
    LogPlace,
    RunDirectory,
    Spec,
    Stopped,
    SupervisorStarted,
    log_file,
    start,
    stop,
    supervise,
)
from phalanx.cluster.survey import ShapeRequest, SpeedRequest, shape_here, speed_here
from phalanx.config import CREDENTIALS_FILE, RUN_PHALANX
from phalanx.environment import environment
from phalanx.errors import ClusterError, ConfigError
from phalanx.faults import first_fault
from phalanx.tls.host_credentials import write_credentials
from phalanx.types import ModelInfo, RankStats

WATCH_S = 1.0  # between two statuses, and between two looks at a log
SETTLE_S = 5.0  # longest wait for the system to free the memory of processes that ended


Part = Literal["group", "gateway"]
"""Roles on a host of a cluster: a server or an agent of a group, and a gateway."""


class StopRequest(Struct, frozen=True, kw_only=True):
    """Stop what runs on the host."""

    timeout_s: float = 15.0  # between SIGTERM and SIGKILL
    force: bool = False  # also end processes of groups that no PID file names
    only: Part | None = None  # only this part


class StartedHere(Struct, frozen=True, kw_only=True):
    """The specifications last started on the host, for a restart."""

    specs: list[Spec]

    @property
    def layout(self) -> ReplicaLayout | None:
        """The cluster's, if it has several replicas."""
        return next((spec.layout for spec in self.specs if spec.layout is not None), None)


class TestRequest(Struct, frozen=True, kw_only=True):
    """Test a group with the ranks that this server would have."""

    spec: Spec


class GroupTest(Struct, frozen=True, kw_only=True):
    """The output of `phalanx selftest --json`."""

    info: ModelInfo
    ranks: list[RankStats]
    fast_synch: str = ""  # over JACCL: what to write into the hostfile about MLX_METAL_FAST_SYNCH, and why


class ReceiveRequest(Struct, frozen=True, kw_only=True):
    """Receive a file, whose bytes follow on stdin."""

    place: str  # of the model
    entry: ModelFile
    have: int


class LogRequest(Struct, frozen=True, kw_only=True):
    """Read the log, and that of a gateway."""

    lines: int  # last lines
    follow: bool  # also send new lines
    gateway: bool = True  # a gateway's as well
    group: bool = True  # that of a server or an agent


class LogLines(Struct, frozen=True, kw_only=True):
    """Lines of a log. `over`: no more follow."""

    lines: list[str]
    of: str = ""  # "gateway", if they are a gateway's
    over: bool = False


def answer(value: object) -> None:
    """Print a value as a line that the caller finds among other output, such as that of login scripts."""
    print(ANSWER + msgspec.json.encode(value).decode(), flush=True)


def stop_here(request: StopRequest, run_dir: RunDirectory) -> Stopped:
    """Stop what runs here, and measure memory before and after."""
    before = machine.wired_bytes()
    parts = {"group": run_dir, "gateway": run_dir.gateway}
    chosen = parts.values() if request.only is None else [parts[request.only]]
    found, killed, left = stop(*chosen, timeout_s=request.timeout_s, force=request.force)
    after = machine.wired_bytes()
    deadline = time.monotonic() + SETTLE_S
    while found and after >= before and time.monotonic() < deadline:
        time.sleep(0.2)
        after = machine.wired_bytes()
    return Stopped(found=found, killed=killed, left=left, before=before, after=after)


def watch(run_dir: RunDirectory) -> None:
    """Print the status every second until stdin ends, which means that the caller is gone."""
    while True:
        answer(report(run_dir))
        readable, _, _ = select.select([sys.stdin], [], [], WATCH_S)
        if readable and not os.read(0, 1024):
            return


def run_verb(verb: str, run_dir: RunDirectory | None = None) -> int:
    """Run a verb with the request on stdin. Returns the exit code.

    Raises:
        ConfigError: there is no such verb, or the request is not of its kind.
        ClusterError: the verb failed.
    """
    run_dir = run_dir or RunDirectory()
    handlers: dict[str, Callable[[], object]] = {
        "start": lambda: _start(_request(Spec), run_dir),
        "stop": lambda: stop_here(_request(StopRequest), run_dir),
        "status": lambda: report(run_dir),
        "spec": lambda: StartedHere(specs=_specs(run_dir)),
        "check": lambda: examine(_request(ExamineRequest), run_dir),
        "facts": lambda: Examination(facts=gather(_request(ExamineRequest)), results=[]),
        "net-setup": lambda: set_up(_request(SetupRequest), Path.home()),
        "net-undo": lambda: undo(Path.home()),
        "reach": lambda: is_there(_request(ReachRequest)),
        "measure": lambda: measure(_request(MeasureRequest)),
        "inventory": lambda: inventory(_request(Manifest)),
        "finish": lambda: finish(_request(Manifest)),
        "take": _take,
        "install": lambda: InstallFolder().install(_request(ReleaseRequest)),
        "rollback": lambda: InstallFolder().rollback(),
        "uninstall": lambda: InstallFolder().remove(),
        "plan-shape": lambda: shape_here(_request(ShapeRequest)),
        "plan-speed": lambda: speed_here(_request(SpeedRequest)),
        "group-test": lambda: _group_test(_request(TestRequest).spec),
    }
    if verb in handlers:
        answer(handlers[verb]())
        return 0
    if verb == "watch":
        sys.stdin.buffer.readline()
        watch(run_dir)
        return 0
    if verb == "listen":
        asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=links.ListenRequest)  # stdin stays open
        listening, thread = links.listener(asked)
        answer(listening)
        thread.join()
        return 0
    if verb == "logs":
        return _logs(run_dir)
    if verb == "supervise":
        spec = _request(Spec)
        return supervise(spec, _directory_of(spec, run_dir))
    raise ConfigError(f"phalanx host {verb!r}: there is no such verb.", remedy="It is not for use by hand.")


def _take() -> ReceivedFile:
    """Receive a file: a line with the request, then the file's bytes."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReceiveRequest)
    return take(request.place, request.entry, request.have, sys.stdin.buffer)


def _logs(run_dir: RunDirectory) -> int:
    """Print the end of each log; to follow them, print new lines until stdin ends."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=LogRequest)
    found = [place for place in (run_dir.read_last_log(), run_dir.gateway.read_last_log()) if place is not None]
    if not found:
        raise _nothing_started()
    wanted = [place for place in found if (request.gateway if place.role == GATEWAY else request.group)]
    with contextlib.ExitStack() as stack:
        logs = [_Log(place, stack.enter_context(_opened(place))) for place in wanted]
        for log in logs:
            answer(LogLines(lines=log.last(request.lines), of=log.of))
        while request.follow:
            for log in logs:
                answer(LogLines(lines=log.added(), of=log.of))  # without lines as well: a host that is silent is missed
            readable, _, _ = select.select([sys.stdin], [], [], WATCH_S)
            if readable and not os.read(0, 1024):
                return 0
    answer(LogLines(lines=[], over=True))
    return 0


def _opened(place: LogPlace) -> BinaryIO:
    try:
        return log_file(place).open("rb")
    except OSError as error:
        raise ClusterError(f"{log_file(place)} cannot be read: {error.strerror}.") from error


class _Log:
    """A log that is read while it grows."""

    def __init__(self, place: LogPlace, file: BinaryIO) -> None:
        self.of = GATEWAY if place.role == GATEWAY else ""
        self._path = log_file(place)
        self._file = file

    def last(self, count: int) -> list[str]:
        """The last lines there are so far."""
        lines = self._file.read().decode(errors="replace").splitlines()
        return lines[len(lines) - count :] if count < len(lines) else lines

    def added(self) -> list[str]:
        """The lines since then."""
        if self._file.tell() > self._path.stat().st_size:
            self._file.seek(0)  # it had grown too large and started again
        return self._file.read().decode(errors="replace").splitlines()


def _group_test(spec: Spec) -> GroupTest:
    """Run `phalanx selftest` with the server's hosts.

    Raises:
        ClusterError: it failed; has its last lines.
    """
    given = {name: flag_value(spec.command, name) for name in ("--tp", "--pp", "--backend")}
    wanted = [word for name, value in given.items() if value is not None for word in (name, value)]
    with tempfile.TemporaryDirectory(prefix="phalanx-test-") as folder:
        file = Path(folder) / "cluster.json"
        file.write_text(spec.files[file.name])
        if spec.credentials is not None:
            write_credentials(file.with_name(CREDENTIALS_FILE), spec.credentials)
        done = subprocess.run(
            [sys.executable, *RUN_PHALANX, "selftest", "demo", "--json", *wanted, "--cluster", str(file)],
            capture_output=True,
            text=True,
            env={**environment(), **spec.variables},
            check=False,
        )
    try:
        return msgspec.json.decode(done.stdout, type=GroupTest)
    except msgspec.DecodeError as error:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        fault = first_fault(lines)
        remedy = "" if fault is None else f"{fault[1].name}: {fault[1].cause} {fault[1].remedy}"
        raise ClusterError(" / ".join(lines[-3:]) or f"status {done.returncode}", remedy=remedy) from error


AnyRequest = TypeVar("AnyRequest", bound=Struct)


def _request(kind: type[AnyRequest]) -> AnyRequest:
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"The question is not {kind.__name__}: {error}.",
            remedy="`phalanx install --upgrade` brings the same version of phalanx to all machines.",
        ) from error


def _specs(run_dir: RunDirectory) -> list[Spec]:
    """The specifications of the server or agent that was started here, and of the gateway."""
    specs = [spec for spec in (run_dir.read_spec(), run_dir.gateway.read_spec()) if spec is not None]
    if not specs:
        raise _nothing_started()
    return specs


def _nothing_started() -> ClusterError:
    return ClusterError("Nothing was started here.", remedy="Use `phalanx up`.")


def _directory_of(spec: Spec, run_dir: RunDirectory) -> RunDirectory:
    return run_dir.gateway if spec.role == GATEWAY else run_dir


def _start(spec: Spec, run_dir: RunDirectory) -> SupervisorStarted:
    run_dir = _directory_of(spec, run_dir)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost ssh connection must not interrupt a start
    return SupervisorStarted(pid=start(spec, run_dir))
