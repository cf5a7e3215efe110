"""Fits times per layer (slopes) and of everything else (intercepts) to measured steps and chunks.

Pure: `engine/calibration.py` measures them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

from phalanx.planning.timings import DecodePoint, RankTimings

MIN_ENDS, MAX_ENDS = -1.0, 4.0
"""Bounds of what a chunk takes besides its layers, in layers; beyond is noise."""


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
    token_s, token_context_s, chunk_layers = _of_chunks([chunk for one in prompts for chunk in one.chunks])
    return RankTimings(
        degree=degree,
        decode=tuple(points),
        decode_context_s=per_context,
        token_s=token_s,
        token_context_s=token_context_s,
        chunk_layers=chunk_layers,
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


def _of_chunks(chunks: Sequence[Chunk]) -> tuple[float, float, float]:
    """Seconds of a layer per prompt token, and per prompt token and token of context; and everything else, in layers.

    How times grow with the context is the same for all chunks: least squares. At their mean context, the time is a
    line over the number of layers. It does not begin at 0: nothing computes what the last layer gives for a chunk.
    """
    if not chunks:
        return 0.0, 0.0, 0.0
    mean_x = statistics.fmean(_middle(chunk) for chunk in chunks)
    growth = _growth(chunks, mean_x)
    at_mean: dict[int, list[float]] = {}
    for chunk in chunks:
        there = chunk.seconds / chunk.tokens / (1 + growth * (_middle(chunk) - mean_x))
        at_mean.setdefault(chunk.layers, []).append(there)
    few, more = min(at_mean), max(at_mean)
    y_few, y_more = statistics.fmean(at_mean[few]), statistics.fmean(at_mean[more])
    slope, ends = y_more / more, 0.0
    if y_more > y_few > 0:
        slope = (y_more - y_few) / (more - few)
        ends = max(MIN_ENDS, min(MAX_ENDS, y_few / slope - few))
        slope = y_more / (more + ends)
    return slope * (1 - growth * mean_x), slope * growth, ends


def _middle(chunk: Chunk) -> float:
    """Tokens before the middle one of a chunk."""
    return chunk.context + chunk.tokens / 2


def _growth(chunks: Sequence[Chunk], mean_x: float) -> float:
    """How much longer a chunk takes for each token before it, relative to the time at the mean."""
    xs = [_middle(chunk) for chunk in chunks]
    mean_y = {
        layers: statistics.fmean(chunk.seconds / chunk.tokens for chunk in chunks if chunk.layers == layers)
        for layers in {chunk.layers for chunk in chunks}
    }
    ys = [chunk.seconds / chunk.tokens / mean_y[chunk.layers] if mean_y[chunk.layers] else 1.0 for chunk in chunks]
    varies = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - 1) for x, y in zip(xs, ys, strict=True)) / varies if varies else 0.0
    return min(max(0.0, slope), 1 / max(1.0, mean_x))
