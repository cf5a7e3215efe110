"""What h11 is spared: heads and chunks that would hold the event loop, and bodies whose length is ambiguous."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.http.request_head import MAX_LINES
from phalanx.server.bounded_h11 import MAX_SMALL_CHUNKS, SMALL_CHUNK, BoundedConnection

POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def events(*pieces: bytes) -> list[object]:
    connection, found = BoundedConnection(), []
    for piece in pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            found.append(event)
    return found


def body(*pieces: bytes) -> bytes:
    found = events(*pieces)
    assert isinstance(found[0], h11.Request) and isinstance(found[-1], h11.EndOfMessage)
    return b"".join(bytes(event.data) for event in found if isinstance(event, h11.Data))


@pytest.mark.parametrize(
    "data",
    {
        "spaces": POST + b"a:" + b" " * 10_000 + b"\0\r\n\r\n",
        "folded": POST + b"a: b\r\n" + b" \r\n" * 10 + b"\r\n",
        "lines": POST + b"a:\r\n" * MAX_LINES + b"\r\n",
        "long": POST + b"a: " + b"b" * 250_000 + b"\r\n\r\n",
        "spaces in a trailer": CHUNKED + b"0\r\na:" + b" " * 10_000 + b"\0\r\n\r\n",
        "trailer": CHUNKED + b"1\r\na\r\n0;b\r\na: b\r\n\r\n",
        "extension": CHUNKED + b"1;" + b" " * 10_000 + b"\n\r\n",
        "chunks": CHUNKED + b"1\r\na\r\n" * (MAX_SMALL_CHUNKS + 1),
        "two lengths": POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "chunked 1.0": CHUNKED.replace(b"1.1", b"1.0"),
    }.items(),
    ids=lambda item: item[0].replace(" ", "-"),
)
def test_what_is_expensive_or_ambiguous_is_refused_whether_it_comes_whole_or_in_pieces(data):
    for step in (len(data[1]), 700):
        with pytest.raises(h11.RemoteProtocolError):
            events(*(data[1][at : at + step] for at in range(0, len(data[1]), step)))


@given(st.lists(st.integers(1, 40), max_size=30), st.sampled_from([b"", b";name=value", b"  "]), st.integers(1, 97))
def test_a_chunked_body_is_the_same_in_pieces_of_any_size(sizes, extension, step):
    parts = [bytes([65 + i % 26]) * size for i, size in enumerate(sizes)]
    chunks = [b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts]
    data = CHUNKED + b"".join(chunks) + b"00" + extension + b"\r\n\r\n"
    assert body(*(data[at : at + step] for at in range(0, len(data), step))) == b"".join(parts)


def test_small_chunks_are_fine_between_larger_ones():
    pair = b"1\r\na\r\n" + b"%x\r\n%s\r\n" % (2 * SMALL_CHUNK, b"b" * 2 * SMALL_CHUNK)
    assert (
        len(body(CHUNKED + pair * 2 * MAX_SMALL_CHUNKS + b"0\r\n\r\n")) == (1 + 2 * SMALL_CHUNK) * 2 * MAX_SMALL_CHUNKS
    )


def test_requests_in_one_piece_follow_each_other():
    connection = BoundedConnection()
    one = POST + b"Content-Length: 20000\r\n\r\n" + b" " * 20_000
    connection.receive_data(one + CHUNKED + b"3\r\nabc\r\n0\r\n\r\n")
    lengths = []
    for _ in range(2):
        lengths.append(0)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            lengths[-1] += len(event.data) if isinstance(event, h11.Data) else 0
        connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
    assert lengths == [20_000, 3]
    assert not connection.has_more
