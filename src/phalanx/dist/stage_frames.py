"""Frames of hidden states between pipeline stages: their header, and the receiver's checks. Bytes in, bytes out.

A stage sends the output of each forward to the next stage, whole or in slices, once its own all-reduces are checked.
The header has two checksums, one of itself and one of the payload. The receiver knows the frames and their order from
the plan: any other frame is a named error and ends the group.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import deque
from typing import NamedTuple

from msgspec import Struct

from phalanx.errors import (
    FrameCorrupted,
    FrameLate,
    FrameLost,
    FrameMismatch,
    FrameRepeated,
    StageLinkError,
)

MAGIC = b"PXS1"  # its digit is the version of this layout
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element; a header has the dtype's index here."""
_FIELDS = struct.Struct("<4sQII B 3I QI")  # magic; step, forward, slice; dtype; shape; bytes, CRC of payload
_CRC = struct.Struct("<I")  # of the fields
HEADER_BYTES = _FIELDS.size + _CRC.size

Payload = bytes | bytearray | memoryview


class Frame(Struct, frozen=True):
    """Identifies a frame's hidden states."""

    step: int
    forward: int  # of the step
    slice: int  # of the forward
    dtype: str  # one of DTYPES
    shape: tuple[int, int, int]  # rows, tokens, width of the model

    @property
    def n_bytes(self) -> int:
        """Bytes of the payload."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def place(self) -> tuple[int, int, int]:
        """The frames of a link are in this order."""
        return self.step, self.forward, self.slice

    def __str__(self) -> str:
        return f"step {self.step}, forward {self.forward}, slice {self.slice}"


class Header(NamedTuple):
    """A decoded header."""

    frame: Frame
    checksum: int  # of the payload


def encode(frame: Frame, payload: Payload) -> bytes:
    """The header of a frame, [HEADER_BYTES]; the payload is sent after it as it is."""
    if len(payload) != frame.n_bytes:
        raise ValueError(f"a payload of {len(payload)} bytes is not {frame.dtype} {list(frame.shape)}")
    dtype = list(DTYPES).index(frame.dtype)
    crc = zlib.crc32(payload)
    fields = _FIELDS.pack(MAGIC, *frame.place, dtype, *frame.shape, len(payload), crc)
    return fields + _CRC.pack(zlib.crc32(fields))


def decode(header: bytes, link: str) -> Header:
    """The contents of a header, [HEADER_BYTES].

    Args:
        link: names both ends, for errors.

    Raises:
        FrameCorrupted: the header was changed on the way.
        StageLinkError: the header has another layout.
    """
    fields, (own_crc,) = header[: _FIELDS.size], _CRC.unpack_from(header, _FIELDS.size)
    if zlib.crc32(fields) != own_crc:
        raise FrameCorrupted(f"{link}: a frame's header was corrupted on the way: its checksum is wrong.")
    magic, step, forward, slice_, dtype, *shape, n_bytes, crc = _FIELDS.unpack(fields)
    if magic != MAGIC or dtype >= len(DTYPES):
        raise StageLinkError(f"{link}: frames of another version arrive; one begins with {bytes(fields[:24])!r}.")
    rows, tokens, width = shape
    frame = Frame(step, forward, slice_, list(DTYPES)[dtype], (rows, tokens, width))
    if n_bytes != frame.n_bytes:
        raise StageLinkError(f"{link}: the frame of {frame} announces {n_bytes} bytes; its shape has {frame.n_bytes}.")
    return Header(frame, crc)


class FrameSequence:
    """The receiver's check: one link's expected frames, in order.

    For each frame: `expect` when the plan arrives, `begin` with its header, `end` with its payload. All raise errors
    that name the link and the frame; after one, the link is unusable.

    Args:
        link: names both ends, for errors.
    """

    def __init__(self, link: str) -> None:
        self._link = link
        self._expected: deque[tuple[Frame, float]] = deque()  # with the latest time of arrival of each
        self._last: tuple[int, int, int] = (-1, 0, 0)  # the place of the last frame that was expected
        self._arriving: Header | None = None

    def expect(self, frame: Frame, due: float) -> None:
        """Expect a frame, after those expected before. Changes state.

        Args:
            due: its latest time of arrival.
        """
        if frame.place <= self._last:
            raise ValueError(f"{self._link}: {frame} does not follow {self._last}")
        self._expected.append((frame, due))
        self._last = frame.place

    def begin(self, header: bytes) -> int:
        """Check an arriving header, which must be the next expected frame's. Changes state.

        Returns:
            The bytes of payload that follow.

        Raises:
            FrameCorrupted, StageLinkError: as `decode`.
            FrameRepeated: the frame came before.
            FrameLost: a later frame came.
            FrameMismatch: no such frame was planned, or its dtype or shape is not the plan's.
        """
        arriving = decode(header, self._link)
        frame = arriving.frame
        if not self._expected:
            if frame.place <= self._last:
                raise FrameRepeated(f"{self._link}: the frame of {frame} came again.")
            raise FrameMismatch(f"{self._link}: the frame of {frame} is not planned.")
        expected = self._expected[0][0]
        if frame.place < expected.place:
            raise FrameRepeated(f"{self._link}: the frame of {frame} came again; that of {expected} was expected.")
        if frame.place > expected.place:
            raise FrameLost(f"{self._link}: the frame of {expected} was lost; that of {frame} came instead.")
        for name, sent, planned in (
            ("dtype", frame.dtype, expected.dtype),
            ("shape", list(frame.shape), list(expected.shape)),
        ):
            if sent != planned:
                raise FrameMismatch(f"{self._link}: the frame of {frame} has {name} {sent}, in the plan {planned}.")
        self._arriving = arriving
        return frame.n_bytes

    def end(self, payload: Payload) -> None:
        """Check the payload of the frame that `begin` accepted. Changes state.

        Raises:
            FrameCorrupted: the payload was changed on the way.
        """
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "a payload without a header"
        frame, checksum = arriving
        if len(payload) != frame.n_bytes or zlib.crc32(payload) != checksum:
            raise FrameCorrupted(f"{self._link}: the frame of {frame} was corrupted on the way: its checksum is wrong.")
        self._expected.popleft()

    def check_time(self, now: float) -> None:
        """Raise `FrameLate` if the next frame is overdue."""
        if self._expected and now >= self._expected[0][1]:
            raise FrameLate(f"{self._link}: the frame of {self._expected[0][0]} did not come in time.")
