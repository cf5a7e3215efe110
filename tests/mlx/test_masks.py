"""Masks of grammars in the sampler: only allowed tokens are drawn, and rows without a mask are drawn as ever."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from phalanx.model.sampling.metadata import SamplingMetadata, TokenCounts
from phalanx.model.sampling.sampler import sample
from phalanx.spec.running_grammars import constrain_sampling
from phalanx.types import Sampling

ROWS = 8
KINDS = {
    "greedy": Sampling(temperature=0.0),
    "free": Sampling(temperature=1.0, seed=7),
    "min_p": Sampling(temperature=1.0, seed=7, min_p=0.2),
    "top_k": Sampling(temperature=0.8, seed=7, top_k=5),
    "top_p": Sampling(temperature=1.0, seed=7, top_p=0.5),
    "penalties": Sampling(temperature=1.0, seed=7, repetition_penalty=1.3, presence_penalty=1.0, logprobs=2),
}


def place(sampling: Sampling, mask: np.ndarray | None = None, banned: frozenset[int] = frozenset()) -> SamplingMetadata:
    """A place; `mask` is [V] bool."""
    made = SamplingMetadata(sampling, 3, TokenCounts([1, 2], [5]), banned)
    made.allowed = None if mask is None else words(mask)
    return made


def words(mask: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(mask) // 32) * 32, dtype=np.uint8)
    padded[: len(mask)] = mask
    return np.packbits(padded, bitorder="little").view(np.uint32)


def random_masks(vocabulary: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(vocabulary)
    masks = rng.random((count, vocabulary)) < rng.choice([0.02, 0.5], size=(count, 1))
    masks[np.arange(count), rng.integers(0, vocabulary, count)] = True
    return masks


@pytest.mark.parametrize("vocabulary", [64, 70, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_row_is_drawn_as_one_whose_other_logits_are_minus_infinity(kind, vocabulary):
    sampling = KINDS[kind]
    logits = np.random.default_rng(1).normal(size=(ROWS, vocabulary)).astype(np.float32)
    masks = random_masks(vocabulary, ROWS)
    masked = sample(mx.array(logits), [place(sampling, mask) for mask in masks])
    bare = sample(mx.array(np.where(masks, logits, -np.inf)), [place(sampling) for _ in masks])
    assert masked.tokens == bare.tokens and not masked.nothing_left
    assert all(masks[row, token] for row, token in enumerate(masked.tokens))
    if sampling.logprobs is not None:  # of the raw distribution
        assert [entry.logprob for entry in masked.logprobs] != [entry.logprob for entry in bare.logprobs]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_mask_and_rows_without_a_token_beside_others(kind):
    sampling, vocabulary = KINDS[kind], 70
    logits = mx.random.normal((ROWS, vocabulary), key=mx.random.key(3))
    masks = random_masks(vocabulary, ROWS)
    alone = [sample(logits[i : i + 1], [place(sampling, mask)]).tokens[0] for i, mask in enumerate(masks)]
    free = [sample(logits[i : i + 1], [place(sampling)]).tokens[0] for i in range(ROWS)]
    places = [place(sampling, None if i % 3 == 0 else masks[i]) for i in range(ROWS)]
    places[4] = place(sampling, np.zeros(vocabulary, dtype=bool))
    mixed = sample(logits, places)
    assert mixed.nothing_left == {4}
    wanted = [free[i] if i % 3 == 0 else alone[i] for i in range(ROWS)]
    assert [t for i, t in enumerate(mixed.tokens) if i != 4] == [t for i, t in enumerate(wanted) if i != 4]


@pytest.mark.parametrize("known", [40, 64, 200])
def test_a_tokenizer_with_fewer_or_more_tokens_than_the_model(known):
    """Logits of ids that it does not know are not allowed; bits beyond the logits mean nothing."""
    logits = mx.random.normal((1, 100), key=mx.random.key(5))
    token = sample(logits, [place(KINDS["greedy"], np.ones(known, dtype=bool))]).tokens[0]
    assert token == int(mx.argmax(logits[0, :known]))


def test_the_ban_of_stop_ids_yields_where_nothing_else_is_allowed():
    stops = frozenset({3, 40})
    only_stops, more = np.zeros(70, dtype=bool), np.zeros(70, dtype=bool)
    only_stops[[3, 40]] = more[[3, 40, 9]] = True
    places = [place(KINDS["greedy"], banned=stops) for _ in range(2)]
    constrain_sampling(places, np.stack([words(only_stops), words(more)]))
    logits = mx.zeros((2, 70)).at[:, 40].add(5.0)
    assert sample(logits, places).tokens == [40, 9]
