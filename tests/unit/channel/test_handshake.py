"""Who gets into a group, and who does not disturb it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace
from patience import gives_up, patiently
from support.channels import FAST, WAIT_S, Gatherer, RawPeer, connect, credentials, group, identity, listen

from phalanx.dist.channel import WorkerChannel
from phalanx.dist.handshake import MAX_CANDIDATES, _MessageReader, mismatch
from phalanx.dist.peers import PROTOCOL, Admitted, GroupWelcome, Heartbeat, Hello, Payload, encode
from phalanx.dist.ports import free_ports
from phalanx.errors import ExitCode, PeerMissing, PeerRefused, exit_code_of

SILENT = replace(FAST, admit_s=0.5)
"""For connections that say nothing."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def gatherer() -> Iterator[Gatherer]:
    """A leader of two ranks."""
    leader = Gatherer(2)
    yield leader
    leader.close()


def joined(leader: Gatherer) -> WorkerChannel:
    """The rank that the leader waits for; the group is complete afterwards."""
    worker = connect(leader.address)
    assert [who.rank for who in leader.gathered.result(WAIT_S)] == [0, 1]
    leader.joined.append(worker)
    leader.channel.broadcast(b"works")
    assert worker.receive() == b"works" and worker.leader == identity(0)
    return worker


# Who belongs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": "2"}, r"rank 1 \(host1, pid \d+\) has version 2; the leader, rank 0 \(host0, pid \d+\), has 1\."),
        ({"mlx": "0.9"}, r"rank 1 \(host1, .* has mlx 0\.9; .*host0.* has 1\."),
        ({"mlx_lm": "0.9"}, r"rank 1 \(host1, .* has mlx_lm 0\.9; .*host0.* has 1\."),
        ({"fingerprint": "b"}, r"rank 1 \(host1, .* has fingerprint b; .*host0.* has a\."),
        ({"size": 3}, r"rank 1 \(host1, .* for a group of size 3; the leader, .*host0.*, for size 2\."),
    ],
)
def test_both_sides_say_which_field_differs(changes: dict[str, Any], text: str):
    leader = Gatherer(2, fingerprint="a")
    with pytest.raises(PeerRefused, match=text) as refused:
        connect(leader.address, **changes)
    error = leader.gathered.exception(WAIT_S)
    assert isinstance(error, PeerRefused) and str(error) == str(refused.value)
    assert exit_code_of(error) is ExitCode.CONFIG
    leader.close()


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, "has the rank of another process of the group: rank 0 (host0"),
        (1, "has the rank of another process of the group: rank 1 (host1"),
        (3, "has no place in a group of size 3; rank must be 0 to 2."),
        (-1, "has no place in a group of size 3"),
    ],
)
def test_a_rank_without_a_place_is_refused(rank: int, text: str):
    assert text in mismatch(identity(0), Hello(identity(rank), PROTOCOL, 3, 7), 3, [identity(1)])


def test_another_protocol_is_refused_but_another_python_is_not():
    hello = Hello(identity(1, python="3.99", device="other", fingerprint=""), PROTOCOL, 2, 7)
    assert mismatch(identity(0, fingerprint="a"), hello, 2, []) == ""
    old = mismatch(identity(0), replace(hello, protocol=PROTOCOL + 1), 2, [])
    assert f"speaks control protocol {PROTOCOL + 1}" in old and f"speaks {PROTOCOL}." in old


def test_two_processes_with_one_rank_end_the_start_for_all(pool: ThreadPoolExecutor):
    leader = Gatherer(3)
    joining = [pool.submit(connect, leader.address, 1, 3) for _ in range(2)]
    errors = [task.exception(WAIT_S) for task in [leader.gathered, *joining]]
    assert all(isinstance(error, PeerRefused) for error in errors) and len(set(map(str, errors))) == 1
    assert "has the rank of another process of the group: rank 1 (host1" in str(errors[0])
    leader.close()


def test_a_rank_that_does_not_come_is_named_to_all(pool: ThreadPoolExecutor):
    def scenario(hello_s: float) -> None:
        leader = Gatherer(4, replace(FAST, hello_s=hello_s))
        worker = pool.submit(connect, leader.address, 2, 4)
        errors = [task.exception(2 * WAIT_S) for task in (leader.gathered, worker)]
        leader.close()
        for error in errors:
            assert isinstance(error, PeerMissing) and exit_code_of(error) is ExitCode.GROUP
            assert "Ranks 1, 3 of 4 did not come to the leader, rank 0 (host0" in str(error)
            assert f"within {hello_s:g} s" in str(error)

    patiently(scenario)


def test_a_rank_that_leaves_again_is_named():
    leader = Gatherer(3)
    raw = RawPeer.to(leader.port, credentials()[1])
    raw.join(1, 3)
    raw.close()
    error = leader.gathered.exception(WAIT_S)
    assert isinstance(error, PeerMissing)
    assert "rank 1 (host1" in str(error) and "lost its connection" in str(error)
    assert "while the group was forming" in str(error)
    leader.close()


def test_no_leader():
    gives_up(r"rank 1 \(host1, .* within %s s: .*refused", f"127.0.0.1:{free_ports(1)[0]}")


def test_a_leader_that_dies_while_the_group_forms(pool: ThreadPoolExecutor):
    listener, address = listen()
    worker = pool.submit(connect, address)
    leader = RawPeer.of(listener)
    leader.lead()
    leader.close()
    with pytest.raises(
        PeerMissing, match="the group did not form: the process there lost its connection: the stream was cut off"
    ):
        worker.result(WAIT_S)


def test_a_worker_tries_again_until_its_leader_is_there(pool: ThreadPoolExecutor):
    (port,) = free_ports(1)
    worker = pool.submit(connect, f"127.0.0.1:{port}")
    early, _ = listen(port)
    early.accept()[0].close()  # so it has come, and will try again
    early.close()
    leader = Gatherer(2, port=port)
    leader.gathered.result(WAIT_S)
    leader.joined.append(worker.result(WAIT_S))
    leader.close()


def test_payloads_right_after_the_welcome_are_not_lost(pool: ThreadPoolExecutor):
    listener, address = listen()
    worker = pool.submit(connect, address)
    leader = RawPeer.of(listener)
    leader.lead()
    leader.socket.sendall(b"".join(map(encode, (GroupWelcome(identity(0)), Heartbeat(3), Payload(bytes(9000))))))
    channel = worker.result(WAIT_S)
    assert channel.receive() == bytes(9000)
    leader.close()
    channel.close("")


# Strangers -------------------------------------------------------------------------------------------------------

RECORD = struct.Struct("!BHH")  # of TLS: kind, version, length
HANDSHAKE = 22

STRAYS = {
    "silent": (b"", "sent no Hello within 0.5 s"),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "sent an HTTP request"),
    "garbage": (bytes(range(256)) * 40, "does not speak TLS"),
    "a frame in plain": (encode(Hello(identity(1), PROTOCOL, 2, 7)), "does not speak TLS"),
    "half a record": (RECORD.pack(HANDSHAKE, 0x0301, 100) + b"half", "sent no Hello within 0.5 s"),
    "a record too large": (RECORD.pack(HANDSHAKE, 0x0301, 0xFFFF) + bytes(100), "broke TLS: packet length too long"),
    "an endless message": (  # a ClientHello of 128 KB, in as many records as it takes
        (RECORD.pack(HANDSHAKE, 0x0301, 4100) + b"\x01\x02\x00\x00" + bytes(4096)) * 8,
        "is not a rank. The peer sent too much before its Hello.",
    ),
    "an encrypted record first": (RECORD.pack(23, 0x0303, 64) + bytes(64), "broke TLS: "),
}


@pytest.mark.parametrize(("sent", "why"), STRAYS.values(), ids=STRAYS.keys())
def test_a_stray_client_is_dropped_and_the_group_forms(sent: bytes, why: str, caplog: Any):
    gatherer = Gatherer(2, SILENT if "within 0.5 s" in why else FAST)
    stray = socket.create_connection(gatherer.port, timeout=WAIT_S)
    stray.sendall(sent)
    dropped = threading.Event()

    def read_to_the_end() -> None:
        try:
            while stray.recv(4096):
                pass
        except ConnectionError:
            pass
        dropped.set()

    reader = threading.Thread(target=read_to_the_end)
    reader.start()
    assert dropped.wait(WAIT_S)  # while the leader goes on waiting for its ranks
    assert not gatherer.gathered.done()
    address = f"127.0.0.1 port {stray.getsockname()[1]}"
    joined(gatherer)
    reader.join()
    stray.close()
    gatherer.close()
    dropped = f"the connection from {address} was dropped: it "
    (line,) = [record.getMessage() for record in caplog.records if dropped in record.getMessage()]
    assert line.startswith(dropped + why)


def test_many_unauthenticated_connections_do_not_keep_a_rank_out():
    leader = Gatherer(2)  # none of them leaves by itself
    crowd = [socket.create_connection(leader.port, timeout=WAIT_S) for _ in range(MAX_CANDIDATES + 20)]
    for stray in crowd[:20]:  # the oldest made room
        assert stray.recv(1) == b""
    assert not leader.gathered.done()
    joined(leader)
    for stray in crowd:
        stray.close()
    leader.close()


def test_connections_after_the_start_are_refused(gatherer: Gatherer):
    waiting = socket.create_connection(gatherer.port, timeout=WAIT_S)  # a stranger from before
    worker = joined(gatherer)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(gatherer.port, timeout=WAIT_S)
    try:
        while waiting.recv(4096):
            pass
    except ConnectionError:
        pass
    gatherer.channel.broadcast(b"undisturbed")
    assert worker.receive() == b"undisturbed" and gatherer.recorder.quiet
    waiting.close()


def test_an_answer_that_waits_is_read_after_the_deadline(monkeypatch):
    """A worker that stood still for longer than it may wait finds the leader's answer and stays in the group."""
    late = _MessageReader.expect

    def standing_still(self, kind, deadline):
        if kind is Admitted:
            assert self._connection.wait_readable(WAIT_S)
            deadline = 0.0
        return late(self, kind, deadline)

    monkeypatch.setattr(_MessageReader, "expect", standing_still)
    with group(2) as ranks:
        assert [rank.rank for rank in ranks.ranks] == [0, 1]
