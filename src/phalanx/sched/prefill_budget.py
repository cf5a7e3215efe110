"""The prefill budget (chunked prefill): how many prompt tokens a step computes, from how fast earlier steps were.

Also its bounds on a CPU and on a GPU, and how rows share it. Times are arguments. Does not know which rows prefill
(`scheduler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from phalanx.sched.sequence import Sequence

SMALLEST_CHUNK = 16  # prompt tokens per step at least, however slow the machine
PREFILL_ONLY = 4  # times its target that a step without decoding rows may take: wide products are faster per token


class PrefillBounds(NamedTuple):
    """Within what the budget adapts."""

    first: int = SMALLEST_CHUNK
    """Prompt tokens of the first step; the budget at most doubles from step to step."""
    most: int = 512
    """Tokens of a step, those of decoding rows included."""
    longest_s: float = math.inf
    """No prefill part is planned to take longer, whatever the target."""


ON_CPU = PrefillBounds()
"""A CPU's products are as fast for 512 tokens as for more, and a first chunk must not take minutes."""
ON_GPU = PrefillBounds(first=256, most=2048, longest_s=2.0)
"""A GPU is idle for the most part with fewer tokens. macOS ends GPU work of about 5 s that waits for other ranks; 2 s
leaves room for prompts that become slower the longer they are."""


def prefill_bounds(*, on_gpu: bool, most: int | None, rows: int) -> PrefillBounds:
    """The bounds of a machine.

    Args:
        most: tokens of a step, where they are configured.
        rows: the largest number of decoding rows, for which a step must have room.
    """
    bounds = ON_GPU if on_gpu else ON_CPU
    return bounds._replace(most=max(bounds.most, rows) if most is None else most)


class PrefillBudget:
    """Adapts the budget so that the prefill part of a step takes its target time.

    Args:
        target_s: seconds that the prefill part of a step should take.
    """

    def __init__(self, bounds: PrefillBounds, target_s: float) -> None:
        self._most = bounds.most
        self._longest_s = bounds.longest_s
        self._target_s = target_s
        self._limit = min(bounds.first, bounds.most)  # beside decoding rows
        self._limit_prefill_only = self._limit

    def observe(self, tokens: int, prefill_s: float, decode_s: float) -> None:
        """Learn from a step that computed `tokens` prompt tokens. Changes state.

        The prefill part aims at the target time, or at the time of the decoding part where that is longer: on a slow
        machine prefill and decoding then share the time equally, so that neither starves. A step without decoding rows
        delays no token, only new requests, and may take longer.
        """
        if prefill_s <= 0 or tokens < min(SMALLEST_CHUNK, self._limit):
            return
        speed = tokens / prefill_s
        self._limit = self._towards(speed, max(self._target_s, decode_s), self._limit)
        self._limit_prefill_only = self._towards(
            speed, max(PREFILL_ONLY * self._target_s, decode_s), self._limit_prefill_only
        )

    def tokens(self, decoding: int) -> int:
        """Prompt tokens for the next step, which also feeds `decoding` tokens to decoding rows."""
        limit = self._limit if decoding else self._limit_prefill_only
        return max(SMALLEST_CHUNK, min(self._most - decoding, limit))

    def _towards(self, speed: float, seconds: float, before: int) -> int:
        """What is computed in so many seconds at this speed, at most twice the limit before."""
        wanted = int(min(speed * min(seconds, self._longest_s), self._most))
        return max(SMALLEST_CHUNK, min(wanted, 2 * before))


def share_out(budget: int, rows: Iterable[Sequence], *, most_scored: int) -> dict[int, int]:
    """How many tokens each prefilling row computes in a step: sequence number -> tokens.

    The budget goes in equal shares to the rows, those with the least left first, so that a short prompt beside a long
    one is answered soon and the long one still advances.

    Args:
        most_scored: most tokens of a row whose prompt's log-probabilities are wanted.
    """
    chunks: dict[int, int] = {}
    ordered = sorted(rows, key=lambda row: (row.to_prefill, row.number))
    for i, row in enumerate(ordered):
        count = min(row.to_prefill, -(-budget // (len(ordered) - i)))
        if row.wants_scores:
            count = min(count, most_scored)
        if count > 0:
            chunks[row.number] = count
            budget -= count
    return chunks
