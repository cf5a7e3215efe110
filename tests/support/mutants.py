"""A wrong runner, which tests must detect: it does not roll back rejected drafts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from phalanx.model.runner import Runner
from phalanx.sched.plan import Forward, Resize, RowOp


class NoRollback(Runner):
    """Keeps rejected drafts in the cache: a row's length grows by the tokens that were fed, not by those committed."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.kept: dict[int, int] = {}

    def apply(self, ops: Sequence[RowOp]) -> None:
        """As `Runner.apply`, with room for tokens that should have been rolled back."""
        super().apply([Resize(op.arena, op.rows, op.capacity + 200) if isinstance(op, Resize) else op for op in ops])

    def forward(self, fwd: Forward, kv_len: Sequence[int], hidden: mx.array | None = None) -> mx.array | None:
        """As `Runner.forward`, with the row's wrong length where it exceeds the plan's."""
        mine = [self.kept.get(seq, length) for seq, length in zip(fwd.seqs, kv_len, strict=True)]
        self.kept.update({seq: length + n for seq, length, n in zip(fwd.seqs, mine, fwd.valid, strict=True)})
        return super().forward(fwd, mine)
