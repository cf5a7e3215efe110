"""A host's side of cluster commands: the verbs of `phalanx host`, which other machines run here through ssh.

A verb reads one JSON object from stdin and prints one (`watch`: one every second). Does not know other hosts.
"""

from __future__ import annotations

import http.client
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster import identity, machine
from phalanx.cluster.check_results import Examination, ExamineRequest
from phalanx.cluster.checks import examine, gather
from phalanx.cluster.file_transfer import Manifest, ModelFile, ReceivedFile, finish, inventory, take
from phalanx.cluster.links import MeasureRequest, ReachRequest, SetupRequest, is_there, listener, measure, set_up, undo
from phalanx.cluster.ssh import ANSWER
from phalanx.cluster.supervisor import (
    SUPERVISOR_SAYS,
    RunDirectory,
    Spec,
    Stopped,
    SupervisorStarted,
    log_file,
    start,
    stop,
    supervise,
)
from phalanx.config import environment
from phalanx.errors import ClusterError, ConfigError
from phalanx.faults import first_fault

WATCH_S = 1.0
HEALTH_S = 2.0
TAIL_BYTES = 1 << 16
SETTLE_S = 5.0  # longest wait for the system to free the memory of processes that ended


class StopRequest(Struct, frozen=True, kw_only=True):
    """Stop what runs on the host."""

    timeout_s: float = 15.0  # between SIGTERM and SIGKILL
    force: bool = False  # also end processes of groups that no PID file names


class TestRequest(Struct, frozen=True, kw_only=True):
    """Test a group with the ranks that this server would have."""

    spec: Spec


class GroupTest(Struct, frozen=True, kw_only=True):
    """The output of `phalanx selftest --json`."""

    info: dict[str, Any]
    ranks: list[dict[str, Any]]


class ReceiveRequest(Struct, frozen=True, kw_only=True):
    """Receive a file, whose bytes follow on stdin."""

    place: str  # of the model
    entry: ModelFile
    have: int


class LogRequest(Struct, frozen=True, kw_only=True):
    """Read the log."""

    lines: int  # last lines
    follow: bool  # also send new lines


class LogLines(Struct, frozen=True, kw_only=True):
    """Lines of the log. `over`: no more follow."""

    lines: list[str]
    over: bool = False


class ServerHealth(Struct, frozen=True, kw_only=True):
    """The server's /health."""

    ok: bool
    phase: str
    reason: str = ""
    since: str = ""  # since when it has not been ready, ISO 8601
    done: int = 0  # of `total`, in this step of loading
    total: int = 0
    step: str = ""
    restarts: int = 0
    ranks: list[dict[str, Any]] = []


class HostStatus(Struct, frozen=True, kw_only=True):
    """The state of a host's part of the cluster. Memory in bytes."""

    host: str
    role: str = ""  # "server" or "agent"; "" if nothing was started here
    supervisor: int | None = None  # process id
    child: int | None = None  # process id of the server or agent
    children: int = 0  # processes below it
    rss: int = 0  # of all of them
    used: int = 0  # wired (macOS) or used memory of the machine
    physical: int = 0
    held_s: float = 0.0  # until something may be started again after a kill
    ended: int | None = None  # exit status, if the supervisor does not start it again
    last_line: str = ""  # of the log; if it ended, its error
    fault: str = ""  # name and cause of the first known fault in the log since the start
    fault_line: str = ""
    remedy: str = ""
    log: str = ""
    health: ServerHealth | None = None  # of a server


def answer(value: object) -> None:
    """Print a value as a line that the caller finds among other output, such as that of login scripts."""
    print(ANSWER + msgspec.json.encode(value).decode(), flush=True)


def status(run_dir: RunDirectory) -> HostStatus:
    """The state of this host's part."""
    spec = run_dir.read_spec()
    base = HostStatus(
        host=socket.gethostname(),
        used=machine.wired_bytes(),
        physical=machine.physical_bytes(),
        held_s=run_dir.held_s(),
    )
    if spec is None:
        return base
    supervisor, child = run_dir.named()
    processes = identity.family([child] if child is not None else [])
    lines = [line for line in tail(log_file(spec)) if SUPERVISOR_SAYS not in line]
    fault = first_fault(lines)
    outcome = run_dir.read_outcome()
    return replace(
        base,
        role=spec.role,
        supervisor=None if supervisor is None else supervisor.pid,
        child=None if child is None else child.pid,
        children=max(0, len(processes) - 1),
        rss=sum(_rss(process) for process in processes),
        ended=None if outcome is None else outcome.status,
        last_line=final_error(lines) if outcome is not None else lines[-1] if lines else "",
        fault="" if fault is None else f"{fault[1].name}: {fault[1].cause}",
        fault_line="" if fault is None else fault[0],
        remedy="" if fault is None else fault[1].remedy,
        log=str(log_file(spec)),
        health=health(spec) if spec.role == "server" else None,
    )


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def tail(log: Path) -> list[str]:
    """The lines in the last `TAIL_BYTES` of a log, without empty ones."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def final_error(lines: list[str]) -> str:
    """Why a phalanx process ended, from its log: its last error with the remedy below it, else its last line."""
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if starts:
        return " ".join(line.strip() for line in lines[starts[-1] : starts[-1] + 2]).removeprefix("error: ")
    return lines[-1] if lines else "it said nothing"


def health(spec: Spec) -> ServerHealth:
    """Ask this host's server for its /health."""
    host, port = serve_address(spec.command)
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_S)
    try:
        connection.request("GET", "/health")
        body = msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return ServerHealth(ok=False, phase="starting", reason=f"nothing answers at {host} port {port} yet")
    finally:
        connection.close()
    progress = body.get("progress") or {}
    return ServerHealth(
        ok=body.get("status") == "ok",
        phase=str(body.get("status", "")),
        reason=str(body.get("reason", "")),
        since=str(body.get("since", "")),
        done=int(progress.get("done", 0)),
        total=int(progress.get("total", 0)),
        step=str(progress.get("phase", "")),
        restarts=int(body.get("restarts", 0)),
        ranks=list(body.get("ranks", [])),
    )


def serve_address(command: list[str]) -> tuple[str, int]:
    """The address at which a `phalanx serve` command answers, by its flags."""
    host, port = flag(command, "--host") or "127.0.0.1", flag(command, "--port") or "8000"
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port)


def flag(command: list[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`; the last one counts."""
    value = None
    for index, word in enumerate(command):
        if word == name and index + 1 < len(command):
            value = command[index + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def stop_here(request: StopRequest, run_dir: RunDirectory) -> Stopped:
    """Stop what runs here, and measure memory before and after."""
    before = machine.wired_bytes()
    found, killed, left = stop(run_dir, timeout_s=request.timeout_s, force=request.force)
    after = machine.wired_bytes()
    deadline = time.monotonic() + SETTLE_S
    while found and after >= before and time.monotonic() < deadline:
        time.sleep(0.2)
        after = machine.wired_bytes()
    return Stopped(found=found, killed=killed, left=left, before=before, after=after)


def watch(run_dir: RunDirectory) -> None:
    """Print the status every second until stdin ends, which means that the caller is gone."""
    while True:
        answer(status(run_dir))
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
        "status": lambda: status(run_dir),
        "spec": lambda: _spec(run_dir),
        "check": lambda: examine(_request(ExamineRequest), run_dir),
        "facts": lambda: Examination(facts=gather(_request(ExamineRequest)), results=[]),
        "net-setup": lambda: set_up(_request(SetupRequest), Path.home()),
        "net-undo": lambda: undo(Path.home()),
        "reach": lambda: is_there(_request(ReachRequest)),
        "measure": lambda: measure(_request(MeasureRequest)),
        "inventory": lambda: inventory(_request(Manifest)),
        "finish": lambda: finish(_request(Manifest)),
        "take": _take,
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
        listening, thread = listener()
        answer(listening)
        thread.join()
        return 0
    if verb == "logs":
        return _logs(run_dir)
    if verb == "supervise":
        return supervise(_request(Spec), run_dir)
    raise ConfigError(f"phalanx host {verb!r}: there is no such verb.", remedy="It is not for use by hand.")


def _take() -> ReceivedFile:
    """Receive a file: a line with the request, then the file's bytes."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReceiveRequest)
    return take(request.place, request.entry, request.have, sys.stdin.buffer)


def _logs(run_dir: RunDirectory) -> int:
    """Print the end of the log; to follow it, print new lines until stdin ends."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=LogRequest)
    log = log_file(_spec(run_dir))
    with log.open("rb") as file:
        lines = file.read().decode(errors="replace").splitlines()
        answer(
            LogLines(
                lines=lines[len(lines) - request.lines :] if request.lines < len(lines) else lines,
                over=not request.follow,
            )
        )
        while request.follow:
            if added := file.read():
                answer(LogLines(lines=added.decode(errors="replace").splitlines()))
            readable, _, _ = select.select([sys.stdin], [], [], WATCH_S)
            if readable and not os.read(0, 1024):
                break
    return 0


def _group_test(spec: Spec) -> GroupTest:
    """Run `phalanx selftest` with the server's hosts.

    Raises:
        ClusterError: it failed; has its last lines.
    """
    wanted = [word for name in ("--tp", "--backend") for word in (name, flag(spec.command, name) or "")]
    with tempfile.TemporaryDirectory(prefix="phalanx-test-") as folder:
        file = Path(folder) / "cluster.json"
        file.write_text(spec.files["cluster.json"])
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "selftest", "demo", "--json", *wanted, "--cluster", str(file)],
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
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"The question is not {kind.__name__}: {error}.",
            remedy="Install the same version of phalanx on all machines.",
        ) from error


def _spec(run_dir: RunDirectory) -> Spec:
    spec = run_dir.read_spec()
    if spec is None:
        raise ClusterError("Nothing was started here.", remedy="Use `phalanx up`.")
    return spec


def _start(spec: Spec, run_dir: RunDirectory) -> SupervisorStarted:
    held = run_dir.held_s()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost ssh connection must not interrupt a start
    pid = start(spec, run_dir)
    return SupervisorStarted(pid=pid, waited_s=held)
