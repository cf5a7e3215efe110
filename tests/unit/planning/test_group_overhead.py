"""What being a group adds: the rest of a small model's step, or what links say."""

from __future__ import annotations

import pytest
from support.planning import shape, timings

from phalanx.planning.group_overhead import from_links, overhead
from phalanx.types import AllReduceFigure, SelfTest


def test_the_step_less_computing_and_sums_is_left():
    figures = [AllReduceFigure(bytes=1 << 20, median_us=900.0, gb_per_s=1.0)]
    figures += [AllReduceFigure(bytes=4096, median_us=20.0, gb_per_s=1.0)]
    test = SelfTest(summed=2, step_ms=8.0, all_reduce=figures)
    found = overhead((2,), test, timings(2, layer_s=0.001, ends_s=0.002), shape(layers=8))
    assert [figure.bytes for figure in found.all_reduce] == [4096, 1 << 20]
    assert found.step_s == pytest.approx(0.008 - (8 * 0.0005 + 0.002) - 16 * 20e-6)
    assert found.measured


def test_a_step_that_is_faster_than_its_parts_adds_nothing():
    assert overhead((1, 1), SelfTest(step_ms=0.1), timings(), shape()).step_s == 0.0
    assert overhead((1,), None, timings(), shape()).step_s == 0.0


def test_links_alone():
    found = from_links((2,), [1e-3, 2e-3], [1e9, 1e8])
    assert not found.measured
    assert found.step_s == pytest.approx(2e-3)
    least = found.all_reduce[0]
    assert least.seconds == pytest.approx(2 * (1e-3 + least.bytes / 2 / 1e8))
    stages = from_links((1, 1, 1), [1e-3], [1e9])
    assert stages.all_reduce == () and stages.step_s == pytest.approx(2e-3) and stages.bytes_per_s == 1e9
