"""Headers of GGUF files: what is read, and that each fault is one line, at once and in little memory."""

from __future__ import annotations

import array
import contextlib
import io
import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.gguf_files import gguf, header, tensor, text, value

from phalanx.errors import ModelError, ModelUnsupported, WeightsError
from phalanx.model.gguf.gguf_header import GgufHeader, parse_header

HUGE = 1 << 60
F32 = np.arange(8, dtype=np.float32)


def parse(data: bytes) -> GgufHeader:
    return parse_header("x.gguf", len(data), io.BytesIO(data).read)


def whole() -> bytes:
    metadata = {
        "general.architecture": "llama", "a": 7, "b": -0.5, "c": True, "d": ["x", "yé"],
        "e": array.array("i", [1, -2, 3]), "general.alignment": 64,
    }  # fmt: skip
    tensors = {"m": ("Q8_0", np.zeros((2, 3, 34), np.uint8)), "v": ("F32", F32)}
    return gguf(metadata, tensors, 64)


def test_a_header_is_read_as_it_was_written():
    data = whole()
    found = parse(data)
    assert found.metadata == {
        "general.architecture": "llama", "a": 7, "b": -0.5, "c": True, "d": ["x", "yé"],
        "e": array.array("i", [1, -2, 3]), "general.alignment": 64,
    }  # fmt: skip
    m, v = found.tensors
    assert (m.name, m.type.name, m.shape, m.nbytes) == ("m", "Q8_0", (2, 96), 2 * 3 * 34)
    assert (v.name, v.type.name, v.shape) == ("v", "F32", (8,)) and m.start % 64 == v.start % 64 == 0
    assert data[v.start : v.start + v.nbytes] == F32.tobytes()


def test_arrays_in_arrays_and_version_2():
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 5, 6)
    nested = struct.pack("<IIQ", 9, 9, 1) + inner
    assert parse(header([text("k") + nested], [], version=2)).metadata == {"k": [array.array("I", [5, 6])]}


def one(entry: bytes) -> bytes:
    """A file with one tensor, and 64 bytes of weights."""
    start = header([], [entry])
    return start + bytes(-len(start) % 32) + bytes(64)


def two(a: bytes, b: bytes) -> bytes:
    start = header([], [a, b])
    return start + bytes(-len(start) % 32) + bytes(64)


def deep(levels: int) -> bytes:
    return text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * levels + struct.pack("<IQ", 4, 0)


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"is not a GGUF file \(0 bytes\)"),
    "foreign magic": (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
    "version": (header([], [], version=1), "of version 1"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "of big-endian machines"),
    "cut in the counts": (header([], [])[:12], "the number of tensors has 8 bytes, but the file ends after 4"),
    "absurd tensors": (struct.pack("<4sIQQ", b"GGUF", 3, HUGE, 0), f"{HUGE} tensors, but only 8 bytes are left"),
    "absurd metadata": (struct.pack("<4sIQQ", b"GGUF", 3, 0, HUGE), f"{HUGE} values of metadata"),
    "long key": (header([struct.pack("<Q", 70000) + bytes(70000)], []), "a key says to be 70000 bytes long"),
    "long string": (header([text("k") + struct.pack("<IQ", 8, HUGE)], []), rf"'k' says to be {HUGE} bytes long"),
    "string past the end": (header([text("k") + struct.pack("<IQ", 8, 20)], []), "'k' has 20 bytes, but"),
    "not UTF-8": (header([text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"], []), "'k' is not UTF-8"),
    "key twice": (header([text("k") + value(1)] * 2, []), "the key 'k' is there twice"),
    "type of value": (header([text("k") + struct.pack("<IQ", 13, 0)], []), "'k' has type 13, which GGUF does not"),
    "absurd array": (header([text("k") + struct.pack("<IIQ", 9, 0, HUGE)], []), f"{HUGE} elements in 'k'"),
    "absurd strings": (header([text("k") + struct.pack("<IIQ", 9, 8, HUGE)], []), f"{HUGE} elements in 'k'"),
    "deep": (header([deep(100)], []), "'k' nests arrays too deep"),
    "no axes": (one(tensor("t", 0, (), 0) + bytes(8)), "'t' has 0 axes"),
    "many axes": (one(tensor("t", 0, (1,) * 9, 0)), "'t' has 9 axes"),
    "no weights": (one(tensor("t", 0, (0, 4), 0)), r"'t' has the shape \(4, 0\)"),
    "absurd shape": (one(tensor("t", 0, (HUGE, HUGE), 0)), "'t' has the shape"),
    "type of tensor": (one(tensor("t", 77, (4,), 0)), "'t' has type 77, which GGUF does not have"),
    "removed type": (one(tensor("t", 4, (32,), 0)), "'t' has type 4, which GGUF does not have"),
    "half a block": (one(tensor("t", 8, (2, 48), 0)), "'t' has rows of 48, Q8_0 has blocks of 32"),
    "not aligned": (one(tensor("t", 0, (2,), 4)), "'t' starts at 4, which is not aligned to 32"),
    "past the end": (one(tensor("t", 0, (17,), 0)), r"'t' ends at \d+, the file at \d+"),
    "absurd offset": (one(tensor("t", 0, (1,), HUGE)), f"'t' ends at {HUGE}"[:12]),
    "overlap": (two(tensor("a", 0, (9,), 0), tensor("b", 0, (1,), 32)), "'b' overlaps another"),
    "name twice": (two(tensor("a", 0, (8,), 0), tensor("a", 0, (8,), 32)), "'a' is there twice"),
    "alignment": (header([text("general.alignment") + value(48)], []), "general.alignment is '48'"),
    "alignment of 0": (header([text("general.alignment") + value(0)], []), "general.alignment is '0'"),
    "name of two lines": (one(tensor("t\n\x1b[2J", 77, (4,), 0)), r"'t\\n\\x1b\[2J' has type 77"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_that_names_it(fault: str):
    data, match = FAULTS[fault]
    with pytest.raises(WeightsError if fault not in ("version", "big-endian") else ModelUnsupported) as raised:
        bounded(parse, data)
    raised.match(match)
    said = str(raised.value)
    assert said.startswith("x.gguf ") and "\n" not in said and said.isprintable() and raised.value.remedy


def test_a_file_that_is_cut_anywhere_is_damaged():
    data = whole()
    last = parse(data).tensors[-1]
    for end in range(last.start + last.nbytes):  # behind it there is only what fills the last 64 bytes
        with pytest.raises(WeightsError):
            parse(data[:end])


def test_a_file_that_becomes_shorter_while_it_is_read():
    data = whole()
    with pytest.raises(WeightsError, match="it ends inside"):
        parse_header("x.gguf", len(data), io.BytesIO(data[:60]).read)


def bounded(act: Callable[[bytes], object], data: bytes) -> None:
    """Python's objects take some times the bytes that they are read from; a count alone takes nothing."""
    tracemalloc.start()
    try:
        act(data)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 32 * len(data) + (64 << 10), peak


EXTREMES = [0, 1, 2, 8, 9, 255, 1 << 16, (1 << 31) - 1, 1 << 32, HUGE, (1 << 64) - 1]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(whole())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                data[at] = draw(st.integers(0, 255))
            case 1:
                data[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(EXTREMES)))
            case 2:
                del data[at : at + draw(st.integers(1, 40))]
            case _:
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
        if not data:
            break
    return bytes(data)


@pytest.mark.grows
@examples(1000, soak=10_000)
@given(mutated())
def test_mutations_are_read_or_refused_in_one_line(data: bytes):
    def act(data: bytes) -> None:
        for found in parse(data).tensors:
            assert found.start >= 0 and found.start + found.nbytes <= len(data)

    with contextlib.suppress(ModelError):
        try:
            bounded(act, data)
        except ModelError as error:
            assert str(error).isprintable() and len(str(error)) < 400
            raise
