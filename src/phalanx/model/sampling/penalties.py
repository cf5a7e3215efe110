"""Changes single logits before filters and noise: logit bias, banned tokens, and the three penalties.

One gather and one scatter change all rows of a batch. Does not know temperature, filters or noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from phalanx.model.sampling.metadata import SamplingMetadata
from phalanx.types import Sampling

Column = npt.NDArray[np.generic]


def adjust(raw: mx.array, positions: Sequence[SamplingMetadata]) -> mx.array:
    """Apply logit bias and bans, the repetition penalty, then frequency and presence penalties.

    Args:
        raw: [P, V] float32; is not changed.
        positions: [P].

    Returns:
        [P, V] float32; `raw` itself if no row needs a change.
    """
    return _penalise(_bias(raw, positions), positions)


def _bias(raw: mx.array, positions: Sequence[SamplingMetadata]) -> mx.array:
    entries = [
        (row, token, bias)
        for row, position in enumerate(positions)
        for token, bias in (*position.sampling.logit_bias.items(), *((stop, -math.inf) for stop in position.banned))
        if token < raw.shape[1]
    ]
    if not entries:
        return raw
    rows, tokens, biases = zip(*entries, strict=True)
    return raw.at[mx.array(rows), mx.array(tokens)].add(mx.array(biases, dtype=mx.float32))


def _penalise(x: mx.array, positions: Sequence[SamplingMetadata]) -> mx.array:
    parts = [_columns(row, p, x.shape[1]) for row, p in enumerate(positions) if _penalised(p.sampling)]
    if not parts:
        return x
    rows, tokens, repetition, subtract = (mx.array(np.concatenate(column)) for column in zip(*parts, strict=True))
    value = x[rows, tokens]
    value = mx.where(value > 0, value / repetition, value * repetition) - subtract
    adjusted = mx.array(x)
    adjusted[rows, tokens] = value
    return adjusted


def _penalised(sampling: Sampling) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def _columns(row: int, position: SamplingMetadata, vocabulary: int) -> tuple[Column, Column, Column, Column]:
    """For every logit of a row that changes: row, token, repetition penalty and amount to subtract."""
    sampling = position.sampling
    ids, counts = position.history.columns(position.ahead)
    keep = ids < vocabulary
    if sampling.repetition_penalty == 1.0:
        keep &= counts > 0
    ids, counts = ids[keep], counts[keep]
    subtract = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    repetition = np.full(len(ids), sampling.repetition_penalty, dtype=np.float32)
    return np.full(len(ids), row), ids, repetition, subtract.astype(np.float32)
