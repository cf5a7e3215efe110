"""Samples tokens: a pure function of the logits and of (seed, choice, position) (design: Keyed sampling).

    token = argmax(processed / T + gumbel(seed, choice, position))

A row gives the same token in any batch: maxima and integer sums do not depend on the order of operations, the noise has
no state, and of equal values the one with the lowest token id comes first. Only the leader samples.

Order of processing: logit_bias and banned stop ids, repetition penalty, frequency and presence penalties, masks of
grammars, temperature, top_k, top_p over the tokens that top_k left, min_p. In the order "value descending, id
ascending", top_k keeps exactly k tokens, and top_p keeps the shortest prefix whose mass reaches p, at least one token.
min_p keeps every token whose probability is at least min_p times the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from phalanx.errors import NonFiniteLogits
from phalanx.kernels import install
from phalanx.model.sampling.gumbel import gumbel, gumbel_key
from phalanx.model.sampling.logprobs import Scorer, ranked
from phalanx.model.sampling.metadata import SamplingMetadata, TokenCounts
from phalanx.model.sampling.penalties import adjust
from phalanx.types import Sampling, TokenLogprobs

__all__ = ["Sampled", "SamplingMetadata", "TokenCounts", "sample", "score"]

NUCLEUS = 1024
"""Candidates ranked for top_p. Rows with a wider nucleus (a flat distribution) are sampled again with more."""
WIDEN = 16
"""Factor by which the number of candidates grows then."""
BLOCK_CPU, BLOCK_GPU = 1 << 18, 1 << 22
"""Logits processed at once. CPU: they stay in a core's cache between passes. GPU: a bound for temporaries."""
LANES = 16
"""Vocabularies are padded to a multiple of this, so that no logarithm runs in the scalar remainder of a vector loop."""
MASS_BITS = 40
"""Fixed point of probabilities relative to the largest; sums of integers have no order. V * 2**40 is below 2**63."""
SHARE_BITS = 30
"""Fixed point of top_p."""
COLDEST = 1e-20
"""Smallest temperature above 0 by which float32 can divide; lower ones are as good as greedy."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per position, and its log-probabilities if its request wants them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    nothing_left: frozenset[int] = frozenset()
    """Positions whose adjusted logits are all -inf: their tokens mean nothing."""


def sample(
    logits: mx.array,
    positions: Sequence[SamplingMetadata],
    also_evaluate: Sequence[mx.array] = (),
    meanwhile: Callable[[mx.array], None] | None = None,
) -> Sampled:
    """Sample one token for every row.

    Waits for the device once for all rows, and once more for rows whose nucleus is wider than `NUCLEUS`.

    Args:
        logits: [P, V], any floating dtype.
        positions: [P].
        also_evaluate: arrays to evaluate with the tokens (the caches that the forward wrote); with `meanwhile` they are
            dispatched before it, and not waited for.
        meanwhile: called before the wait, with the tokens uint32 [P] that are being computed. Not called if rows are
            drawn in different ways.

    Raises:
        NonFiniteLogits: a row has NaN or +inf, or only -inf; names the row.
    """
    return _sample(logits, positions, also_evaluate, NUCLEUS, meanwhile)


def score(logits: mx.array, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens (`echo`).

    Args:
        logits: [L, V].
        targets: [L], the token that followed each position.
        top: number of most likely tokens to report.

    Raises:
        NonFiniteLogits: as `sample`.
    """
    scores: list[TokenLogprobs] = []
    rows = list(range(len(targets)))
    for block in _blocks(rows, logits.shape[1]):
        raw = logits[block[0] : block[-1] + 1].astype(mx.float32)
        check = _Finiteness(_peaks(raw), block[0])
        scorer = Scorer(raw, mx.array([targets[row] for row in block]), [top] * len(block))
        mx.eval(check.arrays, scorer.arrays)
        check.raise_if_not_finite()
        scores += scorer.read()
    return scores


def _sample(
    logits: mx.array,
    positions: Sequence[SamplingMetadata],
    also_evaluate: Sequence[mx.array],
    nucleus: int,
    meanwhile: Callable[[mx.array], None] | None = None,
) -> Sampled:
    if len(positions) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(positions)} positions")
    raw = logits.astype(mx.float32)
    peaks = _peaks(raw)
    check = _Finiteness(peaks, 0)
    adjusted = adjust(raw, positions)
    adjusted_peaks = peaks if adjusted is raw else _peaks(adjusted)
    draws = _draws(adjusted, adjusted_peaks, positions, nucleus)
    scored_rows, scorers = _scorers(raw, draws, positions)
    scored = [scorer.arrays for scorer in scorers]
    arrays = [check.arrays, adjusted_peaks.values, [draw.arrays for draw in draws], scored]
    if meanwhile is not None and len(draws) == 1:
        mx.async_eval(arrays, *also_evaluate)  # type: ignore[no-untyped-call]
        meanwhile(draws[0].tokens)
        mx.eval(arrays)  # not what was dispatched with them: `meanwhile` may have built on it
    else:
        mx.eval(arrays, *also_evaluate)
    check.raise_if_not_finite()
    tokens = {row: token for draw in draws for row, token in draw.read()}
    scores = [entry for scorer in scorers for entry in scorer.read()]
    logprobs = dict(zip(scored_rows, scores, strict=True))
    wide = [row for draw in draws for row in draw.wide_rows()]
    if wide:
        wider = _sample(raw[mx.array(wide)], [positions[row] for row in wide], (), WIDEN * nucleus)
        tokens.update(zip(wide, wider.tokens, strict=True))
        logprobs.update((row, entry) for row, entry in zip(wide, wider.logprobs, strict=True) if entry is not None)
    rows = range(len(positions))
    nothing_left = frozenset(np.flatnonzero(np.isneginf(np.array(adjusted_peaks.values))).tolist())
    return Sampled([tokens[row] for row in rows], [logprobs.get(row) for row in rows], nothing_left)


class _Peaks(NamedTuple):
    """Sums and maxima of rows [P, V], not evaluated yet; each [P]."""

    sums: mx.array
    values: mx.array  # the largest value
    tokens: mx.array  # its token; the first one of equals


def _peaks(rows: mx.array) -> _Peaks:
    """In one pass if there is a native kernel: MLX's three reductions take as long as a layer of a small model."""
    if (native := install.operations()) is not None:
        return _Peaks(*native.peaks(rows))
    return _Peaks(mx.sum(rows, axis=-1), mx.max(rows, axis=-1), mx.argmax(rows, axis=-1))


class _Finiteness:
    """Checks that rows are usable by their sums: NaN and +inf survive every sum, on every backend."""

    def __init__(self, peaks: _Peaks, first_row: int) -> None:
        self.arrays = [peaks.sums, peaks.values]
        self._first_row = first_row

    def raise_if_not_finite(self) -> None:
        sums, peaks = (np.array(array) for array in self.arrays)
        # A sum of -inf comes from a masked vocabulary (or an overflow of finite masks): usable if some token is left.
        bad = ~np.isfinite(sums) & ~(np.isneginf(sums) & np.isfinite(peaks))
        if not bad.any():
            return
        row = int(np.flatnonzero(bad)[0])
        seen = "nothing but -inf" if np.isneginf(sums[row]) else f"NaN or infinity (they add up to {sums[row]})"
        raise NonFiniteLogits(
            f"The logits of row {self._first_row + row} hold {seen}; {int(bad.sum())} of {len(bad)} rows are unusable.",
            remedy="If float32 cures it (--dtype float32), the model overflows in 16 bits; else the weights are bad.",
        )


# -- drawing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draw:
    """The tokens of some rows, not evaluated yet. `wide`: the row's nucleus may be wider than its candidates."""

    rows: list[int]
    tokens: mx.array  # [R]
    wide: mx.array | None = None  # [R] bool

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens] if self.wide is None else [self.tokens, self.wide]

    def read(self) -> Iterator[tuple[int, int]]:
        return zip(self.rows, np.array(self.tokens).tolist(), strict=True)

    def wide_rows(self) -> list[int]:
        return [] if self.wide is None else [self.rows[i] for i in np.flatnonzero(np.array(self.wide))]


def _draws(x: mx.array, peaks: _Peaks, positions: Sequence[SamplingMetadata], nucleus: int) -> list[_Draw]:
    """Draw all rows of processed logits [P, V], grouped by the way of drawing, in blocks."""
    vocabulary = x.shape[1]
    groups: dict[str, list[int]] = {"greedy": [], "free": [], "top_k": [], "nucleus": []}
    for row, position in enumerate(positions):
        groups[_group(position.sampling, vocabulary)].append(row)
    draws = [_Draw(rows, _take(peaks.tokens, rows)) for rows in [groups["greedy"]] if rows]
    padded = x
    if vocabulary % LANES and len(groups["greedy"]) < len(positions):
        padded = mx.pad(x, [(0, 0), (0, -vocabulary % LANES)], constant_values=-math.inf)
    for kind in ("free", "top_k", "nucleus"):
        for rows in _blocks(groups[kind], vocabulary):
            part = _Rows(_take(padded, rows), [positions[row] for row in rows])
            if kind == "free":
                draws.append(_Draw(rows, part.draw_from_all()))
            else:
                draws.append(_Draw(rows, *part.draw_from_candidates(None if kind == "top_k" else nucleus)))
    return draws


def _group(sampling: Sampling, vocabulary: int) -> str:
    if sampling.temperature == 0.0:
        return "greedy"
    if 0 < sampling.top_k < vocabulary:
        return "top_k"
    return "nucleus" if sampling.top_p < 1.0 else "free"


def _blocks(rows: list[int], vocabulary: int) -> Iterator[list[int]]:
    block = BLOCK_CPU if mx.default_device() == mx.Device(mx.cpu) else BLOCK_GPU
    size = max(1, block // vocabulary)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _take(x: mx.array, rows: list[int]) -> mx.array:
    return x if len(rows) == x.shape[0] else x[mx.array(rows)]


class _Rows:
    """Rows that are drawn with noise. `z` is (logit - largest) / T, so that no value is above 0."""

    def __init__(self, x: mx.array, positions: Sequence[SamplingMetadata]) -> None:
        sampling = [position.sampling for position in positions]
        keys = [gumbel_key(p.sampling.seed, p.sampling.choice, p.index) for p in positions]
        temperatures = [max(s.temperature, COLDEST) for s in sampling]
        self._sampling = sampling
        self._keys = mx.array(np.array(keys, dtype=np.uint64)[:, None])
        self._floor = _column([math.log(s.min_p) if s.min_p > 0.0 else -math.inf for s in sampling], mx.float32)
        self._z = (x - mx.max(x, axis=-1, keepdims=True)) / _column(temperatures, mx.float32)

    def draw_from_all(self) -> mx.array:
        """Tokens [R] from the whole vocabulary; only min_p filters."""
        if (native := install.operations()) is not None:
            return native.gumbel_argmax(self._z, self._keys, self._floor)
        scores = noisy(self._z, self._keys, mx.arange(self._z.shape[1], dtype=mx.uint64))
        if any(s.min_p > 0.0 for s in self._sampling):
            scores = mx.where(self._z >= self._floor, scores, -math.inf)
        return mx.argmax(scores, axis=-1)

    def draw_from_candidates(self, width: int | None) -> tuple[mx.array, mx.array | None]:
        """Draw from the most likely tokens.

        Args:
            width: number of candidates for top_p alone; None for top_k, which sets it.

        Returns:
            Tokens [R]; and which rows need more candidates, [R] bool, or None if none can.
        """
        vocabulary = self._z.shape[1]
        limits = [s.top_k if width is None else vocabulary for s in self._sampling]
        width = min(vocabulary, _power_of_two(max(limits)) if width is None else width)
        values, tokens = ranked(self._z, width)
        place = mx.arange(width, dtype=mx.int32)
        keep = place < _column(limits, mx.int32)
        wide = None
        if any(s.top_p < 1.0 for s in self._sampling):
            mass = mx.where(keep, _mass(values), 0)
            after = mx.cumsum(mass, axis=-1)
            total = after[:, -1:] if max(limits) <= width else _total_mass(self._z)
            target = _share(total, _column([round(s.top_p * 2**SHARE_BITS) for s in self._sampling], mx.int64))
            keep = keep & (after - mass < mx.maximum(target, 1))
            if max(limits) > width:
                wide = after[:, -1] < target[:, 0]
        keep = keep & (values >= self._floor)
        scores = mx.where(keep, noisy(values, self._keys, tokens), -math.inf)
        best = mx.argmax(scores, axis=-1, keepdims=True)
        return mx.take_along_axis(tokens, best, axis=-1)[:, 0], wide


@partial(mx.compile, shapeless=True)
def noisy(z: mx.array, keys: mx.array, tokens: mx.array) -> mx.array:
    """Values with their tokens' noise, [R, K]. Compiled on a GPU: 6 kernels for 27. On a CPU the engine has compilation
    switched off.

    Args:
        keys, tokens: as of `gumbel`.
    """
    return z + gumbel(keys, tokens)


@partial(mx.compile, shapeless=True)
def _mass(z: mx.array) -> mx.array:
    """exp(z) in fixed point, int64."""
    return (mx.exp(z) * 2.0**MASS_BITS).astype(mx.int64)


def _total_mass(z: mx.array) -> mx.array:
    """The sum of `_mass` over each row, [R, 1]."""
    if (native := install.operations()) is not None:
        return native.exp_mass(z, keepdims=True)
    return mx.sum(_mass(z), axis=-1, keepdims=True)


def _share(total: mx.array, share: mx.array) -> mx.array:
    """total * share / 2**SHARE_BITS, without overflowing 64 bits."""
    high, low = total >> SHARE_BITS, total & (2**SHARE_BITS - 1)
    part: mx.array = high * share + ((low * share) >> SHARE_BITS)
    return part


def _column(values: list[float] | list[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(values, dtype=dtype)[:, None]


def _power_of_two(n: int) -> int:
    return max(LANES, 1 << (n - 1).bit_length())


# -- log-probabilities of drawn tokens -----------------------------------------------------------------------------


def _scorers(
    raw: mx.array, draws: list[_Draw], positions: Sequence[SamplingMetadata]
) -> tuple[list[int], list[Scorer]]:
    """The rows whose requests want log-probabilities, and scorers for them in the same order."""
    tops = [position.sampling.logprobs for position in positions]
    scored_rows = [row for row, top in enumerate(tops) if top is not None]
    if not scored_rows:
        return [], []
    drawn = [row for draw in draws for row in draw.rows]
    tokens = mx.concatenate([draw.tokens.astype(mx.uint32) for draw in draws])
    scorers = []
    for rows in _blocks(scored_rows, raw.shape[1]):
        chosen = tokens[mx.array([drawn.index(row) for row in rows])]
        scorers.append(Scorer(_take(raw, rows), chosen, [tops[row] or 0 for row in rows]))
    return scored_rows, scorers
