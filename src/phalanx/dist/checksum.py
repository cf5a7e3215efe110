"""Checksums of vectors that ranks sum: how they are appended before the sum and checked after it (A6).

A checksum is the dot product of a vector with random signs: one number in float32, two (high and low) in 16 bits. The
checksum of a sum is the sum of the checksums. After it follow the vector's magnitude, which bounds what rounding can
change of the checksum, and the tag, a small integer that is the same on all ranks. A magnitude that is NaN or negative
is a fault. One that is too large would hide faults, so the tag comes last: what corrupts the end of a vector and the
magnitude corrupts the tag as well. Does not know groups, nor when a sum is checked (`reduce.py`).
"""

from __future__ import annotations

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
        """[sites]: 0.0 for each site whose sums are all right, else `flag`.

        Args:
            figures: [sites * rows, 3], from `decode`.
            limits: [sites, 2]: the largest difference by rounding, as a * magnitude + b.
            tag: the expected sum of tags.
        """


class ComposedChecksum:
    """A checksum composed of MLX's own operations."""

    def __init__(self) -> None:
        self._matrices: dict[tuple[int, mx.Dtype], tuple[mx.array, mx.array]] = {}

    def encode(self, y: mx.array, signs: mx.array, tag: mx.array) -> mx.array:
        wide = y if y.dtype == mx.float32 else y.astype(mx.float32)
        checksum = (wide @ signs)[:, None]
        tags = mx.broadcast_to(tag.astype(y.dtype), (y.shape[0], 1))
        magnitude = (mx.sqrt(mx.sum(mx.square(wide), axis=-1, keepdims=True)) / y.shape[1]).astype(y.dtype)
        if y.dtype == mx.float32:
            return mx.concatenate([y, checksum, magnitude, tags], axis=-1)
        high = checksum.astype(y.dtype)
        low = (checksum - high).astype(y.dtype)
        return mx.concatenate([y, high, low, magnitude, tags], axis=-1)

    def decode(self, wire: mx.array, signs: mx.array) -> tuple[mx.array, mx.array]:
        values = wire if wire.dtype == mx.float32 else wire.astype(mx.float32)
        return wire[:, : signs.shape[0]], values @ self._decoding(signs, wire.dtype)

    def judge(self, figures: mx.array, limits: mx.array, tag: mx.array, flag: int) -> mx.array:
        rows = figures.reshape(limits.shape[0], -1, 3)
        residuals, magnitudes, tags = rows[..., 0], rows[..., 1], rows[..., 2]
        limit = limits[:, :1] * magnitudes + limits[:, 1:]
        right = mx.logical_and(mx.abs(residuals) <= limit, tags == tag)
        return mx.where(mx.all(right, axis=1), 0.0, float(flag))

    def _decoding(self, signs: mx.array, dtype: mx.Dtype) -> mx.array:
        """The matrix [columns, 3] that computes residual, magnitude and tag of a row in one product."""
        key = (id(signs), dtype)  # the dictionary keeps `signs` alive, so its id is not used again
        if key not in self._matrices:
            width = signs.shape[0]
            checksums = 1 if dtype == mx.float32 else 2
            matrix = mx.zeros((width + checksums + 2, 3))
            matrix[:width, 0] = signs
            matrix[width : width + checksums, 0] = -1.0
            matrix[width + checksums, 1] = 1.0
            matrix[width + checksums + 1, 2] = 1.0
            mx.eval(matrix)
            self._matrices[key] = (signs, matrix)
        return self._matrices[key][1]
