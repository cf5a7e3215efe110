"""What aiohttp's parser is spared: heads and chunks that would hold the event loop, and bodies of two lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_parsing import CHUNKED, ONE_BYTE, POST, REFUSED, parsed

from phalanx.http.request_framing import RequestFraming


def framed(data: bytes, step: int) -> tuple[bytes, RequestFraming]:
    """What is handed on of data that comes in pieces of this size, where each request is answered at once."""
    framing = RequestFraming(added=False)
    passed = b""
    for at in range(0, len(data), step):
        passed += framing.feed(data[at : at + step])
        while framing.n_answered < framing.n_heads and not framing.in_body:
            framing.n_answered = framing.n_heads
            passed += framing.feed(b"")
    return passed, framing


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_expensive_or_ambiguous_is_refused_whether_it_comes_whole_or_in_pieces(data):
    for step in (len(data), 700, 1 if len(data) < 30_000 else 700):
        passed, framing = framed(data, step)
        assert framing.fault and len(passed) < len(data) and framing.feed(POST + b"\r\n") == b""


def test_a_client_that_speaks_tls_is_refused_with_its_first_byte():
    framing = RequestFraming(added=False)
    assert framing.feed(b"\x16") == b"" and framing.fault == "it is TLS, and this port speaks plain HTTP"


@given(st.lists(st.integers(1, 40), max_size=30), st.booleans(), st.integers(1, 97))
def test_a_chunked_body_is_the_same_in_pieces_of_any_size(sizes, padded, step):
    parts = [bytes([65 + i % 26]) * size for i, size in enumerate(sizes)]
    chunks = [b"%s%x\r\n%s\r\n" % (b"00" * padded, len(part), part) for part in parts]
    data = CHUNKED + b"".join(chunks) + b"00\r\n\r\n"
    passed, framing = framed(data, step)
    assert passed == data and not framing.fault and not framing.in_body
    assert parsed(passed) == [b"".join(parts)]


def test_small_chunks_are_fine_between_larger_ones():
    pair = ONE_BYTE + b"100\r\n" + b"b" * 256 + b"\r\n"
    data = CHUNKED + pair * 5000 + b"0\r\n\r\n"
    assert framed(data, 1 << 16)[0] == data


@given(st.integers(1, 30_000))
def test_requests_in_one_piece_follow_each_other(step):
    one = POST + b"Content-Length: 20000\r\n\r\n" + b" " * 20_000
    data = one + CHUNKED + b"3\r\nabc\r\n0\r\n\r\n" + POST + b"\r\n"
    passed, framing = framed(data, step)
    assert passed == data and framing.n_heads == 3
    assert [len(body) for body in parsed(passed)] == [20_000, 3, 0]


@given(st.integers(1, 300))
def test_a_request_waits_for_the_answer_to_the_one_before(step):
    """Ten thousand that come in one piece held the loop for as long as it took to judge them all."""
    one = CHUNKED + b"3\r\nabc\r\n0\r\n\r\n"
    framing = RequestFraming(added=False)
    passed = b"".join(framing.feed((3 * one)[at : at + step]) for at in range(0, 3 * len(one), step))
    for n in range(1, 4):
        assert passed == n * one and framing.n_heads == n and framing.n_held == (3 - n) * len(one)
        framing.n_answered = n
        passed += framing.feed(b"")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
def test_offers_of_other_protocols_are_not_handed_on(protocol):
    offer = b"GET / HTTP/1.1\r\nHost: a\r\nupGrade: %b\r\nConnection: Upgrade\r\n\r\n" % protocol
    passed, framing = framed(2 * offer, 7)
    assert passed == 2 * offer.replace(b"upGrade: %b\r\n" % protocol, b"") and framing.n_heads == 2
    assert parsed(passed) == [b"", b""]


def test_what_is_before_a_fault_is_handed_on():
    passed, framing = framed(POST + b"\r\n" + CHUNKED + b"1\r\na\r\nx", 1 << 20)
    assert passed == POST + b"\r\n" + CHUNKED + b"1\r\na\r\n" and framing.in_body and framing.fault
