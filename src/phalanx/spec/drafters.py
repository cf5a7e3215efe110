"""What a drafter is, and the one that is always wrong.

A draft is a guess of a sequence's next tokens; verification makes the output independent of it (design: Keyed
sampling), so a drafter can cost time but never change a token. Only the leader has one. Does not know plans or memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

BUCKETS = 16  # confidence buckets there are, from 0; also the longest draft that can be asked for
EVEN = 6  # bucket of a token that is right as often as not, as far as its drafter knows


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens, one at least, and the confidence bucket of each: tokens of one bucket should be right about
    equally often; how often is measured (`acceptance.py`)."""

    tokens: list[int]
    buckets: Sequence[int]

    @classmethod
    def by_position(cls, tokens: list[int]) -> Draft:
        """By a drafter that sees no difference between its tokens: the buckets are the positions."""
        return cls(tokens, range(len(tokens)))

    def within(self, vocab_size: int) -> Draft:
        """Its tokens before the first that the vocabulary does not have, perhaps none."""
        end = next((i for i, token in enumerate(self.tokens) if not 0 <= token < vocab_size), len(self.tokens))
        return Draft(self.tokens[:end], self.buckets[:end])


def bucket(odds: float) -> int:
    """Of a token that is thought to be right this many times as often as wrong: two buckets for each factor of two."""
    return min(max(0, EVEN + math.floor(2 * math.log2(max(odds, 1e-9)))), BUCKETS - 1)


class Drafter(Protocol):
    """Proposes how sequences go on. `key` is the scheduler's number of one, of which it knows what was committed."""

    computes: bool = False  # whether it is a model, which takes its time

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        """A new sequence starts: its prompt (and, after a restart, its output). Only sequences of one `salt` (the
        prefix cache's) may learn from each other. Changes state."""

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """These tokens were committed for it. Changes state."""

    def end(self, key: int) -> None:
        """The sequence is over. Changes state; unknown keys are an error."""

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        """Sequence -> at most so many tokens (1 .. `BUCKETS`) that may follow its last one; without an idea, absent."""

    def unread(self, keys: Iterable[int]) -> dict[int, int]:
        """Sequence -> tokens, >= 1, that must be read before it can be drafted for; the others are absent."""
        return {}

    def read(self, tokens: Mapping[int, int]) -> int:
        """Read so many tokens (>= 1) of each sequence; how many it were, fewer for want of memory. Changes state."""
        return 0


class RandomDrafter(Drafter):
    """Noise, for drills: what a drafter costs that never helps. A function of (sequence, length, position) only."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lengths: dict[int, int] = {}

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        self._lengths[key] = len(tokens)

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self._lengths[key] += len(tokens)

    def end(self, key: int) -> None:
        del self._lengths[key]

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        return {key: Draft.by_position([self._noise(key, at) for at in range(n)]) for key, n in wanted.items()}

    def _noise(self, key: int, at: int) -> int:
        return zlib.crc32(f"{key} {self._lengths[key]} {at}".encode()) % self._vocab_size
