"""What it takes a draft model to read what it has not seen yet of a text: seconds, as measured.

A token read with many others takes less than one read with few, so what was measured is kept by the size of the chunk,
in powers of two. Pure: the seconds are handed in. Does not know whether reading pays (`balance.py`).
"""

from __future__ import annotations

from collections import deque
from statistics import median

SMALLEST = 8
"""Tokens that are read at once at least: hardly slower than one, and fewer say nothing about speed."""
HOPED = 4
"""Times the largest chunk that was measured, up to which a chunk is hoped to take no longer than that one."""
SAMPLES = 5
"""Of which the median counts."""


class Reading:
    """Seconds per token, by chunk."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}  # bits of the number of tokens -> seconds per token

    @property
    def known(self) -> bool:
        """Something was measured."""
        return bool(self._samples)

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long. Changes state; fewer than `SMALLEST` are not counted."""
        if tokens >= SMALLEST:
            samples = self._samples.setdefault(tokens.bit_length(), deque(maxlen=SAMPLES))
            samples.append(max(seconds, 1e-9) / tokens)

    def seconds(self, tokens: int, at_once: int) -> float:
        """What so many tokens take in chunks of `at_once`; something must be known."""
        return tokens * self._per_token(min(tokens, at_once))

    def hoped(self, tokens: int, at_once: int) -> float:
        """The same, where chunks larger than any that was measured take no longer than the largest that was: a small
        model spends its time on other things than tokens. Else the first chunk would price what nobody then tries."""
        chunk = min(tokens, at_once)
        beyond = chunk / (1 << max(self._samples))
        return self.seconds(tokens, at_once) / min(max(1.0, beyond), HOPED)

    def within(self, seconds: float) -> int:
        """Tokens of a chunk that takes so long at most, or `SMALLEST`; before anything is known, those."""
        if not self._samples:
            return SMALLEST
        chunk = int(seconds / min(map(median, self._samples.values())))
        while chunk > SMALLEST and self.seconds(chunk, chunk) > seconds:
            chunk //= 2
        return max(SMALLEST, chunk)

    def _per_token(self, chunk: int) -> float:
        """As measured with chunks of this size, or else the next smaller one, or else the smallest."""
        bits = chunk.bit_length()
        nearest = max((known for known in self._samples if known <= bits), default=min(self._samples))
        return median(self._samples[nearest])
