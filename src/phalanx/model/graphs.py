"""The interface between the runner and captured graphs, and its base class, which captures none.

With the native kernels a runner uses `graph_cache.py`; with MLX's own kernels it uses this base class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from phalanx.model.cache.buffers import ArenaBuffers
from phalanx.model.cache.row_view import RowView


class Replayed(NamedTuple):
    """The result of a replayed model call, not evaluated."""

    logits: mx.array | None  # [rows, L, V], or a stage's output [rows, L, width]; None: not requested
    sums: list[mx.array]  # as from `Reducer.finish`


class Graphs:
    """Captured graphs of one model. This base class captures none: every model call is built again."""

    max_tokens = 0
    """Largest model call that is replayed, in rows x tokens per row."""
    captured = 0
    """Graphs captured so far. A forward that captures one takes longer than a usual one."""

    def call(
        self,
        arena: ArenaBuffers,
        view: RowView,
        tokens: Sequence[Sequence[int]],
        *,
        samples: bool = True,
        hidden: mx.array | None = None,
    ) -> Replayed | None:
        """Replay the model call for an opened arena, which writes its caches; None if the runner must call the model.

        Args:
            tokens: [rows, L].
            samples: whether to return logits, or a stage's output.
            hidden: [rows, L, width] for a stage that receives hidden states.
        """
        return None

    def call_in_flight(self, arena: ArenaBuffers, view: RowView, tokens: mx.array) -> mx.array | None:
        """Replay the model call for tokens [rows, L] that the device is still computing.

        Returns:
            Logits [rows, L, V], not evaluated; None if no graph of this call is captured.
        """
        return None

    def reset(self) -> None:
        """Free the memory of all captured graphs."""
