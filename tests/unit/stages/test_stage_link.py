"""Connections between stages: real sockets in one process, with and without TLS, strangers, faults on the way."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.config import GroupConfig
from phalanx.dist import control_address, sender_acceptor
from phalanx.dist.awake_clock import AwakeClock
from phalanx.dist.ports import LOOPBACK, PORTS
from phalanx.dist.stage_frames import HEADER_BYTES, Frame, Payload, encode
from phalanx.dist.stage_link import (
    SENT_AT_ONCE,
    STOPPED_S,
    TICK_S,
    StageConnections,
    StageReceiver,
    Tamper,
    connect_stages,
)
from phalanx.dist.topology import Topology
from phalanx.errors import (
    FrameCorrupted,
    FrameLate,
    FrameLost,
    FrameMismatch,
    FrameRepeated,
    GroupError,
    PeerMissing,
    StageLinkError,
)
from phalanx.tls.certificates import make_certificate
from phalanx.tls.host_credentials import Credentials, accepting, connecting

NEVER = 1e9  # seconds: no test waits for it


def frame(step: int, forward: int = 0, tokens: int = 2) -> Frame:
    return Frame(step, forward, 0, "float16", (1, tokens, 8))


def payload(step: int, forward: int = 0, tokens: int = 2) -> bytes:
    return bytes((step + forward + i) % 256 for i in range(tokens * 16))


class Shared:
    """`share` of the ranks of one test, which are threads."""

    def __init__(self, n: int) -> None:
        self._values: list[str] = [""] * n
        self._barrier = threading.Barrier(n, timeout=60)

    def of(self, rank: int) -> Callable[[str], list[str]]:
        def share(value: str) -> list[str]:
            self._values[rank] = value
            self._barrier.wait()
            return list(self._values)

        return share


def credentials(n: int) -> list[Credentials]:
    made = [make_certificate(f"rank {rank}") for rank in range(n)]
    certificates = tuple(one.certificate for one in made)
    return [Credentials(key=one.key, place=rank, certificates=certificates) for rank, one in enumerate(made)]


@contextlib.contextmanager
def connected(
    directory: Path, widths: tuple[int, ...], *, tls: bool = False, tamper: Tamper | None = None, deadline_s: float = 60
) -> Iterator[list[StageConnections]]:
    """The ends of all ranks."""
    topology = Topology(widths)
    n = topology.size
    directory.chmod(0o700)
    group = GroupConfig(
        size=n, widths=widths, backend=None, nonce=7,
        control=f"{LOOPBACK}:1" if tls else str(directory / "g.ctl"), link_addresses=(LOOPBACK,) * n if tls else (),
    )  # fmt: skip
    owned = credentials(n) if tls else [None] * n
    shared, names = Shared(n), [f"rank {rank}" for rank in range(n)]
    with ThreadPoolExecutor(n) as pool:
        jobs = [
            pool.submit(
                connect_stages, group, topology, rank, names, owned[rank], shared.of(rank), deadline_s=deadline_s,
                tamper=tamper,
            )
            for rank in range(n)
        ]  # fmt: skip
        ends = [job.result() for job in jobs]
    try:
        yield ends
    finally:
        for end in ends:
            for one in filter(None, (end.receiver, *end.senders)):
                one.close()


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (2, 1), (1, 2), (1, 3, 2)], ids=str)
def test_every_rank_gets_what_the_stage_before_sends(tmp_path: Path, widths: tuple[int, ...], tls: bool) -> None:
    topology = Topology(widths)
    with connected(tmp_path, widths, tls=tls) as ends:
        for step in (1, 2, 3):
            for end in ends:
                if end.receiver is not None and step == 2:  # its plan comes later than the frame
                    time.sleep(0.01)
                if end.receiver is not None:
                    end.receiver.expect([frame(step), frame(step, 1)], NEVER)
            for forward in (0, 1):
                for rank, end in enumerate(ends):
                    for sender in end.senders:
                        sender.send(frame(step, forward), payload(step, forward + topology.place(rank).stage))
                for rank, end in enumerate(ends):
                    if end.receiver is not None:
                        stage = topology.place(rank).stage
                        assert end.receiver.take() == payload(step, forward + stage - 1)


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
def test_both_ends_count_what_they_know(tmp_path: Path, tls: bool) -> None:
    with connected(tmp_path, (1, 1), tls=tls) as (last, first):
        assert last.receiver is not None
        for step in (1, 2, 3):
            last.receiver.expect([frame(step)], NEVER)
            first.senders[0].send(frame(step), payload(step))
            last.receiver.take()
        received, sent = last.receiver.stats(1.5), first.senders[0].stats()
        assert (received.peer, received.frames, received.bytes) == (1, 3, 3 * (HEADER_BYTES + 32))
        assert (received.waited_s, sent.peer, sent.frames, sent.waited_s) == (1.5, 0, None, None)
        knows = tls and sys.platform == "linux"
        assert (sent.segments is not None, sent.resent is not None, sent.round_trip_us is not None) == (knows,) * 3
        if sent.segments is not None and sent.round_trip_us is not None:
            assert sent.segments >= 3 and 0 < sent.round_trip_us < 60_000_000
    assert first.senders[0].stats().segments is None, "of a closed connection nothing is known"


def test_a_frame_may_be_there_before_its_plan(tmp_path: Path) -> None:
    with connected(tmp_path, (1, 1)) as (last, first):
        for step in (1, 2, 3):
            first.senders[0].send(frame(step, tokens=4000), payload(step, tokens=4000))
        assert last.receiver is not None
        for step in (1, 2, 3):
            last.receiver.expect([frame(step, tokens=4000)], NEVER)
            assert last.receiver.take() == payload(step, tokens=4000)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("this frame waits for the thread")


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
def test_small_frames_do_not_pass_the_thread_and_large_ones_do(
    tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = SENT_AT_ONCE // 16 + 1  # tokens
    with connected(tmp_path, (1, 1), tls=tls) as (last, first):
        assert last.receiver is not None
        (sender,) = first.senders
        with monkeypatch.context() as patched:
            patched.setattr(sender._waiting, "put", refuse)
            for tokens in (2, large - 1):
                sender.send(frame(tokens, tokens=tokens), payload(0, tokens=tokens))
                last.receiver.expect([frame(tokens, tokens=tokens)], NEVER)
                assert last.receiver.take() == payload(0, tokens=tokens)
            with pytest.raises(AssertionError, match="waits for the thread"):
                sender.send(frame(large, tokens=large), payload(0, tokens=large))


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
def test_small_frames_that_the_socket_does_not_take_are_sent_by_the_thread(tmp_path: Path, tls: bool) -> None:
    """The receiver reads one header until it is told of frames. `send` waits for nothing, and all arrive in order."""
    tokens = SENT_AT_ONCE // 16
    with connected(tmp_path, (1, 1), tls=tls) as (last, first):
        assert last.receiver is not None
        (sender,) = first.senders
        sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        last.receiver._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        steps = range(1, 61)
        for step in steps:
            sender.send(frame(step, tokens=tokens), payload(step, tokens=tokens))
        assert sender._waiting.unfinished_tasks > 30  # those that are on their way fill the sockets
        for step in steps:
            last.receiver.expect([frame(step, tokens=tokens)], NEVER)
            assert last.receiver.take() == payload(step, tokens=tokens)
        while sender._waiting.unfinished_tasks:
            time.sleep(0.001)
        sender.send(frame(99), payload(99))
        last.receiver.expect([frame(99)], NEVER)
        assert last.receiver.take() == payload(99)


def flip(data: Payload, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("tamper", "error"),
    [
        (lambda _, frame: [frame[0], flip(frame[1], 5)], FrameCorrupted),
        (lambda _, frame: [flip(frame[0], 9), frame[1]], FrameCorrupted),
        (lambda _, frame: frame * 2, FrameRepeated),
        (lambda _, frame: [frame[0], frame[1][:-1]], FrameCorrupted),
    ],
    ids=["payload", "header", "repeated", "short"],
)
def test_faults_on_the_way_are_named(tmp_path: Path, tamper: Tamper, error: type[StageLinkError]) -> None:
    with connected(tmp_path, (1, 1), tamper=tamper) as (last, first):
        assert last.receiver is not None
        with pytest.raises(error, match="rank 1 to rank 0"):
            for step in (1, 2, 3):
                first.senders[0].send(frame(step), payload(step))
            last.receiver.expect([frame(1), frame(2), frame(3)], NEVER)
            for _ in range(3):
                last.receiver.take()


def test_a_lost_frame_and_one_that_was_not_planned(tmp_path: Path) -> None:
    with connected(tmp_path, (1, 1)) as (last, first):
        assert last.receiver is not None
        first.senders[0].send(frame(2), payload(2))
        last.receiver.expect([frame(1), frame(2)], NEVER)
        with pytest.raises(FrameLost, match="step 1"):
            last.receiver.take()
    with connected(tmp_path, (1, 1)) as (last, first):
        assert last.receiver is not None
        first.senders[0].send(frame(1, tokens=3), payload(1, tokens=3))
        last.receiver.expect([frame(1)], NEVER)
        with pytest.raises(FrameMismatch, match="shape"):
            last.receiver.take()


def test_a_frame_that_does_not_come_in_time(tmp_path: Path) -> None:
    with connected(tmp_path, (1, 1)) as (last, _):
        assert last.receiver is not None
        last.receiver.expect([frame(1)], 0.0)
        with pytest.raises(FrameLate, match=r"rank 1 to rank 0.*step 1"):
            last.receiver.take()


def test_time_without_requests_does_not_count() -> None:
    """Else a frame that is lost after an hour without any would be missed an hour later."""
    ours, theirs = socket.socketpair()
    now = [0.0]
    receiver = StageReceiver(ours, "rank 1 to rank 0", peer=1, clock=AwakeClock(STOPPED_S, lambda: now[0]))
    now[0] = 3600.0
    receiver.expect([frame(1)], 1.0)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(receiver.take)
        while not taken.done():
            now[0] += TICK_S
            time.sleep(TICK_S)
    with pytest.raises(FrameLate):
        taken.result()
    assert now[0] < 3700
    receiver.close()
    theirs.close()


def test_time_that_a_rank_is_stopped_makes_no_frame_late() -> None:
    """The clock jumps by a minute, which is no time that the rank has waited."""
    ours, theirs = socket.socketpair()
    now, looked = [0.0], threading.Event()

    def clock() -> float:
        if now[0]:
            looked.set()
        return now[0]

    receiver = StageReceiver(ours, "rank 1 to rank 0", peer=1, clock=AwakeClock(STOPPED_S, clock))
    receiver.expect([frame(1)], STOPPED_S + 0.1)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(receiver.take)
        now[0] = 60.0
        assert looked.wait(60)
        theirs.sendall(encode(frame(1), payload(1)) + payload(1))
        assert taken.result(60) == payload(1)
    receiver.close()
    theirs.close()


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
def test_both_ends_are_told_of_a_broken_connection(tmp_path: Path, tls: bool) -> None:
    with connected(tmp_path, (1, 1), tls=tls) as (last, first):
        assert last.receiver is not None
        first.senders[0].close()
        last.receiver.expect([frame(1)], NEVER)
        with pytest.raises(FrameLost, match="rank 1 to rank 0: the connection broke"):
            last.receiver.take()
    with connected(tmp_path, (1, 1), tls=tls) as (last, first):
        assert last.receiver is not None
        last.receiver.close()
        with pytest.raises(FrameLost, match="rank 1 to rank 0: the connection broke"):
            for step in range(1, 1_000_000):
                first.senders[0].send(frame(step), payload(step))


def between_two(
    before: Callable[[tuple[str, int]], None], keys: Sequence[Credentials] | None = None
) -> tuple[StageConnections, StageConnections]:
    """The ends of two ranks over TLS.

    Args:
        before: is called with the address where rank 0 waits, before rank 1 connects.
        keys: of the ranks.
    """
    shared = Shared(2)
    group = GroupConfig(
        size=2, widths=(1, 1), backend=None, nonce=7, control=f"{LOOPBACK}:1", link_addresses=(LOOPBACK,) * 2
    )
    keys = keys or credentials(2)

    def share(value: str) -> list[str]:
        addresses = shared.of(1)(value)
        host, _, port = addresses[0].rpartition(":")
        assert int(port) in PORTS  # those that a firewall has to let pass
        before((host, int(port)))
        return addresses

    def join(rank: int, share: Callable[[str], list[str]]) -> StageConnections:
        names = ["rank 0", "rank 1"]
        return connect_stages(group, Topology((1, 1)), rank, names, keys[rank], share, deadline_s=60)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(join, 0, shared.of(0)), pool.submit(join, 1, share)]
        return jobs[0].result(), jobs[1].result()


def assert_carries_a_frame(last: StageConnections, first: StageConnections) -> None:
    assert last.receiver is not None
    first.senders[0].send(frame(1), payload(1))
    last.receiver.expect([frame(1)], NEVER)
    assert last.receiver.take() == payload(1)
    for one in (last.receiver, *first.senders):
        one.close()


def dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why connections were dropped, by the log of rank 0."""
    told = [record.getMessage() for record in caplog.records]
    start = f"rank 1 to rank 0: a connection from {LOOPBACK} was dropped: it "
    return [line.removeprefix(start) for line in told if line.startswith(start)]


def test_strangers_do_not_keep_the_sender_out(caplog: pytest.LogCaptureFixture) -> None:
    """A hundred connections that say nothing came first: the oldest are ended, and the log does not grow with them."""
    strangers: list[socket.socket] = []

    def come(address: tuple[str, int]) -> None:
        for _ in range(100):
            strangers.append(socket.create_connection(address))
        for stranger in strangers[:84]:  # else rank 1 would come first
            stranger.settimeout(60)
            assert stranger.recv(1) == b""

    assert_carries_a_frame(*between_two(come))
    assert dropped(caplog)[:20] == ["made room: 16 connections wait"] * 20
    (told,) = (record.getMessage() for record in caplog.records if "more connections" in record.getMessage())
    assert int(told.split()[5]) >= 64
    for stranger in strangers:
        stranger.close()


def test_every_stranger_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """At the end that sees it: two that speak no TLS, one without a certificate, one with another cluster's, and the
    right host with a rank of another start."""
    keys = credentials(2)
    unknown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unknown.check_hostname, unknown.verify_mode = False, ssl.CERT_NONE
    foreign, right = connecting(credentials(2)[1], peer=0), connecting(keys[1], peer=0)
    foreign.verify_mode = ssl.CERT_NONE
    plain = (None, b"GET / HTTP/1.1\r\n\r\n"), (None, b"\0" * 99)
    veiled = (unknown, b""), (foreign, b""), (right, b"\0" * 16)

    def come(address: tuple[str, int]) -> None:
        for context, said in (*plain, *veiled):
            stranger = socket.create_connection(address, timeout=60)
            if context is not None:
                stranger = context.wrap_socket(stranger)
            stranger.sendall(said)
            with contextlib.suppress(OSError):  # TLS 1.3: a client learns later that its certificate was refused
                assert stranger.recv(1) == b""
            stranger.close()

    assert_carries_a_frame(*between_two(come, keys))
    assert dropped(caplog) == [
        "sent an HTTP request",
        "does not speak TLS",
        "shows no certificate",
        "shows a certificate that is not of this group",
        "is not that rank of this start",
    ]


def test_a_receiver_of_another_cluster_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the port at first; the sender tells it nothing, and tries again."""
    impostor = socket.create_server((LOOPBACK, 0))
    heard: list[bytes] = []
    connect = control_address.connect
    misled = iter([f"{LOOPBACK}:{impostor.getsockname()[1]}"])
    monkeypatch.setattr(control_address, "connect", lambda address, left: connect(next(misled, address), left))

    def answer() -> None:
        context = accepting(credentials(2)[0], peers=[1])
        context.verify_mode = ssl.CERT_NONE
        with impostor, impostor.accept()[0] as came, contextlib.suppress(OSError):
            heard.append(context.wrap_socket(came, server_side=True).recv(1))

    pretending = threading.Thread(target=answer)
    pretending.start()
    assert_carries_a_frame(*between_two(lambda _: None))
    pretending.join()
    assert not any(heard)
    told = [record.getMessage() for record in caplog.records]
    assert any(line.endswith("shows a certificate that is not of this group") for line in told), told


def test_a_sender_that_is_crowded_out_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first connection is ended after it has said who it is, as if there were too many of strangers."""
    given_up: list[object] = []
    forget = sender_acceptor.SenderAcceptor._forget

    def forget_late(self: sender_acceptor.SenderAcceptor, candidate: socket.socket) -> bool:
        found = forget(self, candidate)
        if found and not given_up:
            given_up.append(candidate)
            return False
        return found

    monkeypatch.setattr(sender_acceptor.SenderAcceptor, "_forget", forget_late)
    last, first = between_two(lambda _: None)
    assert given_up
    assert_carries_a_frame(last, first)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    group = GroupConfig(size=2, widths=(1, 1), backend=None, nonce=7, control=str(tmp_path / "g.ctl"))
    names, nobody = ["rank 0 (left)", "rank 1 (right)"], str(tmp_path / "nobody")
    for rank in (0, 1):
        with pytest.raises(PeerMissing, match=r"rank 1 \(right\) to rank 0 \(left\)"):
            connect_stages(group, Topology((1, 1)), rank, names, None, lambda value: [nobody] * 2, deadline_s=0.3)


def test_a_host_without_its_address_is_named() -> None:
    elsewhere = "192.0.2.1"  # an address of documentation: no machine has it
    group = GroupConfig(
        size=2, widths=(1, 1), backend=None, nonce=7, control=f"{LOOPBACK}:1", link_addresses=(elsewhere, LOOPBACK)
    )
    with pytest.raises(GroupError, match=rf"rank 0 cannot listen on {elsewhere}") as caught:
        connect_stages(group, Topology((1, 1)), 0, ["a", "b"], None, lambda value: [value] * 2, deadline_s=0)
    assert "hostfile" in caught.value.remedy
