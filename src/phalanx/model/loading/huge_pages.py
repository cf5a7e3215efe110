"""Allocates weights in large blocks, so that huge pages hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from phalanx.kernels import install

BLOCK = 64 << 20
"""Bytes of an allocation that many tensors share."""
ALIGNMENT = 64  # bytes: a cache line. Tensors start at multiples of it


class HugePages:
    """Memory for tensors that keep their stored dtype, many in one block.

    A tensor with memory of its own starts and ends inside a huge page, so a tensor of 2 MB gets none. Reading from
    pages of 4 KB, each with an address lookup of its own, is a fifth slower (docs/log/kernels-memory.md).
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """
        Args:
            sizes: bytes of each tensor, in the order of the calls of `buffer`.
        """
        self._sizes = {name: size for name, size in sizes.items() if 0 < size <= BLOCK and install.active()}
        self._block: mx.array | None = None
        self._offset = 0

    def buffer(self, name: str, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """An evaluated array for a tensor, for the caller to fill. Changes state."""
        if name not in self._sizes:
            return install.buffer(shape, dtype)
        if self._block is None or self._offset == self._block.nbytes:
            self._block, self._offset = install.buffer([self._next_block_bytes()], mx.uint8), 0
        size = self._sizes.pop(name)
        array = self._block[self._offset : self._offset + size].view(dtype).reshape(shape)
        mx.eval(array)
        self._offset += _aligned(size)
        return array

    def _next_block_bytes(self) -> int:
        """Bytes of as many of the next tensors as fit in a block."""
        total = 0
        for size in self._sizes.values():
            if total + _aligned(size) > BLOCK:
                break
            total += _aligned(size)
        return total


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
