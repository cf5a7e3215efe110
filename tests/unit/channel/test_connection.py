"""A connection whose other end does not read, or is cut off: no thread waits too long, and no frame is ever cut."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.channels import WAIT_S, RawPeer, credentials, listen

from phalanx.dist import control_address
from phalanx.dist.frame_connection import FrameConnection
from phalanx.dist.peers import Heartbeat, Payload, encode
from phalanx.tls.host_credentials import connecting
from phalanx.tls.session import TlsSession

Pair = tuple[FrameConnection, RawPeer]
BUFFER = 65_536  # bytes, of either end; less than a tenth of the frames that fill them


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    listener, control = listen()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # else the kernel lets it grow
    connected = control_address.connect(control, WAIT_S)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    if request.param == "plain":
        connection, other = FrameConnection(connected), RawPeer(listener.accept()[0])
        listener.close()
    else:
        connection = FrameConnection(connected, TlsSession(connecting(credentials()[1], peer=0), server_side=False))
        with ThreadPoolExecutor(1) as pool:
            accepting = pool.submit(RawPeer.of, listener)
            while not connection.established:
                connection.wait_readable(1.0)
                assert connection.read() == [] and not connection.ended
            other = accepting.result(WAIT_S)
    yield connection, other
    connection.close()
    other.close()


def closed(pair: Pair) -> str:
    """How the end of the other process shows: TLS tells it from an end that the process has chosen."""
    _, other = pair
    cut_off = isinstance(other.socket, ssl.SSLSocket)
    return "lost its connection: the stream was cut off" if cut_off else "closed its connection"


def fill(connection: FrameConnection) -> None:
    """Send until the kernel takes no more; the last frame stands cut."""
    for _ in range(10):
        assert connection.offer(encode(Payload(bytes(1_000_000))))
        if not connection.offer(encode(Payload(b"probe"))):
            return
    raise AssertionError("the kernel takes everything")


def hear_until(other: RawPeer, last: Payload) -> list[bytes]:
    """What arrives before `last`."""
    before = []
    while (heard := other.receive()) != last:
        assert isinstance(heard, Payload)
        before.append(heard.data)
    return before


def test_what_does_not_fit_is_refused_and_what_was_begun_arrives_whole(pair: Pair):
    connection, other = pair
    fill(connection)
    for _ in range(100):
        assert not connection.offer(encode(Heartbeat(1)))
    with pytest.raises(TimeoutError, match=r"bytes not taken within 0\.05 s"):
        connection.send(encode(Payload(b"behind")), 0.05)
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(hear_until, other, Payload(b"behind"))
        while not arriving.done():
            connection.offer(b"")  # what is kept goes on as room appears
            time.sleep(0.001)
    assert set(arriving.result()) <= {bytes(1_000_000), b"probe"}
    assert connection.offer(encode(Heartbeat(2))) and other.receive() == Heartbeat(2)


def test_a_broken_connection_is_no_error_to_offer_and_one_to_send(pair: Pair):
    connection, other = pair
    other.close()
    while not connection.ended:
        connection.wait_readable(1.0)
        assert connection.read() == []
    assert connection.ended == closed(pair)
    with pytest.raises(OSError):
        for _ in range(100):
            connection.send(encode(Payload(bytes(100_000))), 1.0)
    assert not connection.offer(encode(Heartbeat()))


def test_an_end_amid_a_message_is_told(pair: Pair):
    connection, other = pair
    other.socket.sendall(encode(Heartbeat(3)) + encode(Heartbeat(4))[:-1])
    other.close()
    heard = []
    while not connection.ended:
        connection.wait_readable(1.0)
        heard += connection.read()
    assert heard == [Heartbeat(3)] and connection.ended == closed(pair) + " amid a message"


def test_both_ends_may_still_say_something_after_one_has_finished(pair: Pair):
    connection, other = pair
    connection.finish()
    other.send(Heartbeat(5))
    while not (heard := connection.read()):  # TLS may have something of its own to say before
        connection.wait_readable(WAIT_S)
    assert heard == [Heartbeat(5)] and not connection.ended
    assert other.receive() is None
    with pytest.raises(OSError):
        connection.send(encode(Heartbeat()), 1.0)
