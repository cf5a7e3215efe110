"""Parses the header of a GGUF file, which a stranger may have written: each count is compared with the file's bytes
before anything of that size is made (format: the specification of GGUF in the repository of ggml).

Memory stays in proportion to the bytes that are read. Numbers are little-endian, as on every machine that MLX runs on.
"""

from __future__ import annotations

import array
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phalanx.errors import ModelUnsupported, WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
MAX_NESTING = 4  # of arrays in arrays; no known file nests any
MAX_KEY = 65535  # bytes; of the format
MAX_VALUES = 1 << 53  # of a tensor
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
DAMAGED = "Download or copy the file again."

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its code in `struct` and `array`."""


class BlockType(NamedTuple):
    """How weights of a type are stored: in blocks of `values` weights, each of `nbytes` bytes."""

    name: str
    values: int
    nbytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 36), 10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292), 16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98), 19: BlockType("IQ1_S", 256, 50), 20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110), 22: BlockType("IQ2_S", 256, 82), 23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1), 25: BlockType("I16", 1, 2), 26: BlockType("I32", 1, 4), 27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8), 29: BlockType("IQ1_M", 256, 56), 30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54), 35: BlockType("TQ2_0", 256, 66), 39: BlockType("MXFP4", 32, 17),
}  # fmt: skip


class GgufTensor(NamedTuple):
    """A tensor: `nbytes` bytes of a file from `start` on, row-major."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # outermost axis first, as MLX has it
    start: int
    nbytes: int
    part: int = 0  # which file of its model, from 0 on


class GgufHeader(NamedTuple):
    """The content of a file but for the weights."""

    metadata: dict[str, Any]  # numbers, bools, strings, lists of strings, `array.array` of numbers
    tensors: tuple[GgufTensor, ...]  # in the order of the file


def parse_header(name: str, size: int, read: Callable[[int], bytes]) -> GgufHeader:
    """Parse a header.

    Args:
        name: of the file, for errors.
        size: of the file, in bytes.
        read: returns the next bytes of the file, as many as asked for.

    Raises:
        WeightsError: the file is damaged, or not GGUF; names the fault.
        ModelUnsupported: it has another version, or another byte order.
    """
    source = _Source(name, size, read)
    if size < len(MAGIC) or source.take(4, "its magic") != MAGIC:
        raise WeightsError(f"{name} is not a GGUF file ({size} bytes).", remedy=DAMAGED)
    version = source.number("I", "its version")
    if version not in VERSIONS:
        swapped = version == int.from_bytes(VERSIONS[1].to_bytes(4, "big"), "little")
        raise ModelUnsupported(
            f"{name} is GGUF {'of big-endian machines' if swapped else f'of version {version}'}; read are {VERSIONS}.",
            remedy="Make it again with a recent llama.cpp.",
        )
    n_tensors = source.count(4 + 8 + 8 + 4 + 8, "tensors")
    n_values = source.count(8 + 4 + 1, "values of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        key = source.string("a key", MAX_KEY)
        if key in metadata:
            raise source.damaged(f"the key {shown(key)} is there twice")
        metadata[key] = source.value(source.number("I", "a type"), shown(key))
    infos = [_tensor(source) for _ in range(n_tensors)]
    return GgufHeader(metadata, _placed(source, infos, _alignment(source, metadata)))


def shown(text: str) -> str:
    """A string of the file as a part of one line."""
    return repr(text if len(text) <= 64 else f"{text[:64]}...")


class _Source:
    """The rest of the file."""

    def __init__(self, name: str, size: int, read: Callable[[int], bytes]) -> None:
        self.name = name
        self.size = size
        self.left = size
        self._read = read

    def damaged(self, fault: str) -> WeightsError:
        return WeightsError(f"{self.name} is damaged: {fault}.", remedy=DAMAGED)

    def take(self, n: int, what: str) -> bytes:
        if n > self.left:
            raise self.damaged(f"{what} has {n} bytes, but the file ends after {self.left}")
        found = self._read(n)
        if len(found) != n:
            raise self.damaged(f"it ends inside {what}")
        self.left -= n
        return found

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def count(self, least: int, what: str) -> int:
        """A count of things that take at least `least` bytes each."""
        found: int = self.number("Q", f"the number of {what}")
        if found * least > self.left:
            raise self.damaged(f"it says to have {found} {what}, but only {self.left} bytes are left")
        return found

    def string(self, what: str, most: int) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > most:
            raise self.damaged(f"{what} says to be {length} bytes long")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string(what, self.size)
        if kind in NUMBERS:
            found = self.number(NUMBERS[kind], what)
            return bool(found) if kind == BOOL else found
        if kind != ARRAY or depth >= MAX_NESTING:
            fault = "nests arrays too deep" if kind == ARRAY else f"has type {kind}, which GGUF does not have"
            raise self.damaged(f"{what} {fault}")
        kind = self.number("I", what)
        if kind in NUMBERS:
            numbers = array.array(NUMBERS[kind])
            n = self.count(numbers.itemsize, f"elements in {what}")
            numbers.frombytes(self.take(n * numbers.itemsize, what))
            return numbers
        n = self.count(12 if kind == ARRAY else 8, f"elements in {what}")
        return [self.value(kind, what, depth + 1) for _ in range(n)]


class _Info(NamedTuple):
    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int


def _tensor(source: _Source) -> _Info:
    name = source.string("a tensor's name", MAX_KEY)
    axes = source.number("I", f"tensor {shown(name)}")
    if not 1 <= axes <= MAX_AXES:
        raise source.damaged(f"tensor {shown(name)} has {axes} axes")
    shape = struct.unpack(f"<{axes}Q", source.take(8 * axes, f"the shape of {shown(name)}"))
    kind, offset = source.number("I", f"tensor {shown(name)}"), source.number("Q", f"tensor {shown(name)}")
    if kind not in BLOCK_TYPES:
        raise source.damaged(f"tensor {shown(name)} has type {kind}, which GGUF does not have")
    if not 0 < math.prod(shape) <= MAX_VALUES:
        raise source.damaged(f"tensor {shown(name)} has the shape {shape}")
    found = BLOCK_TYPES[kind]
    if shape[0] % found.values:
        raise source.damaged(f"tensor {shown(name)} has rows of {shape[0]}, {found.name} has blocks of {found.values}")
    return _Info(name, found, tuple(reversed(shape)), offset)


def _alignment(source: _Source, metadata: Mapping[str, Any]) -> int:
    found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(found) is not int or not 8 <= found <= MAX_ALIGNMENT or found & (found - 1):
        raise source.damaged(f"general.alignment is {shown(str(found))}")
    return found


def _placed(source: _Source, infos: list[_Info], alignment: int) -> tuple[GgufTensor, ...]:
    """The tensors by their place in the file.

    Raises:
        WeightsError: two overlap or have one name, or one is not aligned or not in the file.
    """
    base = -(-(source.size - source.left) // alignment) * alignment
    end, names, tensors = base, set(), []
    for name, kind, shape, offset in sorted(infos, key=lambda info: info.offset):
        nbytes = math.prod(shape) // kind.values * kind.nbytes
        start = base + offset
        if name in names:
            raise source.damaged(f"tensor {shown(name)} is there twice")
        if offset % alignment:
            raise source.damaged(f"tensor {shown(name)} starts at {offset}, which is not aligned to {alignment}")
        if start < end:
            raise source.damaged(f"tensor {shown(name)} overlaps another")
        if start + nbytes > source.size:
            raise source.damaged(f"tensor {shown(name)} ends at {start + nbytes}, the file at {source.size}")
        names.add(name)
        end = start + nbytes
        tensors.append(GgufTensor(name, kind, shape, start, nbytes))
    return tuple(tensors)
