"""Identifies phalanx's processes by id, start time, program and arguments, since the system uses process ids again.

A process is signalled only if it matches all four.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
from msgspec import Meta, Struct

from phalanx.cluster.replica_layout import REPLICAS_FILE

SAME_S = 0.005  # largest difference of equal start times; Linux counts in hundredths of a second
POLL_S = 0.05  # between two looks at processes that are ending
VERBS = ("rank", "agent", "serve", "host", "gateway")
"""The commands of a group's processes: `... -m phalanx VERB ...`, or `.../phalanx VERB ...`."""
FRAMEWORK = re.compile(r".*/Python3?\.framework/Versions/[^/]+(?=/)")


class ProcessRecord(Struct, frozen=True):
    """A process, as a PID file records it."""

    pid: Annotated[int, Meta(ge=1)]
    created: float  # start time in seconds: on Linux since boot (independent of the clock), elsewhere since the epoch
    program: str  # as `program_of` names it
    arguments: list[str]  # the command without its first word, which is what the process calls itself


def record(pid: int) -> ProcessRecord:
    """The record of a running process.

    Raises:
        psutil.Error: it is gone, or cannot be looked at.
    """
    return _record(psutil.Process(pid))


def _record(process: psutil.Process) -> ProcessRecord:
    return ProcessRecord(process.pid, _created(process), program_of(process.exe()), process.cmdline()[1:])


def program_of(executable: str) -> str:
    """The name of a program that stays the same when it executes itself again.

    A Python of a macOS framework does: its `bin/python3.12` becomes `Resources/Python.app/Contents/MacOS/Python` of the
    same framework, under another first word. Process id and start time stay.
    """
    framework = FRAMEWORK.match(executable)
    return executable if framework is None else framework[0]


def _created(process: psutil.Process) -> float:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float(process.create_time())
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")  # `starttime`, number 22 in proc(5)


def find(known: ProcessRecord | None) -> psutil.Process | None:
    """The process of a record; None if it ended, or if its id belongs to another process now."""
    if known is None:
        return None
    try:
        process = psutil.Process(known.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        found = _record(process)
    except psutil.Error:
        return None
    same = abs(found.created - known.created) <= SAME_S and found.program == known.program
    return process if same and found.arguments == known.arguments else None


def read(file: Path) -> ProcessRecord | None:
    """The record in a PID file; None if the file does not exist or cannot be decoded."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProcessRecord)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def write(file: Path, known: ProcessRecord) -> None:
    """Write a PID file atomically."""
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(known))
    fresh.replace(file)


def strays() -> list[psutil.Process]:
    """All processes of this user that belong to a group, except this process and its parents."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in own and process.uids().real == os.getuid() and is_group_member(process.cmdline()):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def is_group_member(command: list[str]) -> bool:
    """Whether a command line is that of a phalanx rank, agent, server or supervisor, or of a gateway of `up`."""
    verb, *words = words_of(command) or [""]
    needed = {"host": "supervise", "gateway": REPLICAS_FILE}.get(verb)  # other gateways are the user's own
    return verb in VERBS and (needed is None or needed in words)


def words_of(command: list[str]) -> list[str]:
    """The words of a `phalanx` command in a process's command line, from its verb on; none in that of another."""
    for index, word in enumerate(command[:-1]):
        module = word == "phalanx" and index > 0 and command[index - 1] == "-m"
        script = Path(word).name == "phalanx" and (index == 0 or (index == 1 and _is_python(command[0])))
        if module or script:
            return command[index + 1 :]
    return []


def _is_python(word: str) -> bool:
    return Path(word).name.lower().startswith("python")


def family(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes and all their descendants, each once."""
    found: dict[int, psutil.Process] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def listens(process: psutil.Process, port: int) -> bool:
    """Whether this process itself listens on a TCP port, and not another one, perhaps of another user."""
    with contextlib.suppress(psutil.Error):
        found = process.net_connections("tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)
    return False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal processes. psutil compares start times, so a reused id is not signalled."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all processes ended, at most `timeout_s` seconds. Returns those that did not."""
    deadline = time.monotonic() + timeout_s
    remaining = [process for process in processes if _is_alive(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(POLL_S)
        remaining = [process for process in remaining if _is_alive(process)]
    return remaining


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
