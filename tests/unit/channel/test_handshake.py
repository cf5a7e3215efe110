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
from support.channels import FAST, SECRET, WAIT_S, Gatherer, RawPeer, connect, identity, listen

from phalanx.dist.channel import WorkerChannel
from phalanx.dist.frames import VERSION
from phalanx.dist.handshake import MAX_CANDIDATES, mismatch, prove
from phalanx.dist.peers import PROTOCOL, Challenge, Heartbeat, Hello, Payload, Proof, Refused, Welcome, encode
from phalanx.errors import ExitCode, GroupError, PeerMissing, PeerRefused, exit_code_of

IMPATIENT = replace(FAST, hello_s=0.5)


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


# Authentication --------------------------------------------------------------------------------------------------


def test_another_jobs_rank_is_refused_by_both_and_its_address_logged(gatherer: Gatherer, caplog: Any):
    with pytest.raises(GroupError, match=r"rank 0 \(host0, pid \d+\), is of another job") as refused:
        connect(gatherer.address, secret=b"another secret")
    assert exit_code_of(refused.value) is ExitCode.GROUP
    joined(gatherer)
    assert "from 127.0.0.1 port" in caplog.text and "another job: its secret is not ours" in caplog.text


@pytest.mark.parametrize("answer", ["wrong", "reflected", "short nonce"])
def test_a_worker_sends_no_hello_to_a_leader_without_the_secret(pool: ThreadPoolExecutor, answer: str):
    listener, address = listen()
    heard = []

    def impostor() -> None:
        raw = RawPeer.of(listener)
        nonce = bytes(1 if answer == "short nonce" else 32)
        raw.send(Challenge(nonce))
        proof = raw.receive()
        assert isinstance(proof, Proof)
        known = prove(SECRET, "leader", nonce, proof.nonce)
        raw.send(Proof(b"", {"wrong": bytes(32), "reflected": proof.mac, "short nonce": known}[answer]))
        heard.append(raw.receive())
        raw.close()

    impostor_done = pool.submit(impostor)
    with pytest.raises(PeerMissing, match=r"host1.*did not reach the leader at 127\.0\.0\.1 port \d+ within"):
        connect(address, limits=IMPATIENT)
    impostor_done.result(WAIT_S)
    assert heard == [None]


def test_the_proof_depends_on_everything():
    base = (SECRET, "worker", bytes(32), bytes(32))
    others = [(b"x", *base[1:]), (SECRET, "leader", *base[2:]), (*base[:2], b"x" * 32, base[3]), (*base[:3], b"x" * 32)]
    macs = {prove(*arguments) for arguments in [base, *others]}
    assert len(macs) == 5 and all(len(mac) == 32 for mac in macs)


@pytest.mark.parametrize(
    "message", [Hello(identity(1), PROTOCOL, 2), Heartbeat(), Proof(bytes(32), bytes(32)), Proof(b"", b"")], ids=repr
)
def test_nothing_goes_without_a_proof(gatherer: Gatherer, message: Any):
    raw = RawPeer.to(gatherer.address)
    assert isinstance(raw.receive(), Challenge)
    raw.send(message)
    assert isinstance(raw.receive(), Refused | None) and raw.receive() is None
    raw.close()
    joined(gatherer)


# Who belongs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": "2"}, r"rank 1 \(host1, pid \d+\) has version 2; the leader, rank 0 \(host0, pid \d+\), has 1\."),
        ({"mlx": "0.9"}, r"rank 1 \(host1, .* has mlx 0\.9; .*host0.* has 1\."),
        ({"mlx_lm": "0.9"}, r"rank 1 \(host1, .* has mlx_lm 0\.9; .*host0.* has 1\."),
        ({"fingerprint": "b"}, r"rank 1 \(host1, .* has fingerprint b; .*host0.* has a\."),
        ({"rank": 0}, r"rank 0 \(host0, .* has the rank of another process of the group: rank 0 \(host0"),
        ({"rank": 2}, r"rank 2 \(host2, .* has no place in a group of size 2"),
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


def test_another_protocol_is_refused_but_another_python_is_not():
    hello = Hello(identity(1, python="3.99", device="other", fingerprint=""), PROTOCOL, 2)
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
    leader = Gatherer(4, IMPATIENT)
    worker = pool.submit(connect, leader.address, 2, 4)
    errors = [task.exception(WAIT_S) for task in (leader.gathered, worker)]
    for error in errors:
        assert isinstance(error, PeerMissing) and exit_code_of(error) is ExitCode.GROUP
        assert "Ranks 1, 3 of 4 did not come to the leader, rank 0 (host0" in str(error) and "0.5 s" in str(error)
    leader.close()


def test_a_rank_that_leaves_again_is_named():
    leader = Gatherer(3)
    raw = RawPeer.to(leader.address)
    raw.join(1, 3)
    raw.close()
    error = leader.gathered.exception(WAIT_S)
    assert isinstance(error, PeerMissing)
    assert "rank 1 (host1" in str(error) and "closed its connection while the group was forming" in str(error)
    leader.close()


def test_no_leader():
    listener, address = listen()
    listener.close()
    with pytest.raises(PeerMissing, match=r"rank 1 \(host1, .* within 0\.5 s: .*refused"):
        connect(address, limits=IMPATIENT)


def test_a_leader_that_dies_while_the_group_forms(pool: ThreadPoolExecutor):
    listener, address = listen()
    worker = pool.submit(connect, address)
    leader = RawPeer.of(listener)
    leader.lead()
    leader.close()
    with pytest.raises(PeerMissing, match="the group did not form: the leader closed its connection"):
        worker.result(WAIT_S)


def test_a_worker_tries_again_until_its_leader_is_there(pool: ThreadPoolExecutor):
    listener, address = listen()
    listener.close()
    worker = pool.submit(connect, address)
    early, _ = listen(address[1])
    RawPeer.of(early).close()  # so it has come, and will try again
    leader = Gatherer(2, port=address[1])
    leader.gathered.result(WAIT_S)
    leader.joined.append(worker.result(WAIT_S))
    leader.close()


def test_payloads_right_after_the_welcome_are_not_lost(pool: ThreadPoolExecutor):
    listener, address = listen()
    worker = pool.submit(connect, address)
    leader = RawPeer.of(listener)
    leader.lead()
    leader.socket.sendall(b"".join(map(encode, (Welcome(identity(0)), Heartbeat(3), Payload(bytes(9000))))))
    channel = worker.result(WAIT_S)
    assert channel.receive() == bytes(9000)
    leader.close()
    channel.close("")


# Strangers -------------------------------------------------------------------------------------------------------

STRAYS = {
    "silent": b"",
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "garbage": bytes(range(256)) * 40,
    "half a frame": struct.pack("<BI", VERSION, 100) + b"half",
    "half a header": struct.pack("<B", VERSION),
    "a giant": struct.pack("<BI", VERSION, 1 << 30),
    "a large frame before trust": struct.pack("<BI", VERSION, 5000) + bytes(5000),
    "not a message": struct.pack("<BI", VERSION, 3) + b"\xc1\xc1\xc1",
}


@pytest.mark.parametrize("sent", STRAYS.values(), ids=STRAYS.keys())
def test_a_stray_client_is_dropped_and_the_group_forms(gatherer: Gatherer, sent: bytes):
    stray = socket.create_connection(gatherer.address, timeout=WAIT_S)
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
    joined(gatherer)
    reader.join()
    stray.close()


def test_many_unauthenticated_connections_do_not_keep_a_rank_out():
    leader = Gatherer(2, replace(FAST, authenticate_s=WAIT_S))  # none of them leaves by itself
    crowd = [socket.create_connection(leader.address, timeout=WAIT_S) for _ in range(MAX_CANDIDATES + 20)]
    for stray in crowd[:20]:  # the oldest made room
        raw = RawPeer(stray)
        assert isinstance(raw.receive(), Challenge) and raw.receive() is None
    assert not leader.gathered.done()
    joined(leader)
    for stray in crowd:
        stray.close()
    leader.close()


def test_connections_after_the_start_are_refused(gatherer: Gatherer):
    waiting = socket.create_connection(gatherer.address, timeout=WAIT_S)  # a stranger from before
    worker = joined(gatherer)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(gatherer.address, timeout=WAIT_S)
    try:
        while waiting.recv(4096):
            pass
    except ConnectionError:
        pass
    gatherer.channel.broadcast(b"undisturbed")
    assert worker.receive() == b"undisturbed" and gatherer.recorder.quiet
    waiting.close()
