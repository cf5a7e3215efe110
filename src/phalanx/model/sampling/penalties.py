"""Changes logits before filters and noise: logit bias, banned tokens, the three penalties, and masks of grammars.

One gather and one scatter change all rows of a batch. A mask comes last, so that no bias and no penalty lifts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from phalanx.model.sampling.metadata import SamplingMetadata
from phalanx.types import Sampling

Column = npt.NDArray[np.generic]

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
OF_OCTET = np.where(_BITS, 0.0, -np.inf).astype(np.float32)
"""[256, 8]: what eight bits of a mask add to their logits. A gather and a sum take a third of `mx.where`'s time."""


def adjust(raw: mx.array, positions: Sequence[SamplingMetadata]) -> mx.array:
    """Apply logit bias and bans, the repetition penalty, frequency and presence penalties, then masks.

    Args:
        raw: [P, V] float32; is not changed.
        positions: [P].

    Returns:
        [P, V] float32; `raw` itself if no row needs a change.
    """
    return _mask(_penalise(_bias(raw, positions), positions), positions)


def _bias(raw: mx.array, positions: Sequence[SamplingMetadata]) -> mx.array:
    biased = [
        (row, position.bias_columns())
        for row, position in enumerate(positions)
        if position.sampling.logit_bias or position.banned
    ]
    if not biased:
        return raw
    rows = np.repeat([row for row, _ in biased], [len(tokens) for _, (tokens, _) in biased])
    tokens, values = (np.concatenate(column) for column in zip(*(columns for _, columns in biased), strict=True))
    known = tokens < raw.shape[1]
    return raw.at[mx.array(rows[known]), mx.array(tokens[known])].add(mx.array(values[known]))


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


def _mask(x: mx.array, positions: Sequence[SamplingMetadata]) -> mx.array:
    """Set tokens that grammars forbid to -inf. Rows without a grammar stay as they are."""
    masks = {row: position.allowed for row, position in enumerate(positions) if position.allowed is not None}
    if not masks:
        return x
    octets = mx.array(np.stack(list(masks.values())).view(np.uint8))  # of a system with the lowest byte first
    change = mx.flatten(mx.array(OF_OCTET)[octets], 1)[:, : x.shape[1]]
    if (surplus := x.shape[1] - change.shape[1]) > 0:  # logits of ids that the tokenizer does not know
        change = mx.pad(change, [(0, 0), (0, surplus)], constant_values=-mx.inf)
    if len(masks) == x.shape[0]:
        return x + change
    return x.at[mx.array(list(masks))].add(change)


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
