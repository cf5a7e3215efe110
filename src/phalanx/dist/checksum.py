"""What travels with a vector that ranks sum, and what is read off the sum (A6). `reduce.py` judges by it.

A checksum is the vector times random signs, as one number in float32 and as two, high and low, in 16 bits; it adds up
like the vector does. Behind it come the vector's magnitude, which says what rounding may leave of the checksum, and the
tag, a small integer that all ranks choose alike. A magnitude that is no number, or below nothing, is taken for a fault;
one that is too large excuses more than it should, so the tag stands last: what spoils the end of a vector and the
magnitude spoils the tag as well.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx


class Checksum(Protocol):
    """A way to compute both; all give the same numbers up to rounding."""

    def load(self, y: mx.array, signs: mx.array, tag: mx.array) -> mx.array:
        """What to sum instead of y [rows, width].

        Args:
            signs: [width], +-1 / sqrt(width), so that a checksum is as large as an element.
            tag: a float32 that is known.
        """

    def read(self, wire: mx.array, signs: mx.array) -> tuple[mx.array, mx.array]:
        """The sum [rows, width], and [rows, 3]: by how much its checksum differs from what came, the magnitudes of what
        was summed, added up, and the tag; which is NaN where an element or the magnitude is not finite.
        """

    def judge(self, figures: mx.array, limits: mx.array, tag: mx.array, flag: int) -> mx.array:
        """[sites]: 0.0 for each place where all sums are right, else `flag`.

        Args:
            figures: [sites * rows, 3], as read.
            limits: [sites, 2]: what rounding may leave relative to the magnitude, and at least.
            tag: of the sum.
        """


class ComposedChecksum:
    """By MLX's own operations."""

    def __init__(self) -> None:
        self._readouts: dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array]] = {}

    def load(self, y: mx.array, signs: mx.array, tag: mx.array) -> mx.array:
        wide = y if y.dtype == mx.float32 else y.astype(mx.float32)
        checksum = (wide @ signs)[:, None]
        tags = mx.broadcast_to(tag.astype(y.dtype), (y.shape[0], 1))
        magnitude = (mx.sqrt(mx.sum(mx.square(wide), axis=-1, keepdims=True)) / y.shape[1]).astype(y.dtype)
        if y.dtype == mx.float32:
            return mx.concatenate([y, checksum, magnitude, tags], axis=-1)
        high = checksum.astype(y.dtype)
        low = (checksum - high).astype(y.dtype)
        return mx.concatenate([y, high, low, magnitude, tags], axis=-1)

    def read(self, wire: mx.array, signs: mx.array) -> tuple[mx.array, mx.array]:
        seen = wire if wire.dtype == mx.float32 else wire.astype(mx.float32)
        return wire[:, : signs.shape[0]], seen @ self._readout(signs, wire.dtype)

    def judge(self, figures: mx.array, limits: mx.array, tag: mx.array, flag: int) -> mx.array:
        rows = figures.reshape(limits.shape[0], -1, 3)
        residuals, magnitudes, tags = rows[..., 0], rows[..., 1], rows[..., 2]
        limit = limits[:, :1] * magnitudes + limits[:, 1:]
        right = mx.logical_and(mx.abs(residuals) <= limit, tags == tag)
        return mx.where(mx.all(right, axis=1), 0.0, float(flag))

    def _readout(self, signs: mx.array, dtype: mx.Dtype) -> mx.array:
        """The matrix that reads residual, magnitude and tag off a row in one product."""
        key = (id(signs), dtype)  # which stay what they are, since they are kept here
        if key not in self._readouts:
            width = signs.shape[0]
            checksums = 1 if dtype == mx.float32 else 2
            readout = mx.zeros((width + checksums + 2, 3))
            readout[:width, 0] = signs
            readout[width : width + checksums, 0] = -1.0
            readout[width + checksums, 1] = 1.0
            readout[width + checksums + 1, 2] = 1.0
            mx.eval(readout)
            self._readouts[key] = (signs, readout)
        return self._readouts[key][1]
