"""The drafter interface, and a drafter of random tokens.

A draft is a guess of a sequence's next tokens; verification makes the output independent of it (design: Keyed
sampling), so a drafter can cost time but never change a token. Only the leader has one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

BUCKETS = 16  # number of confidence buckets; also the longest draft
CERTAIN = BUCKETS
"""Bucket of a token that cannot be wrong, because a grammar allows no other."""
EVEN = 6  # bucket of a token with even odds, as estimated by the drafter


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens, one at least, and the confidence bucket of each: tokens of one bucket should be right about
    equally often; how often is measured (`acceptance.py`), except of `CERTAIN` ones. Without an estimate, the buckets
    are the positions."""

    tokens: list[int]
    buckets: Sequence[int]

    def within(self, vocab_size: int) -> Draft:
        """The draft up to the first token outside the vocabulary; may be empty."""
        end = next((i for i, token in enumerate(self.tokens) if not 0 <= token < vocab_size), len(self.tokens))
        return Draft(self.tokens[:end], self.buckets[:end])


def bucket(odds: float) -> int:
    """The bucket of a token with these odds, P(right) / P(wrong): two buckets for each factor of two."""
    return min(max(0, EVEN + math.floor(2 * math.log2(max(odds, 1e-9)))), BUCKETS - 1)


class Drafter(Protocol):
    """Proposes next tokens of sequences. `key` is the scheduler's number of a sequence."""

    computes: bool = False  # whether it is a model

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        """A new sequence starts: its prompt (and, after a restart, its output). Drafts for
        a sequence may come only from sequences with the same `salt` (the prefix cache's). Changes state."""

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """These tokens of the sequence were committed. Changes state."""

    def end(self, key: int) -> None:
        """The sequence is over. Changes state; unknown keys are an error."""

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        """Sequence -> draft of at most the wanted number of tokens (1 .. `BUCKETS`); absent if there is none."""

    def unread(self, keys: Iterable[int]) -> dict[int, int]:
        """Sequence -> tokens, >= 1, that must be read before it can be drafted for; the others are absent."""
        return {}

    def read(self, tokens: Mapping[int, int]) -> int:
        """Read these many tokens, >= 1. Returns how many were read: fewer if memory is short. Changes state."""
        return 0


class RandomDrafter(Drafter):
    """Random tokens, to measure the cost of a useless drafter. A function of (sequence, length, position) only."""

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
        return {key: Draft([self._noise(key, at) for at in range(n)], range(n)) for key, n in wanted.items()}

    def _noise(self, key: int, at: int) -> int:
        return zlib.crc32(f"{key} {self._lengths[key]} {at}".encode()) % self._vocab_size
