"""How many tokens of prompts a step computes, from how fast the machine was. Pure: times are handed in."""

from __future__ import annotations

SMALLEST_CHUNK = 16  # tokens a step gives to prefill at least, however slow the machine
ALONE = 4  # times longer than its target a step may take in which nobody decodes: wide products are faster ones


class PrefillBudget:
    """
    Args:
        first: tokens, until the speed is known; doubled from step to step at most.
        most: tokens of a step, those that decode included.
        target_s: that the prefill part of a step should take.
    """

    def __init__(self, first: int, most: int, target_s: float) -> None:
        self._most = most
        self._target_s = target_s
        self._limit = min(first, most)  # beside rows that decode
        self._limit_alone = self._limit

    def observe(self, tokens: int, prefill_s: float, decode_s: float) -> None:
        """A step computed so many tokens of prompts, and both of its parts took so long. Changes state.

        The prefill part aims at the target, or at the time of the decoding part where that is longer: on a slow
        machine decoding then takes turns with prefill instead of starving it. While nobody decodes only a newcomer
        waits for the step's end, and it may take longer.
        """
        if prefill_s <= 0 or tokens < min(SMALLEST_CHUNK, self._limit):
            return
        speed = tokens / prefill_s
        self._limit = self._towards(speed * max(self._target_s, decode_s), self._limit)
        self._limit_alone = self._towards(speed * max(ALONE * self._target_s, decode_s), self._limit_alone)

    def tokens(self, decoding: int) -> int:
        """Tokens of prompts for the next step, beside so many that decode."""
        limit = self._limit if decoding else self._limit_alone
        return max(SMALLEST_CHUNK, min(self._most - decoding, limit))

    def _towards(self, wanted: float, before: int) -> int:
        """A limit that has grown twofold at most."""
        return max(SMALLEST_CHUNK, min(int(wanted), 2 * before, self._most))
