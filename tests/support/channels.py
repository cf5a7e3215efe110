"""Groups of ranks for tests of the control channel: threads, or small processes that a test can kill.

Threads meet on TCP ports of loopback and show certificates, as ranks of several machines. Processes meet on a Unix
socket, as ranks of one machine.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from phalanx.config import GroupConfig
from phalanx.dist import control_address
from phalanx.dist.channel import Identity, LeaderChannel, OnFailure, PeerFailure, WatchdogLimits, WorkerChannel
from phalanx.dist.frames import receive_frame
from phalanx.dist.peers import PROTOCOL, Admitted, Hello, Message, decode, encode
from phalanx.errors import ExitCode
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import Credentials, accepting, connecting

WAIT_S = 240.0  # for an event that must come; only a failing test waits so long
FAST = WatchdogLimits(
    hello_s=WAIT_S,
    admit_s=WAIT_S,
    silence_s=WAIT_S,
    loading_silence_s=WAIT_S,
    heartbeat_s=0.05,
    stall_grace_s=WAIT_S,
)
"""Frequent heartbeats. A busy machine delays them, so only tests of a limit shorten it."""


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread or process does."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def heard(channel: LeaderChannel | WorkerChannel) -> list[tuple[int, bool]]:
    """What a rank knows of each of its peers from heartbeats: its step, and whether it is inside."""
    return [(peer.heartbeat.step, peer.heartbeat.inside) for peer in channel._watchdog.peers]


def identity(rank: int, **changes: Any) -> Identity:
    me = Identity(
        rank=rank, pid=os.getpid(), host=f"host{rank}", version="1", mlx="1", mlx_lm="1", python="3", device="cpu"
    )
    return msgspec.structs.replace(me, **changes)


class Recorder:
    """An `on_failure` that records the failure and ends only the watchdog's thread."""

    def __init__(self) -> None:
        self._failures: queue.SimpleQueue[PeerFailure] = queue.SimpleQueue()

    def __call__(self, failure: PeerFailure) -> None:
        self._failures.put(failure)

    def failure(self) -> PeerFailure:
        return self._failures.get(timeout=WAIT_S)

    @property
    def quiet(self) -> bool:
        return self._failures.empty()


@cache
def credentials() -> list[Credentials]:
    """Of the ranks of the tests' groups."""
    return make_credentials([f"host{rank}" for rank in range(4)])


def listen(port: int = 0) -> tuple[socket.socket, str]:
    """A listener on loopback, and its address as a group's `control`."""
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


def meeting(control: str, size: int = 2, nonce: int = 7) -> GroupConfig:
    """A group that meets there."""
    return GroupConfig(size=size, backend="ring", nonce=nonce, control=control)


def connect(
    control: str,
    rank: int = 1,
    size: int = 2,
    *,
    shows: Credentials | None = None,
    nonce: int = 7,
    limits: WatchdogLimits = FAST,
    recorder: Recorder | None = None,
    **changes: Any,
) -> WorkerChannel:
    """A worker's channel. Its failure does not end the test's process.

    Args:
        shows: other credentials than those of the rank.
    """
    me = identity(rank, **{"host": f"host{rank}", **changes})
    own = None if control_address.is_unix(control) else shows or credentials()[rank]
    return WorkerChannel.connect(meeting(control, size, nonce), own, me, limits, recorder or Recorder())


class Group:
    """A leader and workers in threads of this process."""

    def __init__(self, size: int, limits: WatchdogLimits = FAST, control: str = "") -> None:
        self.recorders = [Recorder() for _ in range(size)]
        listener, address = (control_address.listen(control), control) if control else listen()
        own = None if control else credentials()[0]
        self.leader = LeaderChannel(listener, meeting(address, size), own, identity(0), limits, self.recorders[0])
        with ThreadPoolExecutor(size) as pool:
            joining = [
                pool.submit(connect, address, rank, size, limits=limits, recorder=self.recorders[rank])
                for rank in range(1, size)
            ]
            self.ranks = self.leader.gather()
            self.workers = [worker.result(WAIT_S) for worker in joining]
        for channel in self.channels:
            channel.serving()

    @property
    def channels(self) -> list[LeaderChannel | WorkerChannel]:
        return [self.leader, *self.workers]

    def close(self) -> None:
        for channel in self.channels:
            channel.close("the test is over")


@contextmanager
def group(size: int, limits: WatchdogLimits = FAST, control: str = "") -> Iterator[Group]:
    """A group over TLS; or in plain, on a Unix socket with the path `control`."""
    ranks = Group(size, limits, control)
    try:
        yield ranks
    finally:
        ranks.close()


class Gatherer:
    """A leader whose `gather` runs in a thread."""

    def __init__(self, size: int, limits: WatchdogLimits = FAST, *, port: int = 0, **changes: Any) -> None:
        listener, self.address = listen(port)
        self.recorder = Recorder()
        self.joined: list[WorkerChannel] = []
        group, me = meeting(self.address, size), identity(0, **changes)
        self.channel = LeaderChannel(listener, group, credentials()[0], me, limits, self.recorder)
        self._pool = ThreadPoolExecutor(1)
        self.gathered = self._pool.submit(self.channel.gather)

    @property
    def port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def close(self) -> None:
        if self.gathered.exception(WAIT_S) is None:
            self.channel.close("the test is over")
        for worker in self.joined:
            worker.close("the test is over")
        self._pool.shutdown()


class RawPeer:
    """A socket on which a test plays a rank, message by message."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(WAIT_S)

    @classmethod
    def to(cls, port: tuple[str, int], shows: Credentials) -> RawPeer:
        """A rank that connects to a leader and shows these credentials."""
        return cls(connecting(shows, peer=0).wrap_socket(socket.create_connection(port, timeout=WAIT_S)))

    @classmethod
    def of(cls, listener: socket.socket) -> RawPeer:
        """A leader, to which the first connection to `listener` leads."""
        accepted, _ = listener.accept()
        listener.close()
        return cls.serving(accepted, credentials()[0])

    @classmethod
    def serving(cls, accepted: socket.socket, shows: Credentials) -> RawPeer:
        """The end of an accepted connection that shows these credentials."""
        return cls(accepting(shows, peers=range(1, 4)).wrap_socket(accepted, server_side=True))

    def send(self, message: Message) -> None:
        self.socket.sendall(encode(message))

    def receive(self) -> Message | None:
        payload = receive_frame(self.socket)
        return None if payload is None else decode(payload)

    def lead(self) -> None:
        """Play the leader's part of the handshake, up to the worker's admission."""
        assert isinstance(self.receive(), Hello)
        self.send(Admitted())

    def join(self, rank: int, size: int = 2, **changes: Any) -> None:
        self.send(Hello(identity(rank, **changes), PROTOCOL, size, 7))
        assert isinstance(self.receive(), Admitted)

    def close(self) -> None:
        self.socket.close()


# Processes -------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """The environment of a process that imports this module."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}


def breaks(failure: PeerFailure) -> None:
    """An `on_failure` that raises."""
    raise ZeroDivisionError(str(failure))


def stop_in_turn(channel: Any) -> None:
    """Stop the process (SIGSTOP) between its watchdog's look at the clock and its next read."""
    watchdog = channel._watchdog
    read = watchdog._read

    def stop_first(peer: Any) -> None:
        watchdog._read = read
        os.kill(os.getpid(), signal.SIGSTOP)
        read(peer)

    watchdog._read = stop_first


def rank_main(
    rank: int, size: int, control: str, limits: dict[str, float], on_failure: OnFailure | None = None
) -> None:
    """A rank process: runs the commands of stdin, one per line (`enter 42 0.5`), and answers each on stdout.

    Args:
        control: path of the leader's Unix socket.
    """
    me = identity(rank)
    settings = msgspec.convert(limits, WatchdogLimits)
    channel: Any
    if rank == 0:
        listener = control_address.listen(control)
        channel = LeaderChannel(listener, meeting(control, size), None, me, settings, on_failure)
        channel.gather()
    else:
        channel = WorkerChannel.connect(meeting(control, size), None, me, settings, on_failure)
    channel.serving()
    verbs: dict[str, Callable[..., Any]] = {
        "enter": channel.enter,
        "leave": channel.leave,
        "close": lambda: channel.close("done"),
        "fail": lambda code, cause: channel.fail(ExitCode(code), cause.replace("_", " ")),
        "turns": lambda: channel.wakeups,
        "heard": lambda: heard(channel),
        "receive": lambda: channel.receive(),
        "broadcast": lambda text: channel.broadcast(text.encode()),
        "stop_in_turn": lambda: stop_in_turn(channel),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(verbs[verb](*map(json.loads, arguments)), flush=True)
        if verb == "close":
            return


class Processes:
    """Ranks as processes.

    Args:
        limits: of all ranks.
        own: limits of single ranks.
        callback: name of a function of this module, used as `on_failure`.
    """

    def __init__(
        self,
        size: int,
        limits: WatchdogLimits = FAST,
        own: dict[int, WatchdogLimits] | None = None,
        callback: str = "None",
    ) -> None:
        self._callback = callback
        self._pool = ThreadPoolExecutor(size)
        own = own or {}
        self._directory = tempfile.TemporaryDirectory()
        self.processes = [self._start(rank, size, own.get(rank, limits)) for rank in range(size)]
        for rank in range(size):
            assert self._line(rank) == "ready", self.end(rank)

    def _start(self, rank: int, size: int, limits: WatchdogLimits) -> subprocess.Popen[str]:
        control = f"{self._directory.name}/control"
        arguments = f"{rank}, {size}, {control!r}, {msgspec.to_builtins(limits)}, {self._callback}"
        return subprocess.Popen(
            [sys.executable, "-c", f"from support.channels import *; rank_main({arguments})"],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def _line(self, rank: int) -> str:
        stream = self.processes[rank].stdout
        assert stream is not None
        return self._pool.submit(stream.readline).result(WAIT_S).strip()

    def tell(self, rank: int, line: str) -> None:
        """Send a command whose answer may never arrive."""
        stream = self.processes[rank].stdin
        assert stream is not None
        stream.write(line + "\n")
        stream.flush()

    def ask(self, rank: int, line: str) -> str:
        self.tell(rank, line)
        return self._line(rank)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def end(self, rank: int) -> tuple[int, str]:
        """Wait for the process to end. Returns its exit status and its line on stderr."""
        process = self.processes[rank]
        status = process.wait(WAIT_S)
        assert process.stderr is not None
        return status, process.stderr.read()

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # ends stopped ones as well
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._pool.shutdown()
        self._directory.cleanup()


def names(text: str) -> list[int]:
    """The ranks that a text names."""
    return [int(number) for number in re.findall(r"rank (\d+) \(", text)]
