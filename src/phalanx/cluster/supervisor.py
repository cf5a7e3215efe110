"""A supervisor: keeps one process running, in a session of its own that outlives shell and ssh.

On a group's first host that process is the server, on the others the agent; a gateway has a supervisor of its own. The
supervisor starts its process again after a crash, but not after an error that a restart cannot fix. The process writes
its own log and does not depend on the supervisor: it continues if the supervisor is killed, and `stop` finds it by its
PID file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import psutil
from msgspec import Meta, Struct
from msgspec.structs import replace

from phalanx.cluster import identity
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.config import CREDENTIALS_FILE, RUN_PHALANX
from phalanx.environment import RUNTIME_VARIABLE, environment
from phalanx.errors import ClusterError, ExitCode
from phalanx.log_limits import rotate
from phalanx.private_files import write_private
from phalanx.tls.host_credentials import Credentials, write_credentials

SHORT_S = 60.0  # a process that ended within it counts as a start that failed; the pauses grow with those
FIRST_PAUSE_S = 0.5  # doubled for each start that failed
LONGEST_PAUSE_S = 30.0  # a person who has mended the cause waits no longer
READY_S = 10.0  # until a new supervisor must have written its PID file
KILL_HOLD_S = 30.0  # nothing is started for so long after a SIGKILL: RDMA devices stay busy (F7, EBUSY)
SUPERVISOR_SAYS = " supervisor: "  # marks the supervisor's own lines in the log
LOG_CHECK_S = 10.0  # between two looks at the size of the log
LAST_S = 3.0  # longest wait after SIGKILL
FINAL = tuple(code for code in ExitCode if not code.restart_helps)
GATEWAY = "gateway"  # a role, and the name of its run directory
PROGRAM = (sys.executable, *RUN_PHALANX)


class Spec(Struct, frozen=True, kw_only=True):
    """The process that a supervisor keeps running."""

    role: str  # "server", "agent" or "gateway"
    command: list[str]  # after `python -m phalanx`
    variables: dict[str, str]
    log: str  # file, relative to the home directory unless absolute
    files: dict[str, str] = {}  # name in the run directory -> text
    credentials: Credentials | None = None  # written to `CREDENTIALS_FILE`, and to no other file
    layout: ReplicaLayout | None = None  # of a cluster of several replicas


class ProcessOutcome(Struct, frozen=True, kw_only=True):
    """Final end of a supervised process: it is not started again."""

    status: int
    at: float  # seconds since the epoch
    restarts: int


class LogPlace(Struct, frozen=True, kw_only=True):
    """Log of the server, agent or gateway started last. Stays when the rest is deleted."""

    role: str
    log: str  # as in `Spec`


class SupervisorStarted(Struct, frozen=True, kw_only=True):
    """A supervisor was started."""

    pid: int


Names = Annotated[list[str], Meta(max_length=1000)]
"""Of processes; a group has some dozens on a host."""


class Stopped(Struct, frozen=True, kw_only=True):
    """The report of `stop`: processes found, killed and left; bytes of wired (macOS) or used (Linux) memory."""

    found: Names = []
    killed: Names = []
    left: Names = []
    before: int = 0
    after: int = 0


class RunDirectory:
    """The directory with the state of a host's part of a cluster: `~/.phalanx/run`, for a gateway another one."""

    def __init__(self, home: Path | None = None, name: str = "run") -> None:
        self._home = home
        self.run = (home or Path.home()) / ".phalanx" / name
        self.supervisor = self.run / "supervisor.pid"
        self.child = self.run / "child.pid"
        self.spec = self.run / "spec.json"
        self.outcome = self.run / "outcome.json"
        self.hold = self.run / "hold"
        self.last_log = (home or Path.home()) / ".phalanx" / "logs" / f"{name}.json"
        self.scratch = self.run / "tmp"
        """For sockets and PID files of the running process, which remain if it is killed."""

    @property
    def gateway(self) -> RunDirectory:
        """That of a gateway, which may run on this host beside a server or an agent."""
        return RunDirectory(self._home, GATEWAY)

    def held_s(self) -> float:
        """Seconds until something may be started again after a SIGKILL; not more if the clock was set back since."""
        try:
            return min(KILL_HOLD_S, max(0.0, float(self.hold.read_text()) - time.time()))
        except (OSError, ValueError):
            return 0.0

    def named(self) -> tuple[psutil.Process | None, psutil.Process | None]:
        """The supervisor and its process, by their PID files; None for each one that does not run."""
        return identity.find(identity.read(self.supervisor)), identity.find(identity.read(self.child))

    def running(self) -> list[psutil.Process]:
        """Those of the supervisor and its process that run."""
        return [process for process in self.named() if process is not None]

    def read_spec(self) -> Spec | None:
        """The last specification started here; None if there is none, or its file cannot be read."""
        try:
            return msgspec.json.decode(self.spec.read_bytes(), type=Spec)
        except (OSError, msgspec.DecodeError, RecursionError):
            return None

    def read_last_log(self) -> LogPlace | None:
        """The log of the process started here last, also after its end."""
        try:
            return msgspec.json.decode(self.last_log.read_bytes(), type=LogPlace)
        except (OSError, msgspec.DecodeError, RecursionError):
            return None

    def read_outcome(self) -> ProcessOutcome | None:
        """The process's final end; None before it."""
        try:
            return msgspec.json.decode(self.outcome.read_bytes(), type=ProcessOutcome)
        except (OSError, msgspec.DecodeError, RecursionError):
            return None

    def clear(self) -> None:
        """Delete all files except an active hold, and then empty directories."""
        if self.run.is_dir():
            for file in self.run.iterdir():
                if file.is_file() and (file != self.hold or self.held_s() == 0.0):
                    file.unlink(missing_ok=True)
        for folder in (self.run / "agent", self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.run, self.run.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()


def start(spec: Spec, run_dir: RunDirectory) -> int:
    """Start a supervisor in the background. Returns its process id once it has written its PID file.

    Raises:
        ClusterError: something runs here already, or the supervisor ended at once.
    """
    if running := run_dir.running():
        raise ClusterError(
            f"Something is running here already: {describe(running[0])}.",
            remedy="`phalanx status` shows it, `phalanx down` ends it, `phalanx restart` does both.",
        )
    while held_s := run_dir.held_s():
        time.sleep(min(held_s, 1.0))
    run_dir.clear()
    run_dir.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_dir.run.chmod(0o700)  # where a hold was left, the directory was there
    log = _open_log(spec)
    run_dir.last_log.parent.mkdir(parents=True, exist_ok=True)
    run_dir.last_log.write_bytes(msgspec.json.encode(LogPlace(role=spec.role, log=spec.log)))
    if spec.layout is None and spec.role != GATEWAY:
        run_dir.gateway.last_log.unlink(missing_ok=True)  # of a cluster before this one
    for name, text in spec.files.items():
        write_private(run_dir.run / name, text.encode())
    if spec.credentials is not None:
        write_credentials(run_dir.run / CREDENTIALS_FILE, spec.credentials)
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
    with contextlib.suppress(BrokenPipeError):  # it ended already: why is in the log
        process.stdin.write(msgspec.json.encode(replace(spec, credentials=None)))  # `spec.json` keeps no key
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    deadline = time.monotonic() + READY_S
    while identity.read(run_dir.supervisor) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise ClusterError(f"The supervisor did not start: {last[0]}", remedy=f"See {log} on this host.")
        time.sleep(0.02)
    return process.pid


def log_file(spec: Spec | LogPlace) -> Path:
    """The path of the log on this host."""
    return Path.home() / spec.log


def _open_log(spec: Spec) -> Path:
    """Create an empty log; the previous one is kept as NAME.1."""
    log = log_file(spec)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(log.name + ".1"))
    log.touch(mode=0o600)
    return log


def describe(process: psutil.Process) -> str:
    """Command and id of a process, for messages."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        index = words.index("phalanx") if "phalanx" in words else 0
        return f"{' '.join(words[index : index + 3])} (pid {process.pid})"
    return f"pid {process.pid}"


def stop(*run_dirs: RunDirectory, timeout_s: float, force: bool) -> tuple[list[str], list[str], list[str]]:
    """End the processes of these directories: SIGTERM, and SIGKILL for those that remain after `timeout_s` seconds.

    Args:
        force: also end processes of groups that no PID file names.

    Returns:
        Descriptions of the processes that were found, that were killed, and that still run.
    """
    running = [found for run_dir in run_dirs if (found := run_dir.running())]
    roots = [process for found in running for process in found]
    strays = [process for process in identity.strays() if process not in roots] if force else []
    processes = identity.family([*roots, *strays])
    named = [describe(process) for process in [*roots, *strays]]
    identity.send([*(found[0] for found in running), *strays], signal.SIGTERM)  # a supervisor passes it on
    remaining = identity.wait_gone(processes, timeout_s)
    killed = [describe(process) for process in remaining]
    if remaining:
        identity.send(remaining, signal.SIGKILL)
        remaining = identity.wait_gone(remaining, LAST_S)
        run_dirs[0].run.mkdir(parents=True, exist_ok=True)
        run_dirs[0].hold.write_text(str(time.time() + KILL_HOLD_S))
    if not remaining:
        for run_dir in run_dirs:
            run_dir.clear()
    return named, killed, [describe(process) for process in remaining]


# The supervisor's own process ------------------------------------------------------------------------------------


class _Supervisor:
    def __init__(self, spec: Spec, run_dir: RunDirectory) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._child: subprocess.Popen[bytes] | None = None
        self._terminating = False
        self._restarts = 0
        self._failed = 0  # starts in succession
        self._log = threading.Thread(target=self._keep_log_small, name="log", daemon=True)

    def run(self) -> int:
        """Keep the process running until it ends for good or SIGTERM arrives. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate)
        self._run_dir.spec.unlink(missing_ok=True)
        write_private(self._run_dir.spec, msgspec.json.encode(self._spec))
        identity.write(self._run_dir.supervisor, identity.record(os.getpid()))
        self._log.start()
        while not self._terminating:
            started = time.monotonic()
            status = self._try_once()
            if self._terminating:
                break
            if status in FINAL:
                outcome = ProcessOutcome(status=status, at=time.time(), restarts=self._restarts)
                self._run_dir.outcome.write_bytes(msgspec.json.encode(outcome))
                for file in (self._run_dir.child, self._run_dir.supervisor):
                    file.unlink(missing_ok=True)
                return status
            self._restarts += 1
            self._pause(time.monotonic() - started)
        self._run_dir.clear()
        return ExitCode.OK

    def _try_once(self) -> int:
        """Run the process; its exit status. A start that lacks a process, memory or disk counts as a crash."""
        try:
            return self._run_once()
        except OSError as error:
            _log(f"{self._spec.role} could not be started: {error.strerror or error}")
            if self._child is not None and self._child.poll() is None:  # its PID file could not be written
                self._child.kill()
                self._child.wait()
            return ExitCode.CRASH

    def _run_once(self) -> int:
        shutil.rmtree(self._run_dir.scratch, ignore_errors=True)
        self._run_dir.scratch.mkdir(mode=0o700)
        self._child = subprocess.Popen(
            [*PROGRAM, *self._spec.command],
            stdin=subprocess.DEVNULL,
            env={**environment(), **self._spec.variables, RUNTIME_VARIABLE: str(self._run_dir.scratch)},
            process_group=0,
        )
        if self._terminating:  # the signal arrived while the process was being started
            self._child.terminate()
        if (started := self._started()) is not None:
            identity.write(self._run_dir.child, started)
        status = self._child.wait()
        _log(f"{self._spec.role} (pid {self._child.pid}) ended with status {status}")
        return status

    def _started(self) -> identity.ProcessRecord | None:
        """The child's record, after exec: between fork and exec it has its parent's arguments. None if it ended."""
        assert self._child is not None
        mine = psutil.Process().cmdline()[1:]
        while self._child.poll() is None:
            with contextlib.suppress(psutil.Error):  # macOS may refuse to show a process that is executing
                child = identity.record(self._child.pid)
                if child.arguments not in ([], mine):
                    return child
            time.sleep(0.005)
        return None

    def _keep_log_small(self) -> None:
        while True:
            time.sleep(LOG_CHECK_S)
            if rotate(log_file(self._spec)):
                _log("the log had grown too large; its lines are in the file that ends in .1")

    def _pause(self, lived_s: float) -> None:
        """Wait before the next start; longer after several that failed in succession."""
        self._failed = self._failed + 1 if lived_s < SHORT_S else 0
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, self._failed - 1))
        _log(f"starting it again in {pause_s:g} s")
        deadline = time.monotonic() + pause_s
        while not self._terminating and time.monotonic() < deadline:
            time.sleep(0.05)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminating = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


def supervise(spec: Spec, run_dir: RunDirectory) -> int:
    """Run as the supervisor until its process ends for good, or until SIGTERM. Returns the exit code."""
    return _Supervisor(spec, run_dir).run()


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}{SUPERVISOR_SAYS}{text}", file=sys.stderr, flush=True)
