"""A forward built or dispatched before its plan exists (`Runner.dispatch_next`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from phalanx.sched.plan import Forward


class InFlight(NamedTuple):
    """The forward that the next plan probably contains."""

    arena: int
    start: int
    kv_len: list[int]
    tokens: mx.array  # [rows], sampled in the previous step
    logits: mx.array  # [rows, 1, V]
    written: list[mx.array]  # caches it writes if it was built; empty if replayed, which writes in place

    def computes(self, fwd: Forward, kv_len: Sequence[int]) -> bool:
        """Whether the plan contains exactly this forward."""
        one_token = fwd.sample and not fwd.score and len(fwd.tokens[0]) == 1
        same_rows = (fwd.arena, fwd.start, [*kv_len]) == (self.arena, self.start, self.kv_len)
        return one_token and same_rows and [token for (token,) in fwd.tokens] == np.array(self.tokens).tolist()
