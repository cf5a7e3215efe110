"""Checksums of vectors: appended before an all-reduce and checked after it.

A checksum is the dot product of a vector with random signs: one number in float32, two (high and low) in 16 bits. The
checksum of a sum is the sum of the checksums. It is followed by the vector's magnitude, which bounds the rounding error
of the checksum, and the tag, a small integer that is the same on all ranks. A magnitude that is NaN or negative is a
fault. One that is too large would hide faults, so the tag comes last: a fault that corrupts the end of a vector and the
magnitude corrupts the tag too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import mlx.core as mx


class Checksum(Protocol):
    """An implementation of checksums; all give the same numbers up to rounding."""

    def encode(self, y: mx.array, signs: mx.array, tag: mx.array) -> mx.array:
        """y [rows, width] with its checksum, magnitude and tag: [rows, width + 3], [rows, width + 4] in 16 bits.

        Args:
            signs: [width], +-1 / sqrt(width), so that a checksum is as large as an element.
            tag: an evaluated float32.
        """

    def decode(self, wire: mx.array, signs: mx.array) -> tuple[mx.array, mx.array]:
        """Split a sum of encoded vectors.

        Returns:
            The sum [rows, width], and its figures [rows, 3]: the difference between its checksum and the received
            one, the sum of magnitudes, and the sum of tags (NaN if an element or the magnitude is not finite).
        """

    def judge(self, figures: mx.array, limits: mx.array, tag: mx.array, flag: int) -> mx.array:
        """[sites]: 0.0 for each site without a wrong sum, else `flag`.

        Args:
            figures: [sites * rows, 3], from `decode`.
            limits: [sites, 2]: the largest difference by rounding, as a * magnitude + b.
            tag: the expected sum of tags.
        """


class ComposedChecksum:
    """A checksum of MLX's own operations, which `mx.compile` fuses on a GPU: 5 kernels before an all-reduce, 3 after.

    It multiplies and adds without matrix products, whose float32 operands GPUs round to 10 bits (TF32, on by default in
    MLX), far beyond the tolerance.
    """

    def __init__(self) -> None:
        self._columns = {n: mx.arange(n) for n in (2, 3, 4)}
        self._weights: dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array, mx.array]] = {}
        mx.eval(self._columns)

    def encode(self, y: mx.array, signs: mx.array, tag: mx.array) -> mx.array:
        _, width, _ = self._weights_of(signs, y.dtype)
        checksum, square = _products(y, signs, self._columns[2][:, None, None])
        return _append(y, checksum, square, width, tag, self._columns[3 if y.dtype == mx.float32 else 4])

    def decode(self, wire: mx.array, signs: mx.array) -> tuple[mx.array, mx.array]:
        _, _, weights = self._weights_of(signs, wire.dtype)
        figures = _figures(wire, wire[:, -2:-1], wire[:, -1:], weights, self._columns[3])
        return wire[:, : signs.shape[0]], figures

    def judge(self, figures: mx.array, limits: mx.array, tag: mx.array, flag: int) -> mx.array:
        rows = figures.reshape(limits.shape[0], -1, 3)
        residuals, magnitudes, tags = rows[..., 0], rows[..., 1], rows[..., 2]
        limit = limits[:, :1] * magnitudes + limits[:, 1:]
        right = mx.logical_and(mx.abs(residuals) <= limit, tags == tag)
        return mx.where(mx.all(right, axis=1), 0.0, float(flag))

    def _weights_of(self, signs: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        """The signs, their number, and the weights of `wire`'s columns in the residual: [width + 3 or width + 4]."""
        key = (id(signs), dtype)  # the dictionary keeps `signs` alive, so its id is not used again
        if key not in self._weights:
            checksums = 1 if dtype == mx.float32 else 2
            weights = mx.concatenate([signs, mx.full(checksums, -1.0), mx.zeros(2)])
            width = mx.array(float(signs.shape[0]))
            mx.eval(weights, width)
            self._weights[key] = (signs, width, weights)
        return self._weights[key]


# Shapeless: prompts come in any number of rows, and MLX would keep one compiled function per shape. On a CPU the engine
# switches compilation off, and these are plain functions.


@partial(mx.compile, shapeless=True)
def _products(y: mx.array, signs: mx.array, which: mx.array) -> mx.array:
    """The checksum and the sum of squares of each row, by one reduction: [2, rows, 1].

    Args:
        which: 0 and 1, [2, 1, 1].
    """
    wide = y.astype(mx.float32)
    return mx.sum(wide * mx.where(which == 0, signs, wide), axis=-1, keepdims=True)


@partial(mx.compile, shapeless=True)
def _append(
    y: mx.array, checksum: mx.array, square: mx.array, width: mx.array, tag: mx.array, place: mx.array
) -> mx.array:
    """y [rows, width] with the columns of `Checksum.encode`; `place` numbers them."""
    magnitude = mx.sqrt(square) / width
    if y.dtype == mx.float32:
        return mx.concatenate([y, _joined([checksum, magnitude, tag], place)], axis=-1)
    high = checksum.astype(y.dtype).astype(mx.float32)
    return mx.concatenate([y, _joined([high, checksum - high, magnitude, tag], place).astype(y.dtype)], axis=-1)


@partial(mx.compile, shapeless=True)
def _figures(wire: mx.array, magnitude: mx.array, tag: mx.array, weights: mx.array, place: mx.array) -> mx.array:
    """The figures of `Checksum.decode`. The residual is not finite if an element or the magnitude is not: 0 * inf."""
    residual = mx.sum(wire.astype(mx.float32) * weights, axis=-1, keepdims=True)
    return _joined([residual, magnitude.astype(mx.float32), tag.astype(mx.float32) + 0.0 * residual], place)


def _joined(columns: Sequence[mx.array], place: mx.array) -> mx.array:
    """Columns [rows, 1] (or numbers) side by side, in one kernel; a concatenation takes one per column."""
    joined = columns[-1]
    for i in reversed(range(len(columns) - 1)):
        joined = mx.where(place == i, columns[i], joined)
    return joined
