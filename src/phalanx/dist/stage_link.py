"""The connections between pipeline stages: each rank gets its stage's input and sends its output (P3).

Activations go straight from a rank to its receivers in the next stage (`topology.py`), over a connection of their own:
on one machine a Unix socket, between machines TCP under TLS, where each end shows the certificate of its rank. Threads
send and receive, so that the engine's own thread only hands over and takes. What a frame is and which one comes next
is decided in `stage_frames.py`. Does not know arrays or plans.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from phalanx.config import GroupConfig
from phalanx.dist import control_address
from phalanx.dist.awake_clock import AwakeClock
from phalanx.dist.stage_frames import HEADER_BYTES, Frame, FrameSequence, Payload, encode
from phalanx.dist.topology import Topology
from phalanx.errors import FrameLost, PeerMissing, PhalanxError
from phalanx.tls.credentials import Credentials, accepting, connecting

HELLO_BYTES = 16  # nonce and rank of the sender
WELCOME = b"+"  # the receiver's answer to it: the sender would not notice else that its connection was given up
HANDSHAKE_S = 5.0  # two round trips, but this host may be busy
MOST_CANDIDATES = 16  # connections whose other end is not known yet; one more closes the oldest
TICK_S = 0.25  # between looks at whether a frame is late
STOPPED_S = 1.0  # between two looks: this process was stopped for the rest of the time, or the machine slept
RETRY_S = 0.1  # between attempts to connect, and between looks at whether a connection broke
CAUSE_S = 1.0  # that a broken connection is kept back: usually its rank has ended, and the watchdog knows why
PIECE_BYTES = 1 << 18  # received at a time
SENT_AHEAD = 64  # frames that may wait to be sent: those of one plan


Tamper = Callable[[int, list[Payload]], list[Payload]]
"""(step, pieces of a frame) -> what is sent instead, for drills. May raise ConnectionError."""


class Ends(NamedTuple):
    """This rank's connections."""

    inlet: StageInlet | None
    """None in the first stage."""
    outlets: tuple[StageOutlet, ...]
    """Empty in the last stage, and where the next one is narrower."""


class StageInlet:
    """Receives the frames of one sender, in a thread of its own.

    Args:
        name: of both ends, for errors.
        clock: by which frames are late; one on which time that this process is stopped does not pass.
    """

    def __init__(self, connected: socket.socket, name: str, clock: AwakeClock | None = None) -> None:
        self._clock = clock or AwakeClock(STOPPED_S)
        self._socket = connected
        self._name = name
        self._sequence = FrameSequence(name)
        self._news = threading.Condition()
        self._n_expected = 0  # frames that were announced and did not begin
        self._arrived: queue.SimpleQueue[bytearray | PhalanxError] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stage inlet", daemon=True).start()

    def expect(self, frames: Sequence[Frame], within_s: float) -> None:
        """These frames will come next, the last of them within so many seconds."""
        self._clock.tick()
        with self._news:
            due = self._clock.now() + within_s
            for frame in frames:
                self._sequence.expect(frame, due)
            self._n_expected += len(frames)
            self._news.notify()

    def take(self) -> bytearray:
        """The payload of the next frame that was announced. Waits for it.

        Raises:
            FrameError: another frame came, a damaged one, or none in time; names both ends.
        """
        while True:
            self._clock.tick()
            try:
                found = self._arrived.get(timeout=TICK_S)
            except queue.Empty:
                self._clock.tick()
                with self._news:
                    self._sequence.check_time(self._clock.now())
                continue
            if isinstance(found, PhalanxError):
                raise found
            return found

    def close(self) -> None:
        """End the connection."""
        _close(self._socket)

    def _run(self) -> None:
        try:
            while True:
                header = self._read(HEADER_BYTES)
                with self._news:
                    self._news.wait_for(lambda: self._n_expected)
                    self._n_expected -= 1
                    n_bytes = self._sequence.begin(bytes(header))
                payload = self._read(n_bytes)
                with self._news:
                    self._sequence.end(payload)
                self._arrived.put(payload)
        except PhalanxError as error:
            self._arrived.put(error)
        except OSError as error:
            time.sleep(CAUSE_S)
            self._arrived.put(FrameLost(f"{self._name}: the connection broke: {error.strerror or error}."))

    def _read(self, n_bytes: int) -> bytearray:
        """So many bytes.

        Raises:
            OSError: the connection ended before.
        """
        data = bytearray(n_bytes)
        view, at = memoryview(data), 0
        while at < n_bytes:
            got = self._socket.recv_into(view[at : at + PIECE_BYTES])
            if got == 0:
                raise ConnectionResetError("the other end closed it")
            at += got
        return data


class StageOutlet:
    """Sends frames to one receiver, in a thread of its own.

    Args:
        name: of both ends, for errors.
        tamper: changes what is sent, for drills.
    """

    def __init__(self, connected: socket.socket, name: str, tamper: Tamper | None = None) -> None:
        self._socket = connected
        self._name = name
        self._tamper = tamper
        self._waiting: queue.Queue[tuple[Frame, Payload]] = queue.Queue(SENT_AHEAD)
        self._error: PhalanxError | None = None
        threading.Thread(target=self._run, name="stage outlet", daemon=True).start()

    def send(self, frame: Frame, payload: Payload) -> None:
        """Hand over a frame. Waits only while very many are to be sent; the payload must not change any more.

        Raises:
            FrameLost: the connection broke at an earlier one; names both ends.
        """
        while self._error is None:
            with contextlib.suppress(queue.Full):
                self._waiting.put((frame, payload), timeout=RETRY_S)
                return
        raise self._error

    def close(self) -> None:
        """End the connection."""
        _close(self._socket)

    def _run(self) -> None:
        while True:
            frame, payload = self._waiting.get()
            header = encode(frame, payload)
            try:
                pieces: list[Payload] = [header, payload]
                for piece in pieces if self._tamper is None else self._tamper(frame.step, pieces):
                    self._socket.sendall(piece)
            except OSError as error:
                self._error = FrameLost(f"{self._name}: the connection broke: {error.strerror or error}.")
                self.close()
                return


# Connecting ------------------------------------------------------------------------------------------------------


def connect_stages(
    group: GroupConfig,
    topology: Topology,
    rank: int,
    names: Sequence[str],
    credentials: Credentials | None,
    share: Callable[[str], list[str]],
    *,
    deadline_s: float,
    tamper: Tamper | None = None,
) -> Ends:
    """Connect this rank with its sender and its receivers. Every rank of the group calls this at the same point.

    Args:
        names: of all ranks, for messages.
        credentials: of this rank; None where all ranks are on one machine.
        share: gives the values of all ranks, in rank order.
        deadline_s: seconds until all connections must be there.

    Raises:
        PeerMissing: the rank at another end did not come; names it.
        GroupError: this rank cannot listen.
    """
    deadline = time.monotonic() + deadline_s
    sender = topology.sender(rank)
    listener = None if sender is None else control_address.listen(_address(group, rank))
    addresses = share("" if listener is None else _reached_at(listener, group, rank))
    outlets = []
    for receiver in topology.receivers(rank):
        context = None if credentials is None else connecting(credentials, peer=receiver)
        hello = group.nonce.to_bytes(8, "big") + rank.to_bytes(8, "big")
        name = f"{names[rank]} to {names[receiver]}"
        outlets.append(StageOutlet(_connect(addresses[receiver], context, hello, name, deadline), name, tamper))
    if listener is None or sender is None:
        return Ends(None, tuple(outlets))
    context = None if credentials is None else accepting(credentials, peers=[sender])
    hello = group.nonce.to_bytes(8, "big") + sender.to_bytes(8, "big")
    name = f"{names[sender]} to {names[rank]}"
    try:
        connected = _Acceptor(listener, context, hello).accept(deadline)
    finally:
        listener.close()
        control_address.remove_socket(_address(group, rank))
    if connected is None:
        raise PeerMissing(
            f"{name}: no connection between these stages within {deadline_s:g} s.",
            remedy="Look at the log of the first of them, and whether it can connect to the second one's ports.",
        )
    return Ends(StageInlet(connected, name), tuple(outlets))


def _address(group: GroupConfig, rank: int) -> str:
    """Where a rank waits for its sender: a Unix socket beside the leader's, or any free port."""
    if control_address.is_unix(group.control):
        return str(Path(group.control).with_suffix(f".in{rank}"))
    return f"{group.link_addresses[rank]}:0"


def _reached_at(listener: socket.socket, group: GroupConfig, rank: int) -> str:
    if listener.family == socket.AF_UNIX:
        return _address(group, rank)
    return f"{group.link_addresses[rank]}:{listener.getsockname()[1]}"


def _connect(address: str, context: ssl.SSLContext | None, hello: bytes, name: str, deadline: float) -> socket.socket:
    reason: object = "no attempt was made"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _prepared(control_address.connect(address, left), context, hello, left)
        except OSError as error:
            reason = error.strerror or error
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise PeerMissing(
        f"{name}: no connection to {address}: {reason}.", remedy="May this machine connect to the other one's ports?"
    )


def _prepared(connected: socket.socket, context: ssl.SSLContext | None, hello: bytes, left_s: float) -> socket.socket:
    """The connection, once the other end has shown its certificate, been told who this is, and accepted it.

    The sender does not give up before its deadline: the receiver must not accept what the sender has left.
    """
    with contextlib.ExitStack() as on_error:
        on_error.callback(connected.close)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(left_s)
        if context is not None:
            connected = context.wrap_socket(connected)
            on_error.callback(connected.close)
        connected.sendall(hello)
        if connected.recv(len(WELCOME)) != WELCOME:
            raise ConnectionResetError("the other end closed it")
        connected.settimeout(None)
        on_error.pop_all()
    return connected


class _Acceptor:
    """Accepts connections until one is the sender's. Other connections get little time, and do not delay the sender.

    Args:
        hello: what the sender says first.
    """

    def __init__(self, listener: socket.socket, context: ssl.SSLContext | None, hello: bytes) -> None:
        self._listener = listener
        self._context = context
        self._hello = hello
        self._candidates: deque[socket.socket] = deque()  # not known yet, the oldest first
        self._lock = threading.Lock()
        self._found: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def accept(self, deadline: float) -> socket.socket | None:
        """The sender's connection; None if it did not come in time (monotonic seconds)."""
        self._listener.settimeout(RETRY_S)
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._found.get_nowait()
            with contextlib.suppress(OSError):  # no connection came in RETRY_S, or it has closed already
                self._take(self._listener.accept()[0])
        return None

    def _take(self, candidate: socket.socket) -> None:
        """Examine a connection in a thread of its own; while too many are examined, the oldest ends."""
        candidate.settimeout(HANDSHAKE_S)
        if self._context is not None:
            candidate = self._context.wrap_socket(candidate, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._candidates.append(candidate)
            if len(self._candidates) > MOST_CANDIDATES:
                _end(self._candidates.popleft())
        threading.Thread(target=self._examine, args=(candidate,), name="stage candidate", daemon=True).start()

    def _examine(self, candidate: socket.socket) -> None:
        """Find out whether this is the sender."""
        with contextlib.suppress(OSError):
            if isinstance(candidate, ssl.SSLSocket):
                candidate.do_handshake()
            said = b""
            while len(said) < HELLO_BYTES and (piece := candidate.recv(HELLO_BYTES - len(said))):
                said += piece
            if said == self._hello and self._forget(candidate):
                candidate.settimeout(None)
                candidate.sendall(WELCOME)
                self._found.put(candidate)
                return
        self._forget(candidate)
        _close(candidate)

    def _forget(self, candidate: socket.socket) -> bool:
        """It need not be ended any more. Returns whether it was not."""
        with self._lock:
            if candidate not in self._candidates:
                return False
            self._candidates.remove(candidate)
            return True


def _end(connected: socket.socket) -> None:
    """End a connection on which another thread may wait, which closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # TLS's own one would let that thread read plain text


def _close(connected: socket.socket) -> None:
    """Close a socket on which another thread may wait."""
    _end(connected)
    connected.close()
