"""The index of a rank's blocks on disk, as a log of writes, drops and uses, each a frame with a checksum.

Reading stops at the first damaged or truncated frame; the blocks named after it are lost, which costs a prefill. Does
not know files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from phalanx.sched.plan import DiskBlock

FORMAT = 1
"""Version of a store's files. A store of another version starts empty."""
_HEADER = struct.Struct("<II")  # bytes of the payload, its CRC-32


class StoreHeader(Struct, frozen=True, array_like=True, tag=0):
    """The first record: blocks of another format or identity are unusable."""

    format: int
    identity: str  # hash of everything that determines the KV in the blocks
    secret: bytes  # of this installation, for block names


class Put(Struct, frozen=True, array_like=True, tag=1):
    """A block was written."""

    block: DiskBlock
    slot: int
    size: int  # bytes
    crc: int


class Drop(Struct, frozen=True, array_like=True, tag=2):
    """These blocks were dropped; their slots are free."""

    names: tuple[bytes, ...]


class Use(Struct, frozen=True, array_like=True, tag=3):
    """These blocks were used."""

    names: tuple[bytes, ...]


Record = StoreHeader | Put | Drop | Use
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """The frame of a record."""
    payload = _encoder.encode(record)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def records(log: bytes) -> Iterator[tuple[Record, int]]:
    """The records of a log up to the first damaged one, each with its end offset."""
    place, view = 0, memoryview(log)
    while place + _HEADER.size <= len(log):
        size, crc = _HEADER.unpack_from(log, place)
        end = place + _HEADER.size + size
        payload = view[place + _HEADER.size : end]
        if end > len(log) or zlib.crc32(payload) != crc:
            return
        try:
            record = _decoder.decode(payload)
        except msgspec.MsgspecError:
            return
        yield record, end
        place = end
