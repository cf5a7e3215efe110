"""A draft model that helps on an unsteady machine is not given up for good after some bad luck."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest
from machine import World, draft_model, predictable

SEEDS = range(20)
PROMPT, ANSWER = 5, 160


def small_model(rows: int, width: float) -> float:
    return 1.0 + 0.12 * (rows * width - 1)


def speeds(seed: int, rate: float, answers: int) -> list[float]:
    """Tokens per non-speculative step, of each answer. A call of the drafter costs half a step, whatever its length."""
    text, steps = predictable(rate), []
    world = World(
        draft_model(16), small_model, lambda row, place: text(100 * seed, place), drafting_s=0.09,
        drafting_at_all_s=0.45, noise=0.3, reading_s=0.05, overhead_s=0.005, overlap=True, chance=Random(seed),
    )  # fmt: skip
    for _ in range(answers):
        place, began = world.places.get(0, 0), world.seconds
        world.answer(0, PROMPT, ANSWER)
        steps.append((world.places[0] - place) / (world.seconds - began))
    return steps


def test_no_good_draft_model_is_given_up():
    gains = [mean(speeds(seed, 0.95, 16)) for seed in SEEDS]
    assert min(gains) > 1.15
    assert mean(gains) > 1.5


def test_one_that_barely_pays_is_rarely_given_up():
    last = [mean(speeds(seed, 0.85, 16)[-4:]) for seed in SEEDS]
    assert sum(speed < 1.02 for speed in last) <= 6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hopeless_one_costs_little(seed):
    assert mean(speeds(seed, 0.0, 8)) > 0.98
