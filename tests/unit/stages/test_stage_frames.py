"""Nothing that can happen to a frame between two stages goes unnoticed, and each fault has its own name (P3)."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace
from support.examples import examples

from phalanx.dist.stage_frames import DTYPES, HEADER_BYTES, MAGIC, Frame, FrameSequence, decode, encode
from phalanx.errors import (
    ExitCode,
    FrameCorrupted,
    FrameLate,
    FrameLost,
    FrameMismatch,
    FrameRepeated,
    StageLinkError,
    exit_code_of,
)

LINK = "rank 1 (stage 0) to rank 0 (stage 1)"
FRAME = Frame(step=7, forward=1, slice=2, dtype="float16", shape=(2, 3, 4))
PAYLOAD = bytes(range(48))

small = st.integers(0, 6)
frames = st.builds(
    Frame,
    step=st.integers(0, 1 << 40),
    forward=small,
    slice=small,
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.tuples(small, small, small),
)


def expecting(*expected: Frame) -> FrameSequence:
    sequence = FrameSequence(LINK)
    for frame in expected:
        sequence.expect(frame, due=10.0)
    return sequence


def receive(sequence: FrameSequence, header: bytes, payload: bytes) -> None:
    assert sequence.begin(header) == len(payload)
    sequence.end(payload)


def payload_of(frame: Frame) -> bytes:
    return bytes(i % 251 for i in range(frame.n_bytes))


@given(frames)
def test_a_header_is_read_as_it_was_written(frame: Frame):
    header = encode(frame, payload_of(frame))
    assert len(header) == HEADER_BYTES
    assert decode(header, LINK).frame == frame


@given(st.lists(frames, min_size=1, max_size=8, unique_by=lambda frame: frame.place))
def test_planned_frames_pass_in_order(frames: list[Frame]):
    frames.sort(key=lambda frame: frame.place)
    sequence = expecting(*frames)
    for frame in frames:
        receive(sequence, encode(frame, payload_of(frame)), payload_of(frame))
    sequence.check_time(99.0)


def test_every_bit_of_the_header_is_guarded():
    header = encode(FRAME, PAYLOAD)
    for bit in range(8 * HEADER_BYTES):
        with pytest.raises(FrameCorrupted, match="header was corrupted") as caught:
            expecting(FRAME).begin(flipped(header, bit))
        assert str(caught.value).startswith(LINK)


def test_every_bit_of_the_payload_is_guarded():
    for bit in range(8 * len(PAYLOAD)):
        sequence = expecting(FRAME)
        sequence.begin(encode(FRAME, PAYLOAD))
        with pytest.raises(FrameCorrupted, match=f"{FRAME} was corrupted") as caught:
            sequence.end(flipped(PAYLOAD, bit))
        assert str(caught.value).startswith(LINK) and exit_code_of(caught.value) is ExitCode.NUMERIC


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@examples(100, soak=2000)
@given(st.data())
def test_bytes_that_are_exchanged_cut_or_garbled_are_noticed(data: st.DataObject):
    garbled = data.draw(st.one_of(st.permutations(PAYLOAD).map(bytes), st.binary(min_size=48, max_size=48)))
    cut = data.draw(st.integers(0, 47))
    for payload in (garbled, PAYLOAD[:cut], PAYLOAD + PAYLOAD[:1]):
        sequence = expecting(FRAME)
        sequence.begin(encode(FRAME, PAYLOAD))
        if payload == PAYLOAD:
            continue
        with pytest.raises(FrameCorrupted):
            sequence.end(payload)


@examples(200, soak=5000)
@given(frames, frames, st.lists(frames, max_size=4))
def test_a_frame_in_the_place_of_another_is_named_by_how_it_differs(sent: Frame, expected: Frame, later: list[Frame]):
    behind = {frame.place: frame for frame in later if frame.place > expected.place}
    sequence = expecting(expected, *(behind[place] for place in sorted(behind)))
    payload = payload_of(sent)
    header = encode(sent, payload)
    if sent == expected:
        receive(sequence, header, payload)
        return
    if sent.place != expected.place:
        kind = FrameRepeated if sent.place < expected.place else FrameLost
    else:
        kind = FrameMismatch
    with pytest.raises(kind, match=f"the frame of {sent}|that of {sent}") as caught:
        sequence.begin(header)
    assert type(caught.value) is kind and str(caught.value).startswith(LINK)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"step": 6}, FrameRepeated, "step 6, forward 1, slice 2 came again; that of step 7, forward 1, slice 2"),
        ({"step": 8}, FrameLost, "step 7, forward 1, slice 2 was lost; that of step 8, forward 1, slice 2 came"),
        ({"forward": 0}, FrameRepeated, "step 7, forward 0"),
        ({"forward": 2}, FrameLost, "step 7, forward 2"),
        ({"slice": 1}, FrameRepeated, "slice 1 came again"),
        ({"slice": 3}, FrameLost, "slice 2 was lost; that of step 7, forward 1, slice 3"),
        ({"dtype": "bfloat16"}, FrameMismatch, "has dtype bfloat16, in the plan float16"),
        ({"shape": (3, 2, 4)}, FrameMismatch, r"has shape \[3, 2, 4\], in the plan \[2, 3, 4\]"),
    ],
)
def test_every_field_that_differs_has_its_error(change: dict, kind: type[Exception], said: str):
    assert change.keys() <= asdict(FRAME).keys()
    with pytest.raises(kind, match=said):
        expecting(FRAME).begin(encode(replace(FRAME, **change), PAYLOAD))


def resealed(offset: int, value: bytes) -> bytes:
    """The header with one field changed, and a checksum that is right again: not what `encode` writes."""
    fields = bytearray(encode(FRAME, PAYLOAD)[:-4])
    fields[offset : offset + len(value)] = value
    return bytes(fields) + struct.pack("<I", zlib.crc32(fields))


@pytest.mark.parametrize(
    ("offset", "value", "said"),
    [
        (0, b"PXS2", "frames of another version arrive"),
        (20, bytes([len(DTYPES)]), "frames of another version arrive"),
        (33, struct.pack("<Q", 47), "announces 47 bytes; its shape has 48"),
    ],
)
def test_a_header_of_another_layout_is_refused(offset: int, value: bytes, said: str):
    assert resealed(0, MAGIC) == encode(FRAME, PAYLOAD)
    with pytest.raises(StageLinkError, match=said) as caught:
        expecting(FRAME).begin(resealed(offset, value))
    assert exit_code_of(caught.value) == ExitCode.DESYNC


def test_a_repeated_last_frame_is_noticed_with_nothing_to_come():
    sequence = expecting(FRAME)
    receive(sequence, encode(FRAME, PAYLOAD), PAYLOAD)
    with pytest.raises(FrameRepeated, match="came again"):
        sequence.begin(encode(FRAME, PAYLOAD))
    with pytest.raises(FrameMismatch, match="is not planned"):
        sequence.begin(encode(replace(FRAME, step=8), PAYLOAD))


def test_a_frame_is_late_from_its_time_on():
    sequence = FrameSequence(LINK)
    sequence.check_time(1e9)
    sequence.expect(FRAME, due=5.0)
    sequence.expect(replace(FRAME, step=8), due=6.0)
    sequence.check_time(4.9)
    with pytest.raises(FrameLate, match=f"{FRAME} did not come in time") as caught:
        sequence.check_time(5.0)
    assert exit_code_of(caught.value) is ExitCode.STALLED
    receive(sequence, encode(FRAME, PAYLOAD), PAYLOAD)
    sequence.check_time(5.9)
    with pytest.raises(FrameLate):
        sequence.check_time(6.0)


def test_callers_mistakes():
    with pytest.raises(ValueError, match=r"47 bytes is not float16 \[2, 3, 4\]"):
        encode(FRAME, PAYLOAD[:47])
    with pytest.raises(ValueError, match="does not follow"):
        expecting(FRAME, FRAME)
