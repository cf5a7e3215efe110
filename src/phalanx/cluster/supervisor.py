"""The supervisor of a host: keeps one process running, in a session of its own that outlives shell and ssh (L3).

On the first host that process is the server, on the others the agent. The supervisor starts it again after a crash,
not after an error that a restart cannot mend, nor without end. The process writes its own log and does not need the
supervisor: it goes on if the supervisor is killed, and `stop` finds it by its PID file. Does not know ssh, or other
hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec
import psutil
from msgspec import Struct

from phalanx.cluster import identity
from phalanx.config import RUNTIME_VARIABLE, environment
from phalanx.errors import ClusterError, ExitCode

RESTARTS = 5  # within
WINDOW_S = 300.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
READY_S = 10.0  # for a supervisor to have written its PID file
KILL_HOLD_S = 30.0  # after a SIGKILL: RDMA devices stay busy for so long (F7, EBUSY)
SUPERVISOR_SAYS = " supervisor: "  # in lines of the log that are not the process's
LAST_S = 3.0  # after SIGKILL
PROGRAM = (sys.executable, "-m", "phalanx")


class Spec(Struct, frozen=True, kw_only=True):
    """What a supervisor keeps running."""

    role: str  # "server" or "agent"
    command: list[str]  # after `python -m phalanx`
    variables: dict[str, str]
    log: str  # file, relative to the home directory unless absolute
    files: dict[str, str] = {}  # name in the run directory -> text


class Outcome(Struct, frozen=True, kw_only=True):
    """How a supervised process ended for good."""

    status: int
    at: float  # seconds since the epoch
    restarts: int


class Started(Struct, frozen=True, kw_only=True):
    """A supervisor runs."""

    pid: int
    waited_s: float  # for a hold after a SIGKILL


class Stopped(Struct, frozen=True, kw_only=True):
    """What `stop` found and did. Bytes of wired memory (macOS) or used memory (Linux), before and after."""

    found: list[str] = []
    killed: list[str] = []
    left: list[str] = []
    before: int = 0
    after: int = 0


class Place:
    """Where a host keeps what it knows about its part of a cluster: `~/.phalanx/run`."""

    def __init__(self, home: Path | None = None) -> None:
        self.run = (home or Path.home()) / ".phalanx" / "run"
        self.supervisor = self.run / "supervisor.pid"
        self.child = self.run / "child.pid"
        self.spec = self.run / "spec.json"
        self.outcome = self.run / "outcome.json"
        self.hold = self.run / "hold"
        self.scratch = self.run / "tmp"
        """Sockets and PID files of what runs, which it leaves behind when it is killed."""

    def held_s(self) -> float:
        """Seconds until something may be started here again after a SIGKILL."""
        try:
            return max(0.0, float(self.hold.read_text()) - time.time())
        except (OSError, ValueError):
            return 0.0

    def named(self) -> tuple[psutil.Process | None, psutil.Process | None]:
        """The supervisor and its process, as the PID files name them."""
        return identity.find(identity.read(self.supervisor)), identity.find(identity.read(self.child))

    def running(self) -> list[psutil.Process]:
        """The supervisor and its process, as far as they are there."""
        return [process for process in self.named() if process is not None]

    def read_spec(self) -> Spec | None:
        try:
            return msgspec.json.decode(self.spec.read_bytes(), type=Spec)
        except (OSError, msgspec.DecodeError):
            return None

    def read_outcome(self) -> Outcome | None:
        try:
            return msgspec.json.decode(self.outcome.read_bytes(), type=Outcome)
        except (OSError, msgspec.DecodeError):
            return None

    def clear(self) -> None:
        """Forget everything but a hold; the directories go when they are empty."""
        if self.run.is_dir():
            for file in self.run.iterdir():
                if file.is_file() and (file != self.hold or self.held_s() == 0.0):
                    file.unlink(missing_ok=True)
        for folder in (self.run / "agent", self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.run, self.run.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()


def start(spec: Spec, place: Place) -> int:
    """Start a supervisor in the background; its process id once it has taken over.

    Raises:
        ClusterError: something is running already, or the supervisor ended at once.
    """
    if running := place.running():
        raise ClusterError(
            f"Something is running here already: {describe(running[0])}.",
            remedy="`phalanx status` shows it, `phalanx down` ends it, `phalanx restart` does both.",
        )
    while held := place.held_s():
        time.sleep(min(held, 1.0))
    place.clear()
    place.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = _open_log(spec)
    for name, text in spec.files.items():
        (place.run / name).write_text(text)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*PROGRAM, "host", "supervise"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=Path.home(),
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec))
    process.stdin.close()
    deadline = time.monotonic() + READY_S
    while identity.read(place.supervisor) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise ClusterError(f"The supervisor did not start: {last[0]}", remedy=f"See {log} on this host.")
        time.sleep(0.02)
    return process.pid


def log_file(spec: Spec) -> Path:
    """The log on this host."""
    return Path.home() / spec.log


def _open_log(spec: Spec) -> Path:
    """A fresh log; the one before is kept beside it."""
    log = log_file(spec)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(log.name + ".1"))
    log.touch(mode=0o600)
    return log


def describe(process: psutil.Process) -> str:
    """A process in a message."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        at = words.index("phalanx") if "phalanx" in words else 0
        return f"{' '.join(words[at : at + 3])} (pid {process.pid})"
    return f"pid {process.pid}"


def stop(place: Place, *, timeout_s: float, force: bool) -> tuple[list[str], list[str], list[str]]:
    """End what runs here: SIGTERM, and SIGKILL after the time-out to what is left of it.

    Args:
        force: also end processes of groups that no PID file names.

    Returns:
        Descriptions of what was there, what had to be killed, and what is there still.
    """
    roots = place.running()
    strays = [process for process in identity.strays() if process not in roots] if force else []
    everyone = identity.family([*roots, *strays])
    found = [describe(process) for process in [*roots, *strays]]
    identity.send([*roots[:1], *strays], signal.SIGTERM)  # the supervisor passes it on
    remaining = identity.left(everyone, timeout_s)
    killed = [describe(process) for process in remaining]
    if remaining:
        identity.send(remaining, signal.SIGKILL)
        remaining = identity.left(remaining, LAST_S)
        place.run.mkdir(parents=True, exist_ok=True)
        place.hold.write_text(str(time.time() + KILL_HOLD_S))
    if not remaining:
        place.clear()
    return found, killed, [describe(process) for process in remaining]


# The supervisor's own process ------------------------------------------------------------------------------------


class _Supervisor:
    def __init__(self, spec: Spec, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._child: subprocess.Popen[bytes] | None = None
        self._leaving = False
        self._crashes: list[float] = []

    def run(self) -> int:
        """Keep the process running; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        self._place.spec.touch(mode=0o600)
        self._place.spec.write_bytes(msgspec.json.encode(self._spec))
        identity.write(self._place.supervisor, identity.record(os.getpid()))
        while not self._leaving:
            status = self._run_once()
            if self._leaving:
                break
            if not self._restart_helps(status):
                outcome = Outcome(status=status, at=time.time(), restarts=len(self._crashes))
                self._place.outcome.write_bytes(msgspec.json.encode(outcome))
                for file in (self._place.child, self._place.supervisor):
                    file.unlink(missing_ok=True)
                return status
            self._pause()
        self._place.clear()
        return ExitCode.OK

    def _run_once(self) -> int:
        shutil.rmtree(self._place.scratch, ignore_errors=True)
        self._place.scratch.mkdir(mode=0o700)
        self._child = subprocess.Popen(
            [*PROGRAM, *self._spec.command],
            stdin=subprocess.DEVNULL,
            env={**environment(), **self._spec.variables, RUNTIME_VARIABLE: str(self._place.scratch)},
            process_group=0,
        )
        if self._leaving:  # the signal came while it was being started
            self._child.terminate()
        with contextlib.suppress(psutil.Error):
            identity.write(self._place.child, self._started())
        status = self._child.wait()
        _say(f"{self._spec.role} (pid {self._child.pid}) ended with status {status}")
        return status

    def _started(self) -> identity.Record:
        """The child, once it is itself: between fork and exec it has its parent's command line."""
        assert self._child is not None
        mine = psutil.Process().cmdline()
        while (found := identity.record(self._child.pid)).command in ([], mine) and self._child.poll() is None:
            time.sleep(0.005)
        return found

    def _restart_helps(self, status: int) -> bool:
        now = time.monotonic()
        self._crashes = [at for at in self._crashes if now - at <= WINDOW_S] + [now]
        final = (ExitCode.OK, ExitCode.USAGE, ExitCode.CONFIG, ExitCode.MEMORY)
        return status not in final and len(self._crashes) <= RESTARTS

    def _pause(self) -> None:
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(self._crashes) - 1))
        _say(f"starting it again in {pause:g} s")
        deadline = time.monotonic() + pause
        while not self._leaving and time.monotonic() < deadline:
            time.sleep(0.05)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._leaving = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


def supervise(spec: Spec, place: Place) -> int:
    """Be the supervisor: returns when its process has ended for good, or after SIGTERM."""
    return _Supervisor(spec, place).run()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}{SUPERVISOR_SAYS}{text}", file=sys.stderr, flush=True)
