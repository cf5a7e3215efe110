"""The rule for 16 bits lets through what rounding does, and nothing else (design: Proof)."""

import random
from dataclasses import replace

import pytest
from support.near_ties import FLIPS, Forced, judge

TOKENS, VOCAB, SPREAD = 4000, 40, 3.0


def said(noise: float, fault: float = 0.0, every: int = 50) -> Forced:
    """What comes of logits that are off by `noise`, for a process whose own are off by as much in another way; every
    so many tokens it is off by `fault` more."""
    rnd = random.Random(f"{noise} {fault}")
    behind, rounding = [], 0.0
    for i in range(TOKENS):
        logits = [rnd.gauss(0, SPREAD) for _ in range(VOCAB)]
        ours = [x + rnd.gauss(0, noise) + (rnd.gauss(0, fault) if i % every == 0 else 0.0) for x in logits]
        rounding = max(rounding, *(abs(rnd.gauss(0, noise)) for _ in logits))
        behind.append(max(logits) - logits[max(range(VOCAB), key=ours.__getitem__)])
    return Forced(behind, rounding, 0)


def test_noise_alone_passes():
    verdict = judge([said(0.003)])
    assert verdict.right
    assert verdict.tokens == TOKENS
    assert 0 < verdict.flips < FLIPS * TOKENS


def test_no_noise_has_no_flips():
    assert judge([said(0.0)]).flips == 0


def test_what_noise_does_not_explain_fails():
    verdict = judge([said(0.003, fault=1.0)])
    assert not verdict.right
    assert verdict.unexplained
    assert all(place % 50 == 0 for place, _, _ in verdict.unexplained)


def test_noise_that_changes_too_many_tokens_fails_unless_mlx_lm_changes_as_many():
    answer = said(0.1)
    verdict = judge([answer])
    assert not verdict.right
    assert not verdict.unexplained
    assert not judge([replace(answer, flips=verdict.flips // 2 - 1)]).right
    assert judge([replace(answer, flips=verdict.flips // 2 + 1)]).right


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_a_number_explains_nothing(wrong):
    assert not judge([Forced([0.0] * 200 + [0.5], float("nan"), 0)]).right
    assert not judge([Forced([0.0] * 200 + [wrong], 0.1, 0)]).right
