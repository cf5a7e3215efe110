"""Where weights lie: together, so that huge pages hold them. Does not know models or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from phalanx.kernels import install

BLOCK = 64 << 20
"""Bytes of memory for many tensors that are asked for at once."""
LINE = 64  # bytes, of which a block is a multiple; tensors begin at multiples


class HugePages:
    """Memory for tensors that are kept as they are stored, many in one piece.

    A tensor with memory of its own begins and ends within a huge page, so one of 2 MB has none; and a processor that
    looks up every 4 KB where they are reads a fifth slower (docs/log/kernels-memory.md).
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """
        Args:
            sizes: bytes of the tensors, in the order in which they will be asked for.
        """
        self._sizes = {name: size for name, size in sizes.items() if 0 < size <= BLOCK and install.active()}
        self._block: mx.array | None = None
        self._at = 0

    def buffer(self, name: str, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """An evaluated array for a tensor, to be filled from outside. Changes state."""
        if name not in self._sizes:
            return install.buffer(shape, dtype)
        if self._block is None or self._at == self._block.nbytes:
            self._block, self._at = install.buffer([self._together()], mx.uint8), 0
        size = self._sizes.pop(name)
        array = self._block[self._at : self._at + size].view(dtype).reshape(shape)
        mx.eval(array)
        self._at += _lines(size)
        return array

    def _together(self) -> int:
        """Bytes of the tensors that come next, as many as a block has room for."""
        total = 0
        for size in self._sizes.values():
            if total + _lines(size) > BLOCK:
                break
            total += _lines(size)
        return total


def _lines(size: int) -> int:
    return -(-size // LINE) * LINE
