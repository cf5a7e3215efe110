"""The prefill budget (chunked prefill): how many prompt tokens a step computes, from how fast earlier steps were.

Pure: times are arguments. Does not know which prompts share the budget (`scheduler.py`).
"""

from __future__ import annotations

SMALLEST_CHUNK = 16  # prompt tokens per step at least, however slow the machine
PREFILL_ONLY = 4  # times its target that a step without decoding rows may take: wide products are faster per token


class PrefillBudget:
    """Adapts the budget so that the prefill part of a step takes its target time.

    Args:
        first: prompt tokens of the first step; the budget at most doubles from step to step.
        most: tokens of a step, those of decoding rows included.
        target_s: seconds that the prefill part of a step should take.
    """

    def __init__(self, first: int, most: int, target_s: float) -> None:
        self._most = most
        self._target_s = target_s
        self._limit = min(first, most)  # beside decoding rows
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
        self._limit = self._towards(speed * max(self._target_s, decode_s), self._limit)
        self._limit_prefill_only = self._towards(
            speed * max(PREFILL_ONLY * self._target_s, decode_s), self._limit_prefill_only
        )

    def tokens(self, decoding: int) -> int:
        """Prompt tokens for the next step, which also feeds `decoding` tokens to decoding rows."""
        limit = self._limit if decoding else self._limit_prefill_only
        return max(SMALLEST_CHUNK, min(self._most - decoding, limit))

    def _towards(self, wanted: float, before: int) -> int:
        """The wanted limit, at most twice the one before."""
        return max(SMALLEST_CHUNK, min(int(wanted), 2 * before, self._most))
