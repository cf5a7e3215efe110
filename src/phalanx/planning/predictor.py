"""Predicts a plan's speed: time to first token by prompt length, tokens per second by number of streams.

Pure: adds up measured times of machines and links. A decode step takes the sum over its stages, since a row's next
token needs the last one; a prompt takes the time of its slowest stage, as chunks are pipelined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from phalanx.dist.topology import Topology
from phalanx.planning.candidates import Fit
from phalanx.planning.model_shape import ModelShape, RankParts
from phalanx.planning.timings import DecodePoint, GroupTimings, Learned, RankTimings, ServingCost
from phalanx.sched.prefill_budget import MIN_CHUNK, PREFILL_ONLY, prefill_bounds

PROMPTS = (512, 4000, 30000)
STREAMS = (1, 4, 16)
CONTEXT = 512  # of a decoding row
TARGET_S = 0.25  # --target-step-ms
METHOD = 0.1
"""Relative error of the method, on one machine."""
GROUP = 0.1
"""Additional error if a group's overhead was measured with another model."""
LINKS = 0.25
"""Additional error if that overhead is derived from link speeds."""

Limit = Literal["memory reads", "arithmetic", "link latency", "link bandwidth", "Python"]


class Speed(Struct, frozen=True, kw_only=True):
    """A plan's predicted speed."""

    ttft_s: dict[int, float]
    """By prompt length, without prompts longer than the context."""
    tokens_per_s: dict[int, float]
    """Of all streams together, by their number."""
    error: float
    """Relative: 0.2 means 20 % more or less."""
    limit: Limit
    """The largest part of one stream's time per token."""
    parts_s: dict[Limit, float]
    """The parts of one stream's seconds per token."""
    learned: Learned = Learned()
    """Factors in `tokens_per_s` and `ttft_s` from earlier starts."""


class _Part(Struct, frozen=True):
    """A stage: its layers, in units of the mean layer, and its slowest rank's timings."""

    layers: float
    share: float
    timings: RankTimings
    is_last: bool


def predict(
    shape: ModelShape,
    fit: Fit,
    timings: Mapping[str, RankTimings],
    group: GroupTimings | None,
    *,
    serving: ServingCost | None = None,
    learned: Learned = Learned(),
    context: int = CONTEXT,
) -> Speed:
    """The speed of a plan that fits.

    Args:
        timings: by host, measured with the plan's width and ranks per host.
        group: None for single ranks.
        serving: of the first host, where the server runs; None: as its ranks see it, without HTTP.
        learned: from earlier starts of this plan.
        context: tokens of a decoding row.
    """
    candidate = fit.candidate
    parts = shape.share(candidate.width)
    stages = _stages(parts, fit, timings)
    link = group or GroupTimings(widths=(1,), step_s=0.0)
    cost = serving or ServingCost()
    slices = _slices(shape, parts, stages, link, 1, context)
    first = sum(slices.values()) + cost.first_s
    slices["Python"] += cost.step_s + cost.row_s
    rates = {}
    for streams in STREAMS:
        rows = -(-streams // candidate.replicas)
        computed_s = sum(_slices(shape, parts, stages, link, rows, context).values())
        rates[streams] = streams / (computed_s + cost.step_s + rows * cost.row_s)
    ttft = {tokens: _prompt_s(shape, parts, stages, link, tokens) + first for tokens in PROMPTS if tokens < fit.context}
    spread = max(stage.timings.spread for stage in stages)
    further = 0.0 if candidate.size == 1 else GROUP if link.measured else LINKS
    return Speed(
        ttft_s={tokens: seconds * learned.ttft for tokens, seconds in ttft.items()},
        tokens_per_s={streams: rate * learned.rate for streams, rate in rates.items()},
        error=math.hypot(METHOD, spread, further),
        limit=max(slices, key=lambda name: slices[name]),
        parts_s=slices,
        learned=learned,
    )


def _stages(parts: RankParts, fit: Fit, timings: Mapping[str, RankTimings]) -> list[_Part]:
    candidate = fit.candidate
    topology = Topology((candidate.width,) * candidate.stages)
    mean = max(1.0, sum(part.kept for part in parts.layers) / len(parts.layers))
    stages = []
    start = 0
    for stage, count in enumerate(fit.split):
        own = parts.layers[start : start + count]
        start += count
        hosts = [candidate.hosts[rank] for rank in topology.ranks(stage)]
        slowest = max((timings[host] for host in hosts), key=lambda one: one.decode[0].layer_s + one.decode[0].ends_s)
        units = sum(part.kept for part in own) / mean
        stages.append(_Part(units, count / len(parts.layers), slowest, stage == len(fit.split) - 1))
    return stages


def decode_point(timings: RankTimings, rows: int) -> tuple[float, float]:
    """Seconds of a layer and of the rest for `rows` rows: linear between measured points, proportional beyond."""
    points = timings.decode
    if rows >= points[-1].rows:
        factor = rows / points[-1].rows
        return points[-1].layer_s * factor, points[-1].ends_s * factor
    if rows <= points[0].rows:
        return points[0].layer_s, points[0].ends_s
    above = next(i for i, point in enumerate(points) if point.rows >= rows)
    return _between(points[above - 1], points[above], rows)


def _between(a: DecodePoint, b: DecodePoint, rows: int) -> tuple[float, float]:
    at = (rows - a.rows) / (b.rows - a.rows)
    return a.layer_s + at * (b.layer_s - a.layer_s), a.ends_s + at * (b.ends_s - a.ends_s)


def _slices(
    shape: ModelShape, parts: RankParts, stages: Sequence[_Part], link: GroupTimings, rows: int, context: int
) -> dict[Limit, float]:
    """The parts of a step's seconds."""
    reads = arithmetic = python = 0.0
    for stage in stages:
        layer_s, ends_s = decode_point(stage.timings, rows)
        alone_s, _ = decode_point(stage.timings, 1)
        computed = stage.layers * layer_s
        bound = min(computed, stage.layers * _read_s(stage.timings, alone_s))
        reads += bound
        arithmetic += computed - bound + stage.layers * rows * context * stage.timings.decode_context_s
        if stage.is_last:
            mean = max(1.0, sum(part.kept for part in parts.layers) / len(parts.layers))
            head = min(ends_s, parts.behind.kept / mean * _read_s(stage.timings, alone_s))
            reads += head
            python += ends_s - head
    sent = rows * shape.width * shape.activation_bytes
    latency, bandwidth = _reducing_s(parts, link, sent)
    hops = len(stages) - 1
    bandwidth += hops * sent / link.bytes_per_s if link.bytes_per_s else 0.0
    return {
        "memory reads": reads,
        "arithmetic": arithmetic,
        "link latency": latency + link.step_s + rows * link.row_s,
        "link bandwidth": bandwidth,
        "Python": python,
    }


def _read_s(timings: RankTimings, alone_s: float) -> float:
    """Seconds to read a layer's weights: the part of its time that does not grow with the number of rows."""
    few = timings.decode[0]
    many = timings.decode[min(1, len(timings.decode) - 1)]
    if many.rows == few.rows:
        return alone_s
    per_row = max(0.0, (many.layer_s - few.layer_s) / (many.rows - few.rows))
    return max(0.0, alone_s - per_row)


def _reducing_s(parts: RankParts, link: GroupTimings, sent: int) -> tuple[float, float]:
    """Seconds of a forward's all-reduces: the latency part, and the part that grows with size."""
    if not link.all_reduce:
        return 0.0, 0.0
    least = link.all_reduce[0]
    seconds = _all_reduce_s(link, sent)
    return parts.all_reduces * min(least.seconds, seconds), parts.all_reduces * max(0.0, seconds - least.seconds)


def _all_reduce_s(link: GroupTimings, size: int) -> float:
    """The time of an all-reduce of `size` bytes: linear between measured sizes, proportional beyond."""
    figures = link.all_reduce
    if size >= figures[-1].bytes:
        return figures[-1].seconds * size / figures[-1].bytes
    if size <= figures[0].bytes:
        return figures[0].seconds
    above = next(i for i, figure in enumerate(figures) if figure.bytes >= size)
    a, b = figures[above - 1], figures[above]
    return a.seconds + (size - a.bytes) / (b.bytes - a.bytes) * (b.seconds - a.seconds)


def _prompt_s(shape: ModelShape, parts: RankParts, stages: Sequence[_Part], link: GroupTimings, tokens: int) -> float:
    """Seconds to compute all tokens of a prompt but the last."""
    token_s = _chunk_layers(stages[-1]) * stages[-1].timings.token_s  # by the leader's stage it plans chunks
    max_chunk = prefill_bounds(on_gpu=shape.on_gpu, stages=len(stages), max_tokens=None, rows=max(STREAMS)).max_tokens
    chunk = max(MIN_CHUNK, min(max_chunk, int(PREFILL_ONLY * TARGET_S / token_s) if token_s else max_chunk))
    total_s, done = 0.0, 0
    while done < tokens - 1:
        count = min(chunk, tokens - 1 - done)
        times = [_chunk_s(shape, parts, stage, link, count, done) for stage in stages]
        if done == 0:
            total_s += sum(times) - max(times)  # the pipeline fills
        total_s += max(times)
        done += count
    return total_s


def _chunk_s(shape: ModelShape, parts: RankParts, stage: _Part, link: GroupTimings, tokens: int, done: int) -> float:
    per_token = stage.timings.token_s + stage.timings.token_context_s * (done + tokens / 2)
    sent = tokens * shape.width * shape.activation_bytes
    all_reduces = sum(_reducing_s(parts, link, sent)) * stage.share
    hop = 0.0 if stage.is_last or not link.bytes_per_s else sent / link.bytes_per_s
    return _chunk_layers(stage) * tokens * per_token + all_reduces + hop


def _chunk_layers(stage: _Part) -> float:
    """What a chunk computes of a stage, in layers."""
    return max(0.0, stage.layers + (stage.timings.chunk_layers if stage.is_last else 0.0))
