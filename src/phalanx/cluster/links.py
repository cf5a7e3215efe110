"""A host's part in network set-up and in measuring links: runs plans, remembers how to undo them, answers probes.

Does not decide what is set up (`network.py` does), nor between which hosts is measured.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.checks import reach
from phalanx.cluster.network import Steps, refuse
from phalanx.errors import ClusterError

MEMORY = "net.json"  # in ~/.phalanx
COMMAND_S = 30.0
ROUNDS = 200  # small messages for the latency
SMALL = 64  # bytes
LARGE = 1 << 20
BULK = 64 << 20  # bytes for the bandwidth
PROBE_S = 20.0


class Done(Struct, frozen=True, kw_only=True):
    """What was run, in order, with what it printed."""

    ran: list[str]
    matrix: str = ""  # the file, if one was written


class Setup(Struct, frozen=True, kw_only=True):
    """A plan to carry out."""

    steps: Steps
    matrix: list[list[str | None]]


class Reach(Struct, frozen=True, kw_only=True):
    """Is somebody there?"""

    address: str
    port: int


class Reached(Struct, frozen=True, kw_only=True):
    """The errno of the attempt, 0 if somebody is; a refused connection counts as somebody."""

    problem: int


class Listening(Struct, frozen=True, kw_only=True):
    """A port that answers probes for a while."""

    port: int


class Probe(Struct, frozen=True, kw_only=True):
    """Measure towards this."""

    address: str
    port: int


class Measured(Struct, frozen=True, kw_only=True):
    """Of one TCP connection."""

    median_us: float  # there and back, 64 bytes
    p99_us: float
    gbit_per_s: float


def set_up(asked: Setup, home: Path) -> Done:
    """Carry out a plan. What earlier ones did is remembered as well, so that `undo` leads back to the beginning.

    Raises:
        ClusterError: a command failed: it, and what it said. What was done so far can be undone.
        ConfigError: a command must never be run.
    """
    memory = home / ".phalanx" / MEMORY
    memory.parent.mkdir(exist_ok=True)
    memory.write_bytes(msgspec.json.encode(_together(asked.steps, _remembered(memory))))
    for path, text in asked.steps.files.items():
        _write(Path(path), text)
    ran = [_run(command) for command in (*asked.steps.commands, *asked.steps.after)]
    file = home / ".phalanx" / "devices.json"
    if any(device is not None for row in asked.matrix for device in row):
        file.write_bytes(msgspec.json.encode(asked.matrix))
    return Done(ran=ran, matrix=str(file))


def undo(home: Path) -> Done:
    """Take back what the last `set_up` did.

    Raises:
        ClusterError: nothing is known to be undone, or a command failed.
    """
    memory = home / ".phalanx" / MEMORY
    steps = _remembered(memory)
    if steps is None:
        raise ClusterError("No network set-up is known here.", remedy="`phalanx net setup` remembers what it did.")
    for path in steps.files:
        _remove(Path(path))
    ran = [_run(command) for command in (*steps.undo_after, *steps.undo)]
    for file in (memory, home / ".phalanx" / "devices.json"):
        file.unlink(missing_ok=True)
    return Done(ran=ran)


def _remembered(memory: Path) -> Steps | None:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=Steps)
    except (OSError, msgspec.DecodeError):
        return None


def _together(new: Steps, old: Steps | None) -> Steps:
    """A plan whose undo also takes back the plan before it."""
    if old is None:
        return new
    return replace(
        new,
        undo=[*new.undo, *(command for command in old.undo if command not in new.undo)],
        files=old.files | new.files,
        undo_after=new.undo_after or old.undo_after,
    )


def _run(command: list[str]) -> str:
    refuse(command)
    words = command if os.geteuid() == 0 else ["sudo", "-n", *command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"`{' '.join(words)}` could not be run: {error}.") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise ClusterError(
            f"`{' '.join(words)}` ended with status {done.returncode}: {said[0]}",
            remedy="Allow it in /etc/sudoers (NOPASSWD), or run it by hand." if words[0] == "sudo" else "",
        )
    return " ".join(words)


def _write(path: Path, text: str) -> None:
    if os.geteuid() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    else:
        _pipe(["sudo", "-n", "tee", str(path)], text)


def _remove(path: Path) -> None:
    if os.geteuid() == 0:
        path.unlink(missing_ok=True)
    else:
        _pipe(["sudo", "-n", "rm", "-f", str(path)], "")


def _pipe(command: list[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}", remedy="It needs sudo rights.")


def is_there(asked: Reach) -> Reached:
    """Whether an address answers."""
    return Reached(problem=reach(asked.address, asked.port) or 0)


# Measuring -------------------------------------------------------------------------------------------------------


def listener() -> tuple[Listening, threading.Thread]:
    """A port that answers one probe; the thread ends with it, or after `PROBE_S`."""
    server = socket.create_server(("", 0))
    server.settimeout(PROBE_S)
    thread = threading.Thread(target=_answer, args=(server,), daemon=True)
    thread.start()
    return Listening(port=server.getsockname()[1]), thread


def _answer(server: socket.socket) -> None:
    with server:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUNDS):
                connection.sendall(_exactly(connection, SMALL))
            received = 0
            while received < BULK:
                received += len(_exactly(connection, LARGE))
            connection.sendall(b"." * SMALL)


def measure(asked: Probe) -> Measured:
    """Latency and bandwidth of one connection.

    Raises:
        ClusterError: it broke.
    """
    try:
        with socket.create_connection((asked.address, asked.port), timeout=PROBE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                connection.sendall(b"." * SMALL)
                _exactly(connection, SMALL)
                times.append((time.perf_counter() - begun) * 1e6)
            block = bytes(LARGE)
            begun = time.perf_counter()
            for _ in range(BULK // LARGE):
                connection.sendall(block)
            _exactly(connection, SMALL)
            seconds = time.perf_counter() - begun
    except OSError as error:
        raise ClusterError(
            f"The connection to {asked.address} broke: {error.strerror or error}.",
            remedy="Check the cable and the firewall between them.",
        ) from error
    return Measured(
        median_us=statistics.median(times),
        p99_us=statistics.quantiles(times, n=100)[98],
        gbit_per_s=BULK * 8 / seconds / 1e9,
    )


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        piece = connection.recv(count - len(parts))
        if not piece:
            raise ConnectionResetError(0, "closed by the other end")
        parts += piece
    return bytes(parts)
