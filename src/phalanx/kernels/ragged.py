"""A mask of rows that have different lengths, for attention that would rather know the lengths.

Models pass masks on without looking at them, mostly; so what native attention needs travels with the mask.
"""

from __future__ import annotations

import mlx.core as mx


class RaggedMask(mx.array):
    """Which keys each query sees: bool `[rows, 1, L, S]`. A query sees no key behind its own.

    Attributes:
        lengths: keys of each row, those of its L queries included: int32 `[rows]`.
        window: keys a query sees, its own included; 0: all.
        slots: where each row's keys are, if rows share them, one row a token: int32 `[rows]`.
    """

    lengths: mx.array
    window: int
    slots: mx.array | None

    @classmethod
    def of(cls, mask: mx.array, lengths: mx.array, window: int | None, slots: mx.array | None = None) -> RaggedMask:
        """The mask, and what says the same."""
        ragged = cls(mask)
        ragged.lengths, ragged.window, ragged.slots = lengths, window or 0, slots
        return ragged
