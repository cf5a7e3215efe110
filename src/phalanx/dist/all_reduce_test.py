"""Tests all-reduces of known values at several sizes and dtypes, and measures their speed.

Every rank runs it at start, and in `phalanx selftest`.
"""

from __future__ import annotations

import statistics
import time
from typing import cast

import mlx.core as mx

from phalanx.errors import CollectiveFault
from phalanx.types import AllReduceFigure

SIZES = (1, 1024, 16384, 262144)  # elements
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROUNDS = 9  # measurements per median


def test_all_reduce(group: mx.distributed.Group) -> list[AllReduceFigure]:
    """Check every size in every dtype, then measure every size in float32.

    Raises:
        CollectiveFault: a sum is wrong; names its size and dtype, the expected value and the received one.
    """
    for dtype in DTYPES:
        for size in SIZES:
            _check(group, size, dtype)
    return [_measure(group, size) for size in SIZES]


def sum_of_ranks(group: mx.distributed.Group) -> float:
    """all_sum of rank + 1: the smallest sum to which every rank must contribute."""
    return float(cast(float, mx.distributed.all_sum(mx.array(float(group.rank() + 1)), group=group).item()))


def _check(group: mx.distributed.Group, size: int, dtype: mx.Dtype) -> None:
    """Rank r contributes (r + 1) * (1, 2, 1, 2, ...): exact in every dtype, different everywhere."""
    pattern = mx.arange(size) % 2 + 1
    ranks = group.size()
    expected = (pattern * (ranks * (ranks + 1) // 2)).astype(dtype)
    got = mx.distributed.all_sum((pattern * (group.rank() + 1)).astype(dtype), group=group)
    mx.eval(got)
    differs = cast("list[bool]", (got != expected).tolist())
    if any(differs):
        at = differs.index(True)
        raise CollectiveFault(
            f"self-test: all_sum of {size} {str(dtype).removeprefix('mlx.core.')} values over {ranks} ranks has "
            f"{sum(differs)} wrong; number {at} is {got[at].item()} instead of {expected[at].item()} on rank "
            f"{group.rank()}.",
            remedy="The collective backend delivers wrong data: check cables and devices, or use another --backend.",
        )


def _measure(group: mx.distributed.Group, size: int) -> AllReduceFigure:
    values = mx.ones(size)
    mx.eval(values)
    seconds = []
    for _ in range(ROUNDS):
        before = time.perf_counter()
        mx.eval(mx.distributed.all_sum(values, group=group))
        seconds.append(time.perf_counter() - before)
    median = statistics.median(seconds)
    return AllReduceFigure(bytes=values.nbytes, median_us=median * 1e6, gb_per_s=values.nbytes / median / 1e9)
