"""Verification: the tokens that the model itself draws after every draft, in one call (A2; design: Keyed sampling).

A forward over `[y, d1..dk]` gives the logits after each of them. In each place the keyed Gumbel-max token is drawn as
it would have been without speculation: with that output position's noise, and with penalties and bans over a history
that contains the drafts before it. Drafts are accepted up to the first one that differs from that token, so the output
does not depend on the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

from phalanx.model.sampling.sampler import sample
from phalanx.sched.commit import accept
from phalanx.sched.plan import Forward
from phalanx.sched.sequence import Sequence
from phalanx.spec.running_grammars import Masks, constrain_sampling
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.types import TokenLogprobs


class Verified(NamedTuple):
    """The outcome by sequence number: accepted drafts, the token drawn after them, and their log-probabilities."""

    tokens: dict[int, list[int]]  # 1..k + 1 each; fewer where nothing was left to draw
    logprobs: dict[int, list[TokenLogprobs]]  # of sequences that want them, one per token
    nothing_left: set[int]  # sequences for which no token can be drawn after these


def verify(
    outputs: Seq[tuple[Forward, mx.array]],
    sequences: Mapping[int, Sequence],
    metadata: SamplingMetadataCache,
    also_evaluate: Seq[mx.array] = (),
    meanwhile: Callable[[mx.array], None] | None = None,
    masks: Masks = MappingProxyType({}),
) -> Verified:
    """Draw a token after every fed token of sampling forwards, and accept drafts.

    Args:
        outputs: forwards with their logits [rows, L, V].
        also_evaluate: arrays to evaluate with the logits (the caches that the forwards wrote).
        meanwhile: as of `sample`.
        masks: what may be drawn after the fed tokens, for sequences with grammars.

    Raises:
        NonFiniteLogits: a row of logits that is needed holds NaN or infinity.
    """
    verified = Verified({}, {}, set())
    if not outputs:
        return verified
    fed = [row for forward, _ in outputs for row in zip(forward.seqs, forward.tokens, forward.valid, strict=True)]
    rows = [(number, tokens[1:valid]) for number, tokens, valid in fed]
    positions = []
    for number, drafts in rows:
        places = metadata.behind(sequences[number], drafts)
        if number in masks:
            constrain_sampling(places, masks[number])
        positions += places
    logits = [_needed(forward, logits) for forward, logits in outputs]
    sampled = sample(logits[0] if len(logits) == 1 else mx.concatenate(logits), positions, also_evaluate, meanwhile)
    start = 0
    for number, drafts in rows:
        tokens = list(accept(drafts, sampled.tokens[start : start + len(drafts) + 1]))
        left = next((i for i in range(len(tokens)) if start + i in sampled.nothing_left), len(tokens))
        if left < len(tokens):
            verified.nothing_left.add(number)
            del tokens[left:]
        verified.tokens[number] = tokens
        if scored := [entry for entry in sampled.logprobs[start : start + len(tokens)] if entry is not None]:
            verified.logprobs[number] = scored
        start += len(drafts) + 1
    return verified


def _needed(forward: Forward, logits: mx.array) -> mx.array:
    """The logits after y and after the drafts of all rows, without those of padding: [sum of valid, V]."""
    width = len(forward.tokens[0])
    flat = logits.reshape(-1, logits.shape[-1])
    if forward.packed or min(forward.valid) == width:
        return flat
    return flat[mx.array([row * width + i for row, valid in enumerate(forward.valid) for i in range(valid)])]
