"""What serving and being a group add: the rest of a small model's step, or what links say."""

from __future__ import annotations

import pytest
from support.planning import shape, timings

from phalanx.planning.group_overhead import all_reduce_of_steps, from_links, overhead, serving_cost
from phalanx.planning.timings import ServedSteps, ServingCost
from phalanx.types import AllReduceFigure, SelfTest

NONE = ServingCost()
CONTEXTS = {1: 100, 4: 120, 16: 200}  # tokens, by number of streams


def computed(rows: int, degree: int = 1) -> float:
    """Seconds of a step of eight layers, without anything around it."""
    own = timings(degree).decode[(1, 4, 16).index(rows)]
    return 8 * (own.layer_s + rows * CONTEXTS[rows] * 1e-9) + own.ends_s


def served(per_step: float, per_row: float = 0.0, *, degree: int = 1, first: float = 1.0) -> ServedSteps:
    """Streams whose steps take so much longer than their computation."""
    steps = {rows: computed(rows, degree) + per_step + rows * per_row for rows in (1, 4, 16)}
    return ServedSteps(prompt=48, context=CONTEXTS, step_s=steps, first_s=first)


def test_what_serving_costs_is_what_computing_leaves_of_a_step():
    found = serving_cost(served(0.001, 0.0002, first=0.5), timings(), shape(layers=8))
    assert (found.step_s, found.row_s) == (pytest.approx(0.001), pytest.approx(0.0002))
    assert found.first_s == pytest.approx(0.5 - 47 * 8 * 1e-4 - computed(1))


def test_what_a_group_adds_is_what_serving_and_sums_leave():
    figures = [AllReduceFigure(bytes=1 << 20, median_us=900.0, gb_per_s=1.0)]
    figures += [AllReduceFigure(bytes=4096, median_us=20.0, gb_per_s=1.0)]
    test = SelfTest(summed=2, all_reduce=figures)
    cost = ServingCost(step_s=0.001, row_s=0.0002)
    found = overhead((2,), served(0.008, 0.0005, degree=2), cost, test, timings(2), shape(layers=8))
    assert [figure.bytes for figure in found.all_reduce] == [4096, 1 << 20]
    assert found.step_s == pytest.approx(0.008 - 0.001 - 16 * 20e-6)
    assert found.row_s == pytest.approx(0.0003)
    assert found.measured


def test_a_step_that_is_faster_than_its_parts_adds_nothing():
    fast = ServedSteps(prompt=48, context=CONTEXTS, step_s={1: 1e-6, 16: 2e-6}, first_s=1e-6)
    found = serving_cost(fast, timings(), shape())
    assert (found.step_s, found.row_s, found.first_s) == (0.0, 0.0, 0.0) and found.small_step_s == computed(1)
    alone = overhead((1, 1), fast, NONE, None, timings(), shape())
    assert (alone.step_s, alone.row_s, alone.all_reduce) == (0.0, 0.0, ())


def test_more_streams_never_cost_less_than_one():
    odd = ServedSteps(prompt=48, context=CONTEXTS, step_s={1: 0.5, 16: 0.4}, first_s=1.0)
    assert serving_cost(odd, timings(), shape()).row_s == 0.0


def test_an_all_reduce_within_a_step_is_what_computing_leaves_of_it():
    test = SelfTest(summed=2, reductions=16, step_ms=5.0)
    assert all_reduce_of_steps(test, alone_s=2e-3) == pytest.approx(4e-3 / 16)
    assert all_reduce_of_steps(test, alone_s=99.0) == 0.0
    assert all_reduce_of_steps(SelfTest(step_ms=5.0), alone_s=2e-3) is None, "stages of one rank"
    assert all_reduce_of_steps(SelfTest(summed=0, reductions=16, step_ms=5.0), alone_s=2e-3) is None
    found = from_links((2,), [1e-3], [1e8], 7e-3)
    assert found.all_reduce[0].seconds == pytest.approx(7e-3 + found.all_reduce[0].bytes / 1e8)
    assert found.step_s == pytest.approx(1e-3)


def test_links_alone():
    found = from_links((2,), [1e-3, 2e-3], [1e9, 1e8])
    assert not found.measured
    assert found.step_s == pytest.approx(2e-3)
    least = found.all_reduce[0]
    assert least.seconds == pytest.approx(2 * (1e-3 + least.bytes / 2 / 1e8))
    stages = from_links((1, 1, 1), [1e-3], [1e9])
    assert stages.all_reduce == () and stages.step_s == pytest.approx(2e-3) and stages.bytes_per_s == 1e9
