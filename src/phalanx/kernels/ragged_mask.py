"""An attention mask of rows with different lengths that also carries the lengths, for native attention.

Most models pass masks on unchanged, so the mask can carry the lengths to the kernel.
"""

from __future__ import annotations

import mlx.core as mx


class RaggedMask(mx.array):
    """Which keys each query attends to: bool `[rows, 1, L, S]`. Always causal.

    Attributes:
        lengths: number of keys of each row, including those of its L queries: int32 `[rows]`.
        window: number of keys that a query attends to, including its own; 0: all.
        slots: for packed rows (one token each, several per slot), the slot of each row's keys: int32 `[rows]`.
    """

    lengths: mx.array
    window: int
    slots: mx.array | None

    @classmethod
    def of(cls, mask: mx.array, lengths: mx.array, window: int | None, slots: mx.array | None = None) -> RaggedMask:
        """The mask, with the lengths from which it was made."""
        ragged = cls(mask)
        ragged.lengths, ragged.window, ragged.slots = lengths, window or 0, slots
        return ragged
