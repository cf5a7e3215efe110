"""Which processes are ours: a process id with its start time and its command, since ids are used again.

Nothing is ever signalled that does not match all three. Does not know why a process should end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

SAME_S = 0.005  # Linux counts in hundredths of a second
POLL_S = 0.05
VERBS = ("rank", "agent", "serve", "host")
"""What processes of a group are called: `... -m phalanx VERB ...`, or `.../phalanx VERB ...`."""


class Record(Struct, frozen=True):
    """A process as it was started."""

    pid: int
    created: float  # seconds: since boot on Linux, so that setting the clock changes nothing; since the epoch elsewhere
    command: list[str]


def record(pid: int) -> Record:
    """The process as it is now; psutil.NoSuchProcess if it is gone."""
    process = psutil.Process(pid)
    return Record(pid, _created(process), process.cmdline())


def _created(process: psutil.Process) -> float:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float(process.create_time())
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")  # `starttime`; see proc(5), where it is number 22


def find(known: Record | None) -> psutil.Process | None:
    """The process of a record if it is still the same and alive."""
    if known is None:
        return None
    try:
        process = psutil.Process(known.pid)
        same = abs(_created(process) - known.created) <= SAME_S and process.cmdline() == known.command
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def read(file: Path) -> Record | None:
    """A record from a PID file; None if there is none or it is unreadable (a crash while it was written)."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def write(file: Path, known: Record) -> None:
    """A PID file, whole or not at all."""
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(known))
    fresh.replace(file)


def strays() -> list[psutil.Process]:
    """Processes of this user that belong to a group, whoever started them; not this one, nor those above it."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in own and process.uids().real == os.getuid() and is_group_member(process.cmdline()):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def is_group_member(command: list[str]) -> bool:
    """Whether a command line is a rank, an agent, a server or a supervisor of ours."""
    for index, word in enumerate(command[:-1]):
        module = word == "phalanx" and index > 0 and command[index - 1] == "-m"
        script = Path(word).name == "phalanx" and (index == 0 or (index == 1 and _is_python(command[0])))
        if module or script:
            verb = command[index + 1]
            return verb in VERBS and (verb != "host" or "supervise" in command[index + 2 :])
    return False


def _is_python(word: str) -> bool:
    return Path(word).name.lower().startswith("python")


def family(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Processes and all those below them, each once."""
    found: dict[int, psutil.Process] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal processes that are still the ones they were (psutil compares start times)."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def left(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all are gone, or for so many seconds; those that are not."""
    deadline = time.monotonic() + timeout_s
    remaining = [process for process in processes if _there(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(POLL_S)
        remaining = [process for process in remaining if _there(process)]
    return remaining


def _there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
