"""Times of the parts of a step: one machine's for one model, and a group's overhead.

Plain data, measured by `engine/calibration.py` and used by `predictor.py`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0.0)]


class DecodePoint(Struct, frozen=True, kw_only=True):
    """A decode step of `rows` rows with short contexts."""

    rows: Annotated[int, Meta(ge=1)]
    layer_s: Seconds
    """Of one layer."""
    ends_s: Seconds
    """Of everything else: embedding, head, sampler, scheduling."""


class RankTimings(Struct, frozen=True, kw_only=True):
    """One rank's times on one machine: slope and intercept of measurements with few and with more layers."""

    degree: int
    """Ranks that share each layer; the measurement computed one rank's part, without all-reduces."""
    decode: Annotated[tuple[DecodePoint, ...], Meta(min_length=1)]
    """By ascending number of rows."""
    decode_context_s: Seconds
    """Of one layer, per row and token of context."""
    token_s: Seconds
    """Of one layer, per prompt token."""
    token_context_s: Seconds
    """Of one layer, per prompt token and token of context."""
    chunk_layers: float = 0.0
    """Everything else of a chunk, in layers. Below 0: of the last layer, a chunk needs keys and values only."""
    spread: float
    """Half the interquartile range of step times, relative to their median."""


class AllReduce(Struct, frozen=True, kw_only=True):
    """The time of one all-reduce."""

    bytes: int
    seconds: Seconds


class ServedSteps(Struct, frozen=True, kw_only=True):
    """What a client of a small model's server saw."""

    prompt: int
    """Tokens of each prompt."""
    context: dict[int, int]
    """Tokens of a decoding row, on average, by number of streams."""
    step_s: dict[int, Seconds]
    """Of a step, by number of streams."""
    first_s: Seconds
    """To the first token."""


class ServingCost(Struct, frozen=True, kw_only=True):
    """What a server on this machine adds to what its ranks compute: HTTP, events, and the client's own part of it."""

    step_s: Seconds = 0.0
    """Of every step."""
    row_s: Seconds = 0.0
    """And of every row in it."""
    first_s: Seconds = 0.0
    """Of a request, once."""
    small_step_s: Seconds = 0.0
    """Computation of one rank in a step of the bundled model, with which hosts test themselves as a group."""


class Learned(Struct, frozen=True, kw_only=True):
    """What earlier starts of a plan measured, over what was predicted for them."""

    rate: Annotated[float, Meta(gt=0.0)] = 1.0
    """Of tokens per second."""
    ttft: Annotated[float, Meta(gt=0.0)] = 1.0


class GroupTimings(Struct, frozen=True, kw_only=True):
    """A group's overhead per step, measured with a small model on the same hosts."""

    widths: tuple[int, ...]
    step_s: Seconds
    """Per step, besides computation and all-reduces: sending the plan, hops between stages, waits."""
    row_s: Seconds = 0.0
    """And for every row in it."""
    all_reduce: tuple[AllReduce, ...] = ()
    """By ascending size."""
    bytes_per_s: float = 0.0
    """Of the slowest link between stages; 0: not measured, as on one machine."""
    measured: bool = True
    """False: derived from the speed of links."""
