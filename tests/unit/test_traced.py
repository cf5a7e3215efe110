"""A position that notices whether a model computes with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from phalanx.kernels.traced import Traced


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1, lambda t: 1 + t, lambda t: t - 1, lambda t: 2 * t, lambda t: t // 2, lambda t: t % 4,
        lambda t: -t, lambda t: t < 3, lambda t: t <= 3, lambda t: t == 5, lambda t: t != 5, bool, float, int, hash,
        lambda t: max(t, 3), lambda t: f"{t}", str, lambda t: {t: 1}, lambda t: math.floor(t), lambda t: t << 1,
        lambda t: t.bit_length(), lambda t: divmod(t, 2), lambda t: [0] * t,
    ],
)  # fmt: skip
def test_arithmetic_sets_used_and_gives_the_same_result(use: Callable[[int], object]):
    traced = Traced(5)
    assert use(traced) == use(5)
    assert traced.used


def test_passing_it_on_is_not_computing():
    traced = Traced(5)
    passed = (lambda offset: offset)(traced)
    assert isinstance(passed, int)
    assert type(passed.plain) is int
    assert passed.plain == 5
    assert not traced.used
    assert not Traced(5).used
