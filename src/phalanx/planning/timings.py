"""How long the parts of a step take: what a machine measured of itself for one model, and what a group adds.

Plain data. Does not know how they are measured (`engine/calibration.py`), nor what follows (`predictor.py`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0.0)]


class DecodePoint(Struct, frozen=True, kw_only=True):
    """A decode step of so many rows, each with few tokens before."""

    rows: Annotated[int, Meta(ge=1)]
    layer_s: Seconds
    """Of one layer."""
    ends_s: Seconds
    """Of everything else: embedding, head, sampler, scheduling."""


class RankTimings(Struct, frozen=True, kw_only=True):
    """One rank's times on one machine. Slope and intercept of two measurements, of few and of more layers."""

    degree: int
    """Ranks that share each layer; this rank computed its part, and summed with none."""
    decode: Annotated[tuple[DecodePoint, ...], Meta(min_length=1)]
    """By rising number of rows."""
    decode_context_s: Seconds
    """Of one layer, for a row and a token of context."""
    token_s: Seconds
    """Of one layer, for a prompt token in a chunk."""
    token_context_s: Seconds
    """Of one layer, for a prompt token and a token of context before it."""
    spread: float
    """Relative: half of the range that the middle half of the steps had."""


class AllReduce(Struct, frozen=True, kw_only=True):
    """The time of one sum over ranks."""

    bytes: int
    seconds: Seconds


class GroupTimings(Struct, frozen=True, kw_only=True):
    """What being a group adds to a step, measured with a small model on the same hosts."""

    widths: tuple[int, ...]
    step_s: Seconds
    """Of a step, besides computing and sums: the plan's way to the other ranks, hops between stages, waits."""
    all_reduce: tuple[AllReduce, ...] = ()
    """By rising size."""
    bytes_per_s: float = 0.0
    """Of the slowest link between stages; 0: not measured, as on one machine."""
    measured: bool = True
    """False: derived from the speed of links."""
