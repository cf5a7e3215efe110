"""Frames survive any cutting of the stream; what is no frame is known early."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dist import frames
from phalanx.dist.frames import MAX_FRAME, VERSION, Splitter, frame
from phalanx.errors import FrameError


@given(st.lists(st.binary(max_size=300), max_size=20), st.data())
def test_payloads_survive_arbitrary_splitting(payloads: list[bytes], data: st.DataObject):
    stream = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=40)))
    splitter, got = Splitter(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += splitter.feed(stream[start:end])
    assert got == payloads and splitter.between_frames


@given(st.binary(min_size=1, max_size=50), st.integers(1, 54))
def test_a_frame_that_is_not_whole_is_not_delivered(payload: bytes, cut: int):
    splitter = Splitter()
    assert splitter.feed(frame(payload)[:-cut][: len(payload) + 4]) == []


@pytest.mark.parametrize("stray", [b"GET / HTTP/1.1\r\n", b"\x00", b"\x16\x03\x01", b"SSH-2.0-OpenSSH"])
def test_a_foreign_peer_is_recognised_by_its_first_byte(stray: bytes):
    with pytest.raises(FrameError, match="version"):
        Splitter().feed(stray[:1])


def test_a_frame_beyond_the_limit_is_refused_before_it_arrives():
    with pytest.raises(FrameError, match="limit is 4096"):
        Splitter(limit=4096).feed(struct.pack("<BI", VERSION, 4097))
    with pytest.raises(FrameError, match="limit"):
        Splitter().feed(struct.pack("<BI", VERSION, MAX_FRAME + 1))


def test_a_payload_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frames, "MAX_FRAME", 10)
    assert len(frame(bytes(10))) == 15
    with pytest.raises(FrameError, match="11 bytes exceeds"):
        frame(bytes(11))
