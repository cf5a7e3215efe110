"""The memory of rows: buffers `[rows, heads, tokens, dim]`, and how they are allocated, written, cleared and exchanged.

With the native kernels a buffer is a region: address space, reserved once. A page becomes memory when a token is
written to it, an ended row returns its pages, and rows are swapped by remapping pages (`native/ext/region.h`). MLX must
never write to a region, because it would silently copy all of it; a native operation writes in place, or raises.
Without native kernels a buffer is an MLX array, wholly in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from phalanx.kernels import install


def in_pages() -> bool:
    """Whether buffers are regions."""
    return install.operations() is not None


def can_reserve(buffers: Iterable[tuple[Sequence[int], mx.Dtype]]) -> bool:
    """Whether the system grants address space for all these buffers together."""
    if (ops := install.operations()) is None:
        return False
    regions: list[mx.array] = []
    try:
        regions.extend(ops.reserve(list(shape), dtype) for shape, dtype in buffers)
    except RuntimeError:
        return False
    return True


def allocate(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """A buffer of zeros, evaluated.

    Raises:
        RuntimeError: the system refuses the address space.
    """
    if (ops := install.operations()) is not None:
        return ops.reserve(list(shape), dtype)
    zeros = mx.zeros(shape, dtype)
    mx.eval(zeros)
    return zeros


def write(buffer: mx.array, new: mx.array, first: int, start: int = 0) -> None:
    """Write `new` [n, heads, L, dim] to tokens `[start, start + L)` of rows `[first, first + n)`. A region is written
    at once, another buffer when it is evaluated: in place if nothing else refers to it."""
    if (ops := install.operations()) is not None:
        mx.eval(ops.write_rows(buffer, new, start, first))
    else:
        buffer[first : first + new.shape[0], :, start : start + new.shape[2]] = new


def clear(buffer: mx.array, row: int, length: int) -> None:
    """Zero a row whose first `length` tokens were written; in a region, return all its pages."""
    if (ops := install.operations()) is not None:
        ops.clear_row(buffer, row)
    else:
        buffer[row : row + 1, :, :length] = mx.array(0, buffer.dtype)


def swap(region: mx.array, a: int, b: int, length: int) -> None:
    """Exchange two rows of an evaluated region; at most their first `length` tokens were written."""
    ops = install.operations()
    assert ops is not None, "MLX's arrays have no pages"
    ops.swap_rows(region, a, b, length)
