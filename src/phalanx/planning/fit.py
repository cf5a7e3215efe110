"""Fits times per layer (slopes) and of everything else (intercepts) to measured steps and chunks.

Pure: `engine/calibration.py` measures them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

from phalanx.planning.timings import DecodePoint, RankTimings


class Decode(Struct, frozen=True, kw_only=True):
    """The time of a decode step of a model cut to `layers` layers."""

    layers: int
    rows: int
    context: int
    seconds: float
    spread: float


class Chunk(Struct, frozen=True, kw_only=True):
    """The time of a prompt's chunk after `context` tokens, in a model cut to `layers` layers."""

    layers: int
    tokens: int
    context: int
    seconds: float


class Measured(Struct, frozen=True, kw_only=True):
    """One process's measurements."""

    decode: list[Decode] = []
    chunks: list[Chunk] = []


def fit(degree: int, decoding: Sequence[Measured], prompts: Sequence[Measured]) -> RankTimings:
    """A rank's times, from processes that measured at the same time. The slowest counts, as ranks wait for each other.

    Args:
        decoding, prompts: one measurement per process.
    """
    steps = [step for one in decoding for step in one.decode]
    rows = sorted({step.rows for step in steps})
    short = min(step.context for step in steps)
    points = []
    for count in rows:
        layer_s, ends_s = _line(_slowest([step for step in steps if (step.rows, step.context) == (count, short)]))
        points.append(DecodePoint(rows=count, layer_s=layer_s, ends_s=ends_s))
    long = max(step.context for step in steps)
    behind, _ = _line(_slowest([step for step in steps if (step.rows, step.context) == (1, long)]))
    per_context = max(0.0, behind - points[0].layer_s) / max(1, long - short)
    token_s, token_context_s = _of_chunks([chunk for one in prompts for chunk in one.chunks])
    return RankTimings(
        degree=degree,
        decode=tuple(points),
        decode_context_s=per_context,
        token_s=token_s,
        token_context_s=token_context_s,
        spread=statistics.median(step.spread for step in steps),
    )


def _slowest(steps: Sequence[Decode]) -> dict[int, float]:
    """By number of layers, the slowest process's time."""
    found: dict[int, float] = {}
    for step in steps:
        found[step.layers] = max(found.get(step.layers, 0.0), step.seconds)
    return found


def _line(by_layers: dict[int, float]) -> tuple[float, float]:
    """Slope and intercept; with a single number of layers, only a slope."""
    few, more = min(by_layers), max(by_layers)
    if few == more:
        return by_layers[few] / few, 0.0
    slope = max(0.0, (by_layers[more] - by_layers[few]) / (more - few))
    return slope, max(0.0, by_layers[few] - slope * few)


def _of_chunks(chunks: Sequence[Chunk]) -> tuple[float, float]:
    """Seconds of a layer per prompt token, and per prompt token and token of context: least squares over chunks.

    Everything outside the layers is below the noise: a chunk computes no head.
    """
    xs = [chunk.context + chunk.tokens / 2 for chunk in chunks]
    ys = [chunk.seconds / chunk.tokens / chunk.layers for chunk in chunks]
    if not chunks:
        return 0.0, 0.0
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    varies = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / varies if varies else 0.0
    slope = min(max(0.0, slope), mean_y / max(1.0, mean_x))
    return mean_y - slope * mean_x, slope
