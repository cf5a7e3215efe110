"""A forward that is built or dispatched before its plan exists (`Runner.dispatch_next`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from phalanx.sched.plan import Forward


class InFlight(NamedTuple):
    """A forward built or dispatched before its plan exists: the one that the next plan probably contains."""

    arena: int
    start: int
    kv_len: list[int]
    tokens: mx.array  # [rows], drawn in the step before
    logits: mx.array  # [rows, 1, V]
    written: list[mx.array]  # caches that it writes, if it was built; a replayed one writes in place

    def computes(self, fwd: Forward, kv_len: Sequence[int]) -> bool:
        """Whether this is the forward that the plan asks for, token for token."""
        one_token = fwd.sample and not fwd.score and len(fwd.tokens[0]) == 1
        same_rows = (fwd.arena, fwd.start, [*kv_len]) == (self.arena, self.start, self.kv_len)
        return one_token and same_rows and [token for (token,) in fwd.tokens] == np.array(self.tokens).tolist()
