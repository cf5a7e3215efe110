"""Who can reach the control port, or stands between a worker and its leader, joins no group, reads nothing, changes
nothing, and keeps no rank out. Between machines: over TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from msgspec.structs import replace
from patience import gives_up
from support.channels import (
    FAST,
    WAIT_S,
    Gatherer,
    RawPeer,
    Recorder,
    connect,
    credentials,
    identity,
    listen,
    meeting,
)

from phalanx.dist import control_address
from phalanx.dist.channel import LeaderChannel, WatchdogLimits, WorkerChannel
from phalanx.dist.handshake import LOGGED_DROPS, MAX_CANDIDATES, WORKER_FRAME
from phalanx.dist.peers import Payload, encode
from phalanx.dist.watchdog import MAX_UNREAD
from phalanx.errors import ExitCode, GroupError, PeerLost, exit_code_of
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import Credentials, connecting

OTHERS = make_credentials(["host0", "host1", "host2"])
"""Another cluster's."""


def stolen_place(place: int) -> Credentials:
    """Of another cluster, but with the certificates of this one: knows whom to accept, and shows its own."""
    known = credentials()[place].certificates
    return Credentials(
        key=OTHERS[place].key,
        place=place,
        certificates=(*known[:place], OTHERS[place].certificates[place], *known[place + 1 :]),
    )


@pytest.fixture
def gatherer() -> Iterator[Gatherer]:
    """A leader of two ranks."""
    leader = Gatherer(2)
    yield leader
    leader.close()


def joined(
    leader: Gatherer, control: str = "", recorder: Recorder | None = None, limits: WatchdogLimits = FAST
) -> WorkerChannel:
    """The rank that the leader waits for joins, and the group works."""
    worker = connect(control or leader.address, recorder=recorder, limits=limits)
    assert [who.rank for who in leader.gathered.result(WAIT_S)] == [0, 1]
    leader.joined.append(worker)
    leader.channel.broadcast(b"works")
    assert worker.receive() == b"works"
    return worker


# Between a worker and its leader ---------------------------------------------------------------------------------

Change = Callable[[bytes], bytes]


def unchanged(piece: bytes) -> bytes:
    return piece


class Relay:
    """Stands between a worker and a leader, hears everything, and may change what they send.

    Args:
        up, down: applied to pieces on their way to the leader and to the worker, of the first connection only.
    """

    def __init__(self, leader: tuple[str, int], up: Change = unchanged, down: Change = unchanged) -> None:
        self._leader = leader
        self._changes = (up, down)
        self._listener, self.control = listen()
        self._ends: list[socket.socket] = []
        self.heard = [bytearray(), bytearray()]
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:
                return
            try:
                leader = socket.create_connection(self._leader, timeout=WAIT_S)
            except OSError:
                worker.close()
                continue
            changes = self._changes if self.connections == 0 else (unchanged, unchanged)
            self.connections += 1
            self._ends += [worker, leader]
            for way, (source, target) in enumerate(((worker, leader), (leader, worker))):
                self._threads.append(threading.Thread(target=self._copy, args=(source, target, way, changes[way])))
                self._threads[-1].start()

    def _copy(self, source: socket.socket, target: socket.socket, way: int, change: Change) -> None:
        try:
            while piece := source.recv(1 << 16):
                self.heard[way] += piece
                target.sendall(change(piece))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        """Forge the end of both streams, as if either end had closed."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


@contextmanager
def relayed(leader: Gatherer, up: Change = unchanged, down: Change = unchanged) -> Iterator[Relay]:
    relay = Relay(leader.port, up, down)
    try:
        yield relay
    finally:
        relay.close()


def test_a_relay_reads_nothing(gatherer: Gatherer):
    with relayed(gatherer) as relay:
        worker = joined(gatherer, relay.control)
        gatherer.channel.broadcast(b"a plan that is nobody's business")
        worker.send(b"a report that is nobody's business")
        assert worker.receive() and gatherer.channel.collect(WAIT_S)
        for heard in relay.heard:
            assert len(heard) > 500 and b"business" not in heard and b"host1" not in heard


def test_a_relay_cannot_pass_for_the_leader(gatherer: Gatherer):
    """It shows its own certificate to the worker, to read and pass on what the worker says."""
    listener, control = listen()
    heard = []

    def impostor() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            try:
                heard.append(RawPeer.serving(accepted, stolen_place(0)).receive())
            except OSError:
                accepted.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    gives_up("did not reach the leader at 127.* shows a certificate that is not of this", control)
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()
    assert heard == [] and not gatherer.gathered.done()
    joined(gatherer)


def test_what_was_recorded_cannot_be_said_again(gatherer: Gatherer, caplog: Any):
    with relayed(gatherer) as relay:
        joined(gatherer, relay.control)
        recorded = bytes(relay.heard[0])
    again = Gatherer(2)  # with the same certificates and the same nonce
    with socket.create_connection(again.port, timeout=WAIT_S) as replay:
        with contextlib.suppress(ConnectionError):
            replay.sendall(recorded)
            while replay.recv(4096):
                pass
    assert "broke TLS: " in caplog.text and not again.gathered.done()
    joined(again)
    again.close()


def test_a_leader_is_not_deceived_by_its_own_words(gatherer: Gatherer):
    echoed = bytearray()
    with socket.create_connection(gatherer.port, timeout=WAIT_S) as mirror:
        begin = connecting(credentials()[1], peer=0)
        out = ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            begin.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
        mirror.sendall(out.read())
        with contextlib.suppress(ConnectionError):
            while piece := mirror.recv(4096):
                echoed += piece
                mirror.sendall(piece)
    assert len(echoed) > 500 and not gatherer.gathered.done()
    joined(gatherer)


def test_a_worker_is_not_deceived_by_its_own_words():
    listener, control = listen()

    def mirror() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            with accepted:
                accepted.sendall(accepted.recv(4096))

    thread = threading.Thread(target=mirror)
    thread.start()
    gives_up("broke TLS: unexpected message", control)
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


def flip(offset: int, nth: int = 0) -> Change:
    """Flips a bit of the nth piece, at `offset`."""
    count = -1

    def change(piece: bytes) -> bytes:
        nonlocal count
        count += 1
        if count != nth:
            return piece
        altered = bytearray(piece)
        altered[offset] ^= 1
        return bytes(altered)

    return change


@pytest.mark.parametrize(("way", "nth"), [("up", 0), ("down", 0), ("up", 1)])
@pytest.mark.parametrize("offset", [0, 3, 5, 40, -1])
def test_a_bit_that_flips_in_the_handshake_costs_one_attempt(way: str, nth: int, offset: int):
    """0: the kind of record; 3: its length; 5: the message's kind; 40 and -1: inside."""
    limits = replace(FAST, admit_s=1.0) if offset == 3 else FAST  # the rest of a longer record never comes
    gatherer = Gatherer(2, limits)
    with relayed(gatherer, **{way: flip(offset, nth)}) as relay:
        joined(gatherer, relay.control, limits=limits)
        assert relay.connections == 2 or (offset == 3 and relay.connections > 2)
    gatherer.close()


@pytest.mark.parametrize("offset", [0, 3, 5, -1])
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_bit_that_flips_in_the_stream_ends_the_group(gatherer: Gatherer, way: str, offset: int):
    armed = threading.Event()
    change = flip(offset)
    with relayed(gatherer, **{way: lambda piece: change(piece) if armed.is_set() else piece}) as relay:
        recorder = Recorder()
        worker = joined(gatherer, relay.control, recorder)
        armed.set()
        hearing, culprit = (gatherer.recorder, 1) if way == "up" else (recorder, 0)
        failure = hearing.failure()
        assert (failure.code, failure.rank, failure.host) == (ExitCode.PEER_LOST, culprit, f"host{culprit}")
        with pytest.raises(PeerLost):
            worker.receive()


@pytest.mark.parametrize("cut", [True, False])
def test_a_forged_end_is_not_an_orderly_one(gatherer: Gatherer, cut: bool):
    """The stream is cut, or a bit flips in the leader's farewell."""
    armed = threading.Event()
    change = flip(8)
    with relayed(gatherer, down=lambda piece: change(piece) if armed.is_set() else piece) as relay:
        recorder = Recorder()
        worker = joined(gatherer, relay.control, recorder)
        if cut:
            relay.cut()
        else:
            armed.set()
            gatherer.channel.close("enough")
        failure = recorder.failure()
        assert (failure.code, failure.rank) == (ExitCode.PEER_LOST, 0)
        assert ("the stream was cut off" if cut else "broke TLS: ") in str(failure)
        with pytest.raises(PeerLost):
            worker.receive()


# Strangers, and hosts that are not what they say -----------------------------------------------------------------


def test_another_clusters_rank_is_turned_away_and_keeps_trying_until_its_deadline(gatherer: Gatherer, caplog: Any):
    refused = "the process there does not accept the certificate of this end"
    gives_up(f"within %s s: .*{refused}", gatherer.address, shows=stolen_place(1))
    joined(gatherer)
    assert "from 127.0.0.1 port" in caplog.text
    assert "was dropped: it shows a certificate that is not of this group" in caplog.text


def test_a_rank_does_not_join_another_clusters_leader(gatherer: Gatherer):
    words = "within %s s: the process there shows a certificate that is not of this"
    gives_up(words, gatherer.address, shows=OTHERS[1])
    joined(gatherer)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_of_the_cluster_cannot_pass_for_another(rank: int, caplog: Any):
    leader = Gatherer(3)
    with pytest.raises(GroupError, match=f"says that it is rank {rank}, but shows the certificate of rank 1") as found:
        connect(leader.address, rank, 3, shows=credentials()[1])
    assert exit_code_of(found.value) is ExitCode.GROUP
    assert not leader.gathered.done()
    with ThreadPoolExecutor(2) as pool:
        leader.joined += pool.map(lambda rank: connect(leader.address, rank, 3), (1, 2))
    assert len(leader.gathered.result(WAIT_S)) == 3
    assert f"says that it is rank {rank}, but shows" in caplog.text
    leader.close()


def test_a_host_of_the_cluster_cannot_issue_certificates(gatherer: Gatherer):
    """Certificates of hosts are authorities as X.509 sees it; one that host 1 has signed is not one of the group's."""
    own = credentials()[1]
    signer = serialization.load_pem_private_key(own.key.encode(), None)
    key = serialization.load_pem_private_key(OTHERS[1].key.encode(), None)
    template = x509.load_pem_x509_certificate(OTHERS[1].certificates[1].encode())
    issued = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "phalanx host2")]))
        .issuer_name(x509.load_pem_x509_certificate(own.certificates[1].encode()).subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(template.not_valid_before_utc)
        .not_valid_after(template.not_valid_after_utc)
        .sign(signer, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )
    chain = (own.certificates[0], issued + own.certificates[1], *own.certificates[2:])
    with pytest.raises(GroupError, match="says that it is rank 1, but shows an unknown certificate"):
        connect(gatherer.address, shows=Credentials(key=OTHERS[1].key, place=1, certificates=chain))
    joined(gatherer)


def test_a_rank_of_another_start_is_refused_by_both_and_its_address_logged(gatherer: Gatherer, caplog: Any):
    with pytest.raises(GroupError, match=r"rank 0 \(host0, .*\), refuses rank 1 .*belongs to another job") as refused:
        connect(gatherer.address, nonce=8)
    assert exit_code_of(refused.value) is ExitCode.GROUP
    joined(gatherer)
    assert "from 127.0.0.1 port" in caplog.text and "was dropped: it belongs to another job" in caplog.text


def test_nothing_is_said_in_plain_nor_before_the_hello(gatherer: Gatherer, caplog: Any):
    raw = RawPeer.to(gatherer.port, credentials()[1])
    raw.send(Payload(b"a plan"))
    with contextlib.suppress(OSError):
        assert raw.receive() is None
    raw.close()
    joined(gatherer)
    assert "sent Payload out of turn" in caplog.text


def test_a_known_host_sends_no_giants_before_it_is_admitted(gatherer: Gatherer, caplog: Any):
    raw = RawPeer.to(gatherer.port, credentials()[1])
    with contextlib.suppress(OSError):
        raw.socket.sendall(encode(Payload(bytes(1 << 20)))[: 1 << 15])
        assert raw.socket.recv(4096) == b""
    raw.close()
    joined(gatherer)
    assert "is not a rank" in caplog.text


@pytest.mark.parametrize("size", [WORKER_FRAME + 1, 1])
def test_a_host_of_the_cluster_cannot_fill_the_leaders_memory(size: int):
    """One message may have four megabytes, and few may wait to be read."""
    leader = Gatherer(2)
    raw = RawPeer.to(leader.port, credentials()[1])
    raw.join(1)
    leader.gathered.result(WAIT_S)

    def flood() -> None:
        with contextlib.suppress(OSError):
            for _ in range(2 * MAX_UNREAD):
                raw.send(Payload(bytes(size)))

    flooding = threading.Thread(target=flood)
    flooding.start()
    failure = leader.recorder.failure()
    raw.socket.shutdown(socket.SHUT_RDWR)  # the leader reads no more
    flooding.join()
    assert (failure.code, failure.rank) == (ExitCode.PEER_LOST, 1)
    assert ("the limit is" if size > WORKER_FRAME else "sends more than it was asked for") in str(failure)
    raw.close()
    leader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of this machine on Linux only")
def test_a_crowd_of_one_address_drops_no_candidate_of_another():
    leader = Gatherer(2)
    slow = RawPeer.to(leader.port, credentials()[1])  # a rank whose Hello takes its time
    crowd = [
        socket.create_connection(leader.port, timeout=WAIT_S, source_address=("127.0.0.2", 0))
        for _ in range(2 * MAX_CANDIDATES)
    ]
    for stray in crowd[:MAX_CANDIDATES]:
        assert stray.recv(1) == b""
    slow.join(1)
    assert len(leader.gathered.result(WAIT_S)) == 2
    for stray in crowd:
        stray.close()
    slow.close()
    assert leader.recorder.failure().code is ExitCode.PEER_LOST
    leader.close()


def test_strangers_do_not_fill_the_log(gatherer: Gatherer, caplog: Any):
    for _ in range(2 * LOGGED_DROPS):
        with socket.create_connection(gatherer.port, timeout=WAIT_S) as stray:
            stray.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert stray.recv(4096) == b""
    joined(gatherer)
    dropped = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(dropped) == LOGGED_DROPS + 1 and dropped[-1] == f"{LOGGED_DROPS} more connections were dropped"


# On one machine --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize(("mode", "said"), [(0o700, "PermissionError"), (0o755, "")])
def test_another_user_cannot_connect_to_the_socket_of_a_group(private: Path, mode: int, said: str):
    """Not even to a careless socket; the directory's mode alone says so."""
    knock = "import os, socket, sys; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with control_address.listen(str(private)):
        private.chmod(0o777)
        private.parent.chmod(mode)
        done = subprocess.run([sys.executable, "-c", knock, str(private)], capture_output=True, text=True)
    assert said in done.stderr and (done.returncode == 0) == (said == ""), done.stderr


def test_ranks_do_not_meet_where_other_users_may_come_in(private: Path):
    private.parent.chmod(0o755)
    remedy = rf"other users may enter it\. .* chmod 700 {private.parent}$"
    with pytest.raises(GroupError, match=remedy):
        control_address.listen(str(private))
    with pytest.raises(GroupError, match=remedy):
        control_address.connect(str(private), 1.0)
    assert not private.exists()


def test_a_rank_of_another_start_is_refused_on_a_unix_socket_as_well(private: Path, caplog: Any):
    control = str(private)
    listener = control_address.listen(control)
    leader = LeaderChannel(listener, meeting(control), None, identity(0), FAST, Recorder())
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(leader.gather)
        with pytest.raises(GroupError, match="belongs to another job"):
            connect(control, nonce=8)
        worker = connect(control)
        assert len(gathered.result(WAIT_S)) == 2
    assert "the connection from this machine was dropped: it belongs to another job" in caplog.text
    leader.close("done")
    assert worker.receive() is None
    worker.close("done")


@pytest.mark.parametrize("control", ["a socket", "a port"])
def test_a_taken_address_is_named(private: Path, control: str):
    listener, where = listen()
    if control == "a socket":
        listener, where = control_address.listen(str(private)), str(private)
    with listener, pytest.raises(GroupError, match=rf"This rank cannot listen on {where} .*: Address already in use"):
        control_address.listen(where)
