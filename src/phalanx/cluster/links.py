"""A host's side of network set-up and link measurements: runs plans, records how to undo them, answers probes.

`network.py` makes the plans, `network_setup.py` chooses the hosts to measure.
"""

from __future__ import annotations

import os
import secrets
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

UNDO_FILE = "net.json"  # in ~/.phalanx: the plan that was carried out
COMMAND_S = 30.0  # for a command of the system; `launchctl` may take some seconds
ROUNDS = 200  # small messages for the latency
SMALL = 64  # bytes
LARGE = 1 << 20  # bytes sent at a time
BULK = 64 << 20  # bytes for the bandwidth
PROBE_S = 20.0  # for a measurement: 64 MiB at 30 Mbit/s
TOKEN_S = 1.0  # for a connection to say that it is the measurement


class Done(Struct, frozen=True, kw_only=True):
    """A plan was carried out or undone."""

    ran: list[str]  # commands, in order
    matrix: str = ""  # path of the device matrix file


class SetupRequest(Struct, frozen=True, kw_only=True):
    """Carry out a plan."""

    steps: Steps
    matrix: list[list[str | None]]  # RDMA devices; see `network.matrix`


class ReachRequest(Struct, frozen=True, kw_only=True):
    """Test whether an address answers."""

    address: str
    port: int


class ReachResult(Struct, frozen=True, kw_only=True):
    """The errno of the attempt; 0 if the address answers, even by refusing the connection."""

    problem: int


class ListenRequest(Struct, frozen=True, kw_only=True):
    """Answer one measurement on this address of the host."""

    address: str
    token: str
    """The measurement begins with these bytes; other connections are closed."""


class Listening(Struct, frozen=True, kw_only=True):
    """A port that answers one measurement."""

    port: int


class MeasureRequest(Struct, frozen=True, kw_only=True):
    """Measure the link to this address."""

    address: str
    port: int
    token: str


class LinkSpeed(Struct, frozen=True, kw_only=True):
    """Latency and bandwidth of one TCP connection."""

    median_us: float  # round trip of 64 bytes
    p99_us: float
    gbit_per_s: float


def set_up(request: SetupRequest, home: Path) -> Done:
    """Carry out a plan. First records it, merged with earlier ones, so that `undo` reverts all of them.

    Raises:
        ClusterError: a command failed; has the command and its output. The commands before it can be undone.
        ConfigError: a command is one that must never be run.
    """
    undo_file = home / ".phalanx" / UNDO_FILE
    undo_file.parent.mkdir(exist_ok=True)
    undo_file.write_bytes(msgspec.json.encode(_merge(request.steps, _read_memory(undo_file))))
    for path, text in request.steps.files.items():
        _write(Path(path), text)
    ran = [_run(command) for command in (*request.steps.commands, *request.steps.after)]
    file = home / ".phalanx" / "devices.json"
    if any(device is not None for row in request.matrix for device in row):
        file.write_bytes(msgspec.json.encode(request.matrix))
    return Done(ran=ran, matrix=str(file))


def undo(home: Path) -> Done:
    """Undo every `set_up` since the last `undo`.

    Raises:
        ClusterError: no set-up is recorded, or a command failed.
    """
    undo_file = home / ".phalanx" / UNDO_FILE
    steps = _read_memory(undo_file)
    if steps is None:
        raise ClusterError("No network set-up is known here.", remedy="`phalanx net setup` remembers what it did.")
    for path in steps.files:
        _remove(Path(path))
    ran = [_run(command) for command in (*steps.undo_after, *steps.undo)]
    for file in (undo_file, home / ".phalanx" / "devices.json"):
        file.unlink(missing_ok=True)
    return Done(ran=ran)


def _read_memory(undo_file: Path) -> Steps | None:
    try:
        return msgspec.json.decode(undo_file.read_bytes(), type=Steps)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def _merge(new: Steps, old: Steps | None) -> Steps:
    """The new plan, with undo commands that also revert the old one."""
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
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise ClusterError(
            f"`{' '.join(words)}` ended with status {done.returncode}: {last[0]}",
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


def is_there(request: ReachRequest) -> ReachResult:
    """Test whether an address answers."""
    return ReachResult(problem=reach(request.address, request.port) or 0)


# Measuring -------------------------------------------------------------------------------------------------------


def listener(request: ListenRequest) -> tuple[Listening, threading.Thread]:
    """Open a port that answers one measurement. The thread ends after it, or after `PROBE_S`.

    Raises:
        ClusterError: the address is not this host's.
    """
    family = socket.AF_INET6 if ":" in request.address else socket.AF_INET
    try:
        server = socket.create_server((request.address, 0), family=family)
    except OSError as error:
        raise ClusterError(
            f"{request.address} is not an address of this host: {error.strerror or error}.",
            remedy="Correct `ips` in the hostfile.",
        ) from error
    thread = threading.Thread(target=_answer, args=(server, request.token.encode()), daemon=True)
    thread.start()
    return Listening(port=server.getsockname()[1]), thread


def _answer(server: socket.socket, token: bytes) -> None:
    """Answer the first connection that begins with the token."""
    deadline = time.monotonic() + PROBE_S
    with server:
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                return
            with connection:
                connection.settimeout(TOKEN_S)
                try:
                    is_expected = secrets.compare_digest(_exactly(connection, len(token)), token)
                except OSError:
                    continue
                if is_expected:
                    _echo(connection)
                    return


def _echo(connection: socket.socket) -> None:
    connection.settimeout(PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(ROUNDS):
        connection.sendall(_exactly(connection, SMALL))
    received = 0
    while received < BULK:
        received += len(_exactly(connection, LARGE))
    connection.sendall(b"." * SMALL)


def measure(request: MeasureRequest) -> LinkSpeed:
    """Measure latency and bandwidth of one connection.

    Raises:
        ClusterError: the connection broke.
    """
    try:
        with socket.create_connection((request.address, request.port), timeout=PROBE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request.token.encode())
            times = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                connection.sendall(b"." * SMALL)
                _exactly(connection, SMALL)
                times.append((time.perf_counter() - started) * 1e6)
            block = bytes(LARGE)
            started = time.perf_counter()
            for _ in range(BULK // LARGE):
                connection.sendall(block)
            _exactly(connection, SMALL)
            seconds = time.perf_counter() - started
    except OSError as error:
        raise ClusterError(
            f"The connection to {request.address} broke: {error.strerror or error}.",
            remedy="Check the cable and the firewall between them.",
        ) from error
    return LinkSpeed(
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
