"""Groups whose ranks add or round otherwise do not pass for each other: a gateway moves streams between equal ones."""

from __future__ import annotations

from itertools import combinations

from phalanx.config import EngineConfig, GroupConfig
from phalanx.engine.role import reduction_order

PLAIN, HALF = EngineConfig(model="m"), EngineConfig(model="m", pp_activation_dtype="float16")


def group(*widths: int) -> GroupConfig:
    return GroupConfig(size=sum(widths), widths=widths, backend="mpi", nonce=1, control="/c")


def test_every_difference_between_groups_counts():
    orders = [
        reduction_order(PLAIN, None, ()),
        reduction_order(PLAIN, group(3), ()),
        reduction_order(PLAIN, group(2, 1), [(1, 4), (0, 1), (0, 1)]),
        reduction_order(PLAIN, group(2, 1), [(3, 4), (0, 3), (0, 3)]),
        reduction_order(PLAIN, group(1, 2), [(1, 4), (1, 4), (0, 1)]),
        reduction_order(HALF, group(1, 2), [(1, 4), (1, 4), (0, 1)]),
    ]
    assert all(one != other for one, other in combinations(orders, 2))


def test_groups_that_are_alike():
    """Where they are, and how they meet, does not count."""
    here = reduction_order(PLAIN, group(1, 1), [(2, 4), (0, 2)])
    there = GroupConfig(size=2, widths=(1, 1), backend="mpi", nonce=2, control="h:1", hosts=("a", "b"))
    assert reduction_order(PLAIN, there, [(2, 4), (0, 2)]) == here
