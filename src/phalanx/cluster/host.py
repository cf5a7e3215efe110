"""What a host does for whoever manages the cluster: the verbs of `phalanx host`, run there through ssh.

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
from phalanx.cluster.check_results import Examination, Wanted
from phalanx.cluster.checks import examine, gather
from phalanx.cluster.file_transfer import Manifest, Parcel, Taken, finish, inventory, take
from phalanx.cluster.links import Probe, Reach, Setup, is_there, listener, measure, set_up, undo
from phalanx.cluster.ssh import ANSWER
from phalanx.cluster.supervisor import SUPERVISOR_SAYS, Place, Spec, Started, Stopped, log_file, start, stop, supervise
from phalanx.config import environment
from phalanx.errors import ClusterError, ConfigError
from phalanx.faults import first_fault

WATCH_S = 1.0
HEALTH_S = 2.0
TAIL_BYTES = 1 << 16
SETTLE_S = 5.0  # for the system to take memory back after processes ended


class StopRequest(Struct, frozen=True, kw_only=True):
    """How to stop."""

    timeout_s: float = 15.0
    force: bool = False


class TestRequest(Struct, frozen=True, kw_only=True):
    """Test a group as this server's would be."""

    spec: Spec


class GroupTest(Struct, frozen=True, kw_only=True):
    """What `phalanx selftest --json` found."""

    info: dict[str, Any]
    ranks: list[dict[str, Any]]


class TakeRequest(Struct, frozen=True, kw_only=True):
    """A file that follows."""

    place: str
    parcel: Parcel
    have: int


class LogRequest(Struct, frozen=True, kw_only=True):
    """What of the log is wanted."""

    lines: int
    follow: bool


class LogLines(Struct, frozen=True, kw_only=True):
    """A piece of the log. `over`: nothing follows."""

    lines: list[str]
    over: bool = False


class Health(Struct, frozen=True, kw_only=True):
    """What the server says of itself."""

    ok: bool
    phase: str
    reason: str = ""
    since: str = ""  # when it ceased to be ready, ISO 8601
    done: int = 0
    total: int = 0
    step: str = ""  # of loading
    restarts: int = 0
    ranks: list[dict[str, Any]] = []


class HostStatus(Struct, frozen=True, kw_only=True):
    """What runs on a host."""

    host: str
    role: str = ""  # "" if nothing is known here
    supervisor: int | None = None  # process ids
    child: int | None = None
    children: int = 0  # processes below
    rss: int = 0  # bytes of all of them
    used: int = 0  # wired (macOS) or used memory of the machine
    physical: int = 0
    held_s: float = 0.0
    ended: int | None = None  # exit status, if it ended for good
    last_line: str = ""  # of the log; if it ended for good, why
    fault: str = ""  # the first known fault in the log since the start, its cause
    fault_line: str = ""
    remedy: str = ""
    log: str = ""
    health: Health | None = None  # of a server


def answer(value: object) -> None:
    """A line that ssh's other end finds among whatever login scripts print."""
    print(ANSWER + msgspec.json.encode(value).decode(), flush=True)


def status(place: Place) -> HostStatus:
    """The state of this host's part."""
    spec = place.read_spec()
    bare = HostStatus(
        host=socket.gethostname(),
        used=machine.wired_bytes(),
        physical=machine.physical_bytes(),
        held_s=place.held_s(),
    )
    if spec is None:
        return bare
    supervisor, child = place.named()
    everyone = identity.family([child] if child is not None else [])
    lines = [line for line in tail(log_file(spec)) if SUPERVISOR_SAYS not in line]
    fault = first_fault(lines)
    outcome = place.read_outcome()
    return replace(
        bare,
        role=spec.role,
        supervisor=None if supervisor is None else supervisor.pid,
        child=None if child is None else child.pid,
        children=max(0, len(everyone) - 1),
        rss=sum(_rss(process) for process in everyone),
        ended=None if outcome is None else outcome.status,
        last_line=last_words(lines) if outcome is not None else lines[-1] if lines else "",
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
    """The last lines of a log, without empty ones."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def last_words(lines: list[str]) -> str:
    """Why a process of ours ended: its error and the remedy in the line below, else the last it said."""
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if starts:
        return " ".join(line.strip() for line in lines[starts[-1] : starts[-1] + 2]).removeprefix("error: ")
    return lines[-1] if lines else "it said nothing"


def health(spec: Spec) -> Health:
    """What /health of this host's server says."""
    host, port = serve_address(spec.command)
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_S)
    try:
        connection.request("GET", "/health")
        body = msgspec.json.decode(connection.getresponse().read(), type=dict[str, Any])
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return Health(ok=False, phase="starting", reason=f"nothing answers at {host} port {port} yet")
    finally:
        connection.close()
    progress = body.get("progress") or {}
    return Health(
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
    """Where a `phalanx serve` command answers, from its own flags."""
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


def stop_here(request: StopRequest, place: Place) -> Stopped:
    """Stop, and look at memory before and after."""
    before = machine.wired_bytes()
    found, killed, left = stop(place, timeout_s=request.timeout_s, force=request.force)
    after = machine.wired_bytes()
    deadline = time.monotonic() + SETTLE_S
    while found and after >= before and time.monotonic() < deadline:
        time.sleep(0.2)
        after = machine.wired_bytes()
    return Stopped(found=found, killed=killed, left=left, before=before, after=after)


def watch(place: Place) -> None:
    """The status again and again, until stdin ends: whoever asked is gone."""
    while True:
        answer(status(place))
        readable, _, _ = select.select([sys.stdin], [], [], WATCH_S)
        if readable and not os.read(0, 1024):
            return


def run_verb(verb: str, place: Place | None = None) -> int:
    """One verb, its question on stdin.

    Raises:
        ConfigError: there is no such verb, or the question is not its.
        ClusterError: what the verb raises.
    """
    place = place or Place()
    simple: dict[str, Callable[[], object]] = {
        "start": lambda: _start(_question(Spec), place),
        "stop": lambda: stop_here(_question(StopRequest), place),
        "status": lambda: status(place),
        "spec": lambda: _spec(place),
        "check": lambda: examine(_question(Wanted), place),
        "facts": lambda: Examination(facts=gather(_question(Wanted)), results=[]),
        "net-setup": lambda: set_up(_question(Setup), Path.home()),
        "net-undo": lambda: undo(Path.home()),
        "reach": lambda: is_there(_question(Reach)),
        "measure": lambda: measure(_question(Probe)),
        "inventory": lambda: inventory(_question(Manifest)),
        "finish": lambda: finish(_question(Manifest)),
        "take": _take,
        "group-test": lambda: _group_test(_question(TestRequest).spec),
    }
    if verb in simple:
        answer(simple[verb]())
        return 0
    if verb == "watch":
        sys.stdin.buffer.readline()
        watch(place)
        return 0
    if verb == "listen":
        listening, thread = listener()
        answer(listening)
        thread.join()
        return 0
    if verb == "logs":
        return _logs(place)
    if verb == "supervise":
        return supervise(_question(Spec), place)
    raise ConfigError(f"phalanx host {verb!r}: there is no such verb.", remedy="It is not for use by hand.")


def _take() -> Taken:
    """A file: a line that says which, then its bytes."""
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=TakeRequest)
    return take(asked.place, asked.parcel, asked.have, sys.stdin.buffer)


def _logs(place: Place) -> int:
    """The end of the log, and what is added to it until stdin ends."""
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=LogRequest)
    log = log_file(_spec(place))
    with log.open("rb") as file:
        lines = file.read().decode(errors="replace").splitlines()
        answer(
            LogLines(
                lines=lines[len(lines) - asked.lines :] if asked.lines < len(lines) else lines, over=not asked.follow
            )
        )
        while asked.follow:
            if added := file.read():
                answer(LogLines(lines=added.decode(errors="replace").splitlines()))
            readable, _, _ = select.select([sys.stdin], [], [], WATCH_S)
            if readable and not os.read(0, 1024):
                break
    return 0


def _group_test(spec: Spec) -> GroupTest:
    """Run `phalanx selftest` with the server's hosts.

    Raises:
        ClusterError: it failed; with its own words.
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


Question = TypeVar("Question", bound=Struct)


def _question(kind: type[Question]) -> Question:
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"The question is not {kind.__name__}: {error}.",
            remedy="Install the same version of phalanx on all machines.",
        ) from error


def _spec(place: Place) -> Spec:
    spec = place.read_spec()
    if spec is None:
        raise ClusterError("Nothing was started here.", remedy="Use `phalanx up`.")
    return spec


def _start(spec: Spec, place: Place) -> Started:
    held = place.held_s()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost ssh does not leave a start half done
    pid = start(spec, place)
    return Started(pid=pid, waited_s=held)
