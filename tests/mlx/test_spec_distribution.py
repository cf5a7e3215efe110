"""Speculation draws from the model's distribution, position by position (design: Keyed sampling): 14,000 sequences per
case.

The model is a table: the logits behind a token depend on that token only, so that the distribution of every position,
and of every pair of neighbours, can be written down. The drafters are as different as they can be: a good guess, noise,
and one that knows the answer, each for a third of the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from test_sampler import distribution

from phalanx.sched.commit import accept, commit_tokens
from phalanx.sched.plan import Forward
from phalanx.sched.sequence import Sequence as Row
from phalanx.spec import verify as verification
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.spec.verify import verify
from phalanx.types import Sampling, SequenceRequest, StopRule

Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]

VOCABULARY, LENGTH, SEQUENCES, AT_ONCE, K = 8, 4, 14_000, 2_000, 3
PROMPT = [3]
TABLE = (np.random.default_rng(11).standard_normal((VOCABULARY, VOCABULARY)) * 1.3).astype(np.float32)
SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "filtered": Sampling(temperature=1.0, top_p=0.9, min_p=0.05),
    "cool": Sampling(temperature=0.7, top_k=5),
    "cool-filtered": Sampling(temperature=0.7, top_k=6, top_p=0.95, min_p=0.02),
}


def drafts(number: int, known: Sequence[int], answer: Sequence[int], k: int) -> list[int]:
    """Up to k tokens that may follow `known`; fewer for some sequences, so that rows differ in length."""
    k = min(k - number % 2, LENGTH - 1 - len(answer[: len(known) - 1]))
    if number % 3 == 0:
        return [int(token) for token in answer[len(known) - 1 :][:k]]
    if number % 3 == 1:
        return [(number + 3 * i) % VOCABULARY for i in range(k)]
    guess: list[int] = []
    for _ in range(k):
        guess.append(int(np.argmax(TABLE[(list(known) + guess)[-1]])))
    return guess


def generate(sampling: Sampling, answers: Tokens | None) -> tuple[Tokens, float]:
    """Sequences that differ in their seeds; tokens per verified row and step.

    Args:
        answers: what the drafter that knows knows; None is no speculation.

    Returns: [SEQUENCES, LENGTH], and how many tokens a row got per step.
    """
    out = np.zeros((SEQUENCES, LENGTH), dtype=np.int64)
    steps = 0
    for start in range(0, SEQUENCES, AT_ONCE):
        rows = {number: row(number, sampling) for number in range(start, start + AT_ONCE)}
        positions = SamplingMetadataCache()
        while running := {n: r for n, r in rows.items() if r.n_output < LENGTH}:
            steps += len(running)
            step(running, positions, answers)
        for number, done in rows.items():
            out[number] = done.tokens[len(PROMPT) :]
    return out, SEQUENCES * LENGTH / steps


def row(number: int, sampling: Sampling) -> Row:
    keyed = Sampling(
        seed=number, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )
    stop = StopRule(max_tokens=LENGTH)
    return Row(number, SequenceRequest(id=str(number), group="", prompt=PROMPT, sampling=keyed, stop=stop), 0.0)


def step(rows: dict[int, Row], positions: SamplingMetadataCache, answers: Tokens | None) -> None:
    """One verification, and the commits that follow from it."""
    fed = {
        n: [r.tokens[-1], *(drafts(n, r.tokens, answers[n].tolist(), K) if answers is not None else ())]
        for n, r in rows.items()
    }
    width = max(map(len, fed.values()))
    padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in fed.values()]
    forward = Forward(
        0, 0, tuple(rows), tuple(map(tuple, padded)), tuple(len(tokens) for tokens in fed.values()), sample=True
    )
    verified = verify([(forward, mx.array(TABLE)[mx.array(padded)])], rows, positions)
    for number, r in rows.items():
        commit = commit_tokens(r, len(r.tokens) - 1, len(fed[number]), verified.tokens[number])
        r.tokens.extend(commit.tokens)


@cache
def transitions(name: str) -> Floats:
    """Row t: the probabilities of what follows token t."""
    return np.array([distribution(logits.astype(np.float64), SAMPLINGS[name]) for logits in TABLE])


@cache
def plain(name: str) -> Tokens:
    """Without speculation."""
    return generate(SAMPLINGS[name], None)[0]


@cache
def speculative(name: str) -> tuple[Tokens, float]:
    """With speculation, and tokens per row and step."""
    return generate(SAMPLINGS[name], plain(name))


def expected(name: str) -> list[Floats]:
    """Of every position: the probabilities of (token before, token), [V, V]."""
    before = np.eye(VOCABULARY)[PROMPT[-1]]
    pairs = []
    for _ in range(LENGTH):
        pairs.append(before[:, None] * transitions(name))
        before = pairs[-1].sum(axis=0)
    return pairs


def observed(tokens: Tokens) -> list[Floats]:
    """Of every position: how often (token before, token) occurred, [V, V]."""
    before = np.concatenate([np.full((len(tokens), 1), PROMPT[-1]), tokens[:, :-1]], axis=1)
    counts = np.zeros((LENGTH, VOCABULARY, VOCABULARY))
    for at in range(LENGTH):
        np.add.at(counts[at], (before[:, at], tokens[:, at]), 1)
    return list(counts)


def surprise(counts: Floats, probabilities: Floats) -> float:
    """Pearson's chi-square as a standard normal deviate (Wilson and Hilferty); cells expected less than 5 times are
    one cell. Infinite where something impossible happened."""
    p, n = probabilities.ravel(), counts.sum()
    if counts.ravel()[p == 0].any():
        return math.inf
    large = p * n >= 5
    cells = [*zip(counts.ravel()[large], p[large] * n, strict=True)]
    if (rest := (p[~large] * n).sum()) > 0:
        cells.append((counts.ravel()[~large].sum(), rest))
    free = len(cells) - 1
    chi_square = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return ((chi_square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def distance(counts: Floats, probabilities: Floats) -> float:
    """Total variation, as a multiple of what as many exact samples come to on average."""
    n = counts.sum()
    variation = 0.5 * np.abs(counts / n - probabilities).sum()
    chance = 0.5 * np.sqrt(2 / math.pi * probabilities * (1 - probabilities) / n).sum()
    return float(variation / chance)


MAX_SURPRISE = 4.0
"""Standard deviations: 1 in 30,000, and there are 32 tests on fixed seeds."""
MAX_DISTANCE = 2.0


def verdicts(tokens: Tokens, name: str) -> list[tuple[float, float]]:
    """Of every position, token alone and with the one before it: (surprise, distance)."""
    found = []
    for counts, probabilities in zip(observed(tokens), expected(name), strict=True):
        for axis in (True, False):
            seen, p = (counts.sum(axis=0), probabilities.sum(axis=0)) if axis else (counts, probabilities)
            found.append((surprise(seen, p), distance(seen, p)))
    return found


CASES = [pytest.param(name, marks=() if name in ("plain", "cool-filtered") else pytest.mark.soak) for name in SAMPLINGS]
"""No filter, and all of them; `test_sampler.py` draws with each."""


@pytest.mark.parametrize("name", CASES)
def test_every_position_has_the_models_distribution(name: str) -> None:
    tokens, per_step = speculative(name)
    assert per_step > 1.5, "drafts are accepted, or nothing was tested"
    for surprised, distant in verdicts(tokens, name):
        assert surprised < MAX_SURPRISE
        assert distant < MAX_DISTANCE


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_identical_without_speculation(name: str) -> None:
    assert np.array_equal(speculative(name)[0], plain(name))


# -- rules that are wrong, each in a way that somebody would write ---------------------------------------------------


def lenient(drafted: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The first draft is let through in one of ten cases."""
    if drafted and sum(sampled) % 10 == 0:
        return [drafted[0]]
    return list(accept(drafted, sampled))


def one_too_many(drafted: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """What was sampled behind a wrong draft is taken as well."""
    return list(sampled[: len(accept(drafted, sampled)) + 1])


def draft_instead(drafted: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The first wrong draft is committed instead of what was sampled in its place."""
    right = len(accept(drafted, sampled)) - 1
    return list(drafted[: right + 1]) if right < len(drafted) else list(sampled)


@pytest.mark.parametrize(
    ("rule", "name"), [(lenient, "plain"), (one_too_many, "cool-filtered"), (draft_instead, "cool-filtered")]
)
def test_a_wrong_acceptance_rule_is_found(
    rule: Callable[[Sequence[int], Sequence[int]], list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "accept", rule)
    tokens, _ = generate(SAMPLINGS[name], plain(name))
    found = verdicts(tokens, name)
    assert max(surprised for surprised, _ in found) > 1.5 * MAX_SURPRISE
    assert max(distant for _, distant in found) > MAX_DISTANCE
    assert not np.array_equal(tokens, plain(name))
