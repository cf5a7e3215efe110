"""Where a token is to be sampled: the request's parameters, the output position, and what the sequence holds so far.

`TokenCounts` grows with the sequence, one token at a time; a row without penalties pays for no more than a list.
Does not know logits or how penalties are applied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.types import Sampling


class TokenCounts:
    """Distinct tokens of prompt and output, and how often each is in the output.

    Args:
        prompt: kept by reference until first needed; must not change.
        output: tokens generated so far.
    """

    def __init__(self, prompt: Sequence[int], output: Iterable[int] = ()) -> None:
        self._prompt: Sequence[int] = prompt
        self._pending = list(output)
        self._place: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("q")

    def add(self, tokens: Iterable[int]) -> None:
        """Append output tokens. Changes no array handed out before."""
        self._pending.extend(tokens)

    def columns(self, ahead: Sequence[int] = ()) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Token ids in order of first appearance, and their counts in the output (0: only in the prompt).

        Args:
            ahead: output tokens that are counted this once, and not kept.
        """
        for token in self._prompt:
            self._see(token)
        self._prompt = ()
        for token in self._pending:
            self._counts[self._see(token)] += 1
        self._pending.clear()
        ids, counts = np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64)
        fresh: dict[int, int] = {}
        for token in ahead:
            if (place := self._place.get(token)) is not None:
                counts[place] += 1
            else:
                fresh[token] = fresh.get(token, 0) + 1
        return np.append(ids, list(fresh)).astype(np.int64), np.append(counts, list(fresh.values())).astype(np.int64)

    def _see(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        return place


@dataclass(slots=True)
class SamplingMetadata:
    """One row of logits and what is to be drawn from it."""

    sampling: Sampling
    index: int
    """Output position of the token to draw, 0-based."""
    history: TokenCounts
    """Prompt and output so far."""
    banned: frozenset[int] = frozenset()
    """Stop ids while fewer than min_tokens were generated: never drawn."""
    ahead: tuple[int, ...] = ()
    """Drafts that follow the history, taken as accepted."""
