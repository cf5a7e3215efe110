"""The connections between pipeline stages: each rank receives its stage's input and sends its output.

Hidden states go straight from a rank to its receivers in the next stage (`topology.py`), over connections of their own:
Unix sockets on one machine, TCP under TLS between machines, where each end shows the certificate of its rank. One
thread receives; another sends what the engine's thread cannot send without blocking. `stage_frames.py` defines frames
and their order.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from phalanx.config import GroupConfig
from phalanx.dist import control_address
from phalanx.dist.awake_clock import AwakeClock
from phalanx.dist.ports import free_ports
from phalanx.dist.sender_acceptor import WELCOME, SenderAcceptor, close
from phalanx.dist.stage_frames import HEADER_BYTES, Frame, FrameSequence, Payload, encode
from phalanx.dist.tcp_figures import with_tcp_figures
from phalanx.dist.topology import Topology
from phalanx.errors import FrameLost, GroupError, PeerMissing, PhalanxError
from phalanx.tls.failures import predicate_of
from phalanx.tls.host_credentials import Credentials, accepting, connecting
from phalanx.types import LinkStats

log = logging.getLogger("phalanx.channel")

TICK_S = 0.25  # between checks for a late frame
STOPPED_S = 1.0  # longer gaps between checks do not count: this process was stopped, or the machine slept
RETRY_S = 0.1  # between attempts to connect, and between checks for a broken connection
BREAK_REPORT_DELAY_S = 1.0  # usually the peer has ended, and the watchdog reports why within this time
PIECE_BYTES = 1 << 18  # received at a time
SENT_AHEAD = 64  # frames that may be queued: those of one plan
SENT_AT_ONCE = 1 << 16  # bytes; the engine's thread sends smaller frames itself: waking a thread takes longer

Tamper = Callable[[int, list[Payload]], list[Payload]]
"""(step, pieces of a frame) -> pieces to send instead: an injected fault. May raise ConnectionError."""


class StageConnections(NamedTuple):
    """This rank's connections to other stages."""

    receiver: StageReceiver | None
    """None in the first stage."""
    senders: tuple[StageSender, ...]
    """Empty in the last stage, and for ranks without receivers, where the next stage has fewer ranks."""


class StageReceiver:
    """Receives the frames of one sender, in a thread of its own.

    Args:
        name: of both ends, for errors.
        peer: the sender's rank.
        clock: for deadlines of frames; it stands still while this process is stopped.
    """

    def __init__(self, connected: socket.socket, name: str, *, peer: int, clock: AwakeClock | None = None) -> None:
        self._clock = clock or AwakeClock(STOPPED_S)
        self._socket = connected
        self._name = name
        self._peer = peer
        self._sequence = FrameSequence(name)
        self._changed = threading.Condition()
        self._n_expected = 0  # announced frames that have not begun
        self._n_frames = self._n_bytes = 0  # received
        self._arrived: queue.SimpleQueue[bytearray | PhalanxError] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stage receiver", daemon=True).start()

    def expect(self, frames: Sequence[Frame], within_s: float) -> None:
        """Announce the next frames. All must arrive `within_s` seconds from now."""
        self._clock.tick()
        with self._changed:
            due = self._clock.now() + within_s
            for frame in frames:
                self._sequence.expect(frame, due)
            self._n_expected += len(frames)
            self._changed.notify()

    def take(self) -> bytearray:
        """The payload of the next announced frame; blocks until it has arrived.

        Raises:
            StageLinkError: the frame was another one, damaged or late; names both ends.
        """
        while True:
            self._clock.tick()
            try:
                found = self._arrived.get(timeout=TICK_S)
            except queue.Empty:
                self._clock.tick()
                with self._changed:
                    self._sequence.check_time(self._clock.now())
                continue
            if isinstance(found, PhalanxError):
                raise found
            return found

    def stats(self, waited_s: float) -> LinkStats:
        """This end's figures. `waited_s`: see `LinkStats`."""
        stats = LinkStats(
            peer=self._peer, carries="hidden states", frames=self._n_frames, bytes=self._n_bytes, waited_s=waited_s
        )
        return with_tcp_figures(stats, self._socket)

    def close(self) -> None:
        """End the connection."""
        close(self._socket)

    def _run(self) -> None:
        try:
            while True:
                header = self._read(HEADER_BYTES)
                with self._changed:
                    self._changed.wait_for(lambda: self._n_expected)
                    self._n_expected -= 1
                    n_bytes = self._sequence.begin(bytes(header))
                payload = self._read(n_bytes)
                with self._changed:
                    self._sequence.end(payload)
                self._n_frames += 1
                self._n_bytes += HEADER_BYTES + n_bytes
                self._arrived.put(payload)
        except PhalanxError as error:
            self._arrived.put(error)
        except OSError as error:
            time.sleep(BREAK_REPORT_DELAY_S)
            self._arrived.put(FrameLost(f"{self._name}: the connection broke: {error.strerror or error}."))

    def _read(self, n_bytes: int) -> bytearray:
        """Read exactly `n_bytes`.

        Raises:
            OSError: the connection ended first.
        """
        data = bytearray(n_bytes)
        view, at = memoryview(data), 0
        while at < n_bytes:
            got = self._socket.recv_into(view[at : at + PIECE_BYTES])
            if got == 0:
                raise ConnectionResetError("the other end closed it")
            at += got
        return data


class StageSender:
    """Sends frames to one receiver: small ones in the caller's thread, others in a thread of its own.

    Args:
        name: of both ends, for errors.
        peer: the receiver's rank.
        tamper: injects faults.
    """

    def __init__(self, connected: socket.socket, name: str, *, peer: int, tamper: Tamper | None = None) -> None:
        self._socket = connected
        self._name = name
        self._peer = peer
        self._tamper = tamper
        self._waiting: queue.Queue[tuple[Frame, Payload] | bytes] = queue.Queue(SENT_AHEAD)  # frames, or a rest
        self._error: PhalanxError | None = None
        threading.Thread(target=self._run, name="stage sender", daemon=True).start()

    def send(self, frame: Frame, payload: Payload) -> None:
        """Send or queue a frame; blocks while the queue is full. The payload must not change afterwards.

        Raises:
            FrameLost: the connection broke at an earlier frame; names both ends.
        """
        left: tuple[Frame, Payload] | bytes = (frame, payload)
        if len(payload) <= SENT_AT_ONCE and not self._waiting.unfinished_tasks and self._tamper is None:
            left = self._send_at_once(encode(frame, payload) + payload)
        while left and self._error is None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(left, timeout=RETRY_S)
                return
        if self._error is not None:
            raise self._error

    def stats(self) -> LinkStats:
        """This end's figures."""
        return with_tcp_figures(LinkStats(peer=self._peer, carries="hidden states"), self._socket)

    def close(self) -> None:
        """End the connection."""
        close(self._socket)

    def _send_at_once(self, data: bytes) -> bytes:
        """Send without blocking. Returns the unsent rest for the thread, which also handles errors.

        TLS sends all or nothing, and must be given the same bytes again.
        """
        try:
            self._socket.settimeout(0.0)
            sent = self._socket.send(data)
            self._socket.settimeout(None)
        except OSError:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)
            return data
        return data[sent:]

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            try:
                for piece in [item] if isinstance(item, bytes) else self._pieces(*item):
                    self._socket.sendall(piece)
            except OSError as error:
                self._error = FrameLost(f"{self._name}: the connection broke: {error.strerror or error}.")
                self.close()
                return
            self._waiting.task_done()

    def _pieces(self, frame: Frame, payload: Payload) -> list[Payload]:
        """Header and payload of a frame, as sent."""
        pieces: list[Payload] = [encode(frame, payload), payload]
        return pieces if self._tamper is None else self._tamper(frame.step, pieces)


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
) -> StageConnections:
    """Connect this rank to its sender and its receivers. Collective: every rank of the group calls it.

    Args:
        names: of all ranks, for messages.
        credentials: of this rank; None if all ranks are on one machine.
        share: all-gathers a value; returns those of all ranks in rank order.
        deadline_s: seconds within which all connections must be made.

    Raises:
        PeerMissing: a rank did not connect or could not be reached; names both ends.
        GroupError: this rank cannot listen.
    """
    deadline = time.monotonic() + deadline_s
    sender = topology.sender(rank)
    listener = None if sender is None else _listen(group, rank)
    addresses = share("" if listener is None else _reached_at(listener, group, rank))
    senders = []
    for receiver in topology.receivers(rank):
        context = None if credentials is None else connecting(credentials, peer=receiver)
        hello = group.nonce.to_bytes(8, "big") + rank.to_bytes(8, "big")
        name = f"{names[rank]} to {names[receiver]}"
        connected = _connect(addresses[receiver], context, hello, name, deadline)
        senders.append(StageSender(connected, name, peer=receiver, tamper=tamper))
    if listener is None or sender is None:
        return StageConnections(None, tuple(senders))
    context = None if credentials is None else accepting(credentials, peers=[sender])
    hello = group.nonce.to_bytes(8, "big") + sender.to_bytes(8, "big")
    name = f"{names[sender]} to {names[rank]}"
    try:
        accepted = SenderAcceptor(listener, context, hello, name).accept(deadline)
    finally:
        listener.close()
        if control_address.is_unix(group.control):
            control_address.remove_socket(_unix_path(group, rank))
    if accepted is None:
        raise PeerMissing(
            f"{name}: no connection between these stages within {deadline_s:g} s.",
            remedy="Look at the log of the first of them, and whether it can connect to the second one's ports.",
        )
    return StageConnections(StageReceiver(accepted, name, peer=sender), tuple(senders))


def _listen(group: GroupConfig, rank: int) -> socket.socket:
    """Listen for this rank's sender: on a Unix socket beside the leader's, or on a port.

    Raises:
        GroupError: the address cannot be bound.
    """
    if control_address.is_unix(group.control):
        return control_address.listen(_unix_path(group, rank))
    host = group.link_addresses[rank]
    try:
        (port,) = free_ports(1, host)
    except OSError as error:
        raise GroupError(
            f"rank {rank} cannot listen on {host} for the stage before: {error.strerror or error}.",
            remedy="Correct the address of its host in the hostfile.",
        ) from error
    return control_address.listen(f"{host}:{port}")


def _unix_path(group: GroupConfig, rank: int) -> str:
    return str(Path(group.control).with_suffix(f".in{rank}"))


def _reached_at(listener: socket.socket, group: GroupConfig, rank: int) -> str:
    if listener.family == socket.AF_UNIX:
        return _unix_path(group, rank)
    return f"{group.link_addresses[rank]}:{listener.getsockname()[1]}"


def _connect(address: str, context: ssl.SSLContext | None, hello: bytes, name: str, deadline: float) -> socket.socket:
    reason = "was not asked in time"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _prepared(control_address.connect(address, left), context, hello, left)
        except OSError as error:
            before, reason = reason, _broken(error)
            if isinstance(error, ssl.SSLError) and reason != before:
                log.warning("%s: the process at %s %s", name, address, reason)
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise PeerMissing(
        f"{name}: no connection to {address}: it {reason}.",
        remedy="May this machine connect to the other one's ports?",
    )


def _broken(error: OSError) -> str:
    """The other end's failure, as a predicate for messages."""
    if isinstance(error, ssl.SSLError):
        return predicate_of(error)
    return f"cannot be reached: {error.strerror or error}"


def _prepared(connected: socket.socket, context: ssl.SSLContext | None, hello: bytes, left_s: float) -> socket.socket:
    """Handshake: verify the peer's certificate, send this rank's hello, wait for the welcome.

    The sender waits for its whole deadline, so that a receiver never accepts an abandoned connection.
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
