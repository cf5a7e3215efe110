"""The metadata of a token to sample: the request's parameters, the output position, and the sequence's tokens so far.

`TokenCounts` grows with the sequence, token by token; without penalties it costs no more than a list.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.types import Sampling


class TokenCounts:
    """The distinct tokens of prompt and output, and how often each occurs in the output.

    Args:
        prompt: kept by reference until the first call of `columns`; must not change.
        output: tokens generated so far.
    """

    def __init__(self, prompt: Sequence[int], output: Iterable[int] = ()) -> None:
        self._prompt: Sequence[int] = prompt
        self._pending = list(output)
        self._indices: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("q")

    def add(self, tokens: Iterable[int]) -> None:
        """Append output tokens. Does not change arrays that `columns` returned."""
        self._pending.extend(tokens)

    def columns(self, ahead: Sequence[int] = ()) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Token ids in order of first appearance, and their counts in the output (0: only in the prompt).

        Args:
            ahead: more output tokens, counted only in this call.
        """
        for token in self._prompt:
            self._index_of(token)
        self._prompt = ()
        for token in self._pending:
            self._counts[self._index_of(token)] += 1
        self._pending.clear()
        ids, counts = np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64)
        new_counts: dict[int, int] = {}
        for token in ahead:
            if (index := self._indices.get(token)) is not None:
                counts[index] += 1
            else:
                new_counts[token] = new_counts.get(token, 0) + 1
        ids = np.append(ids, list(new_counts)).astype(np.int64)
        return ids, np.append(counts, list(new_counts.values())).astype(np.int64)

    def _index_of(self, token: int) -> int:
        index = self._indices.setdefault(token, len(self._ids))
        if index == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        return index


class TokenBiases:
    """A row's additions to single logits, as arrays that are made once and not in every step.

    Args:
        bias: token id -> what is added to its logit.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._plain = _columns(bias.keys(), bias.values())
        self._banned: frozenset[int] = frozenset()
        self._with_banned = self._plain

    def columns(self, banned: frozenset[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Token ids and what is added to their logits; a token may be there twice.

        Args:
            banned: tokens that get -inf; the arrays of the last set are kept.
        """
        if not banned:
            return self._plain
        if banned is not self._banned:
            ids, values = _columns(banned, itertools.repeat(-math.inf, len(banned)))
            self._banned = banned
            self._with_banned = np.append(self._plain[0], ids), np.append(self._plain[1], values)
        return self._with_banned


def _columns(ids: Iterable[int], values: Iterable[float]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    return np.fromiter(ids, dtype=np.int32), np.fromiter(values, dtype=np.float32)


@dataclass(slots=True)
class SamplingMetadata:
    """How to sample from one row of logits."""

    sampling: Sampling
    index: int
    """Output position of the token to draw, 0-based."""
    history: TokenCounts
    """Prompt and output so far."""
    banned: frozenset[int] = frozenset()
    """Tokens that must not be drawn: the stop ids, while fewer than min_tokens were generated."""
    ahead: tuple[int, ...] = ()
    """Draft tokens between the history and this position, taken as accepted."""
    allowed: npt.NDArray[np.uint32] | None = None
    """[words], bit t % 32 of word t // 32 says whether a grammar allows token t; None: all are allowed."""
    biases: TokenBiases | None = None
    """The arrays of `sampling.logit_bias`, shared by all positions of a row; None: made when they are asked for."""

    def bias_columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Token ids and what is added to their logits: the logit bias, and -inf for banned tokens."""
        if self.biases is None:
            self.biases = TokenBiases(self.sampling.logit_bias)
        return self.biases.columns(self.banned)
