"""The overhead of a group per step: from a small model's self-test on the same machines, or from link speeds.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.planning.model_shape import ModelShape
from phalanx.planning.timings import AllReduce, GroupTimings, RankTimings
from phalanx.types import SelfTest

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)  # bytes of all-reduces derived from link speeds


def overhead(widths: tuple[int, ...], test: SelfTest | None, timings: RankTimings, shape: ModelShape) -> GroupTimings:
    """The time of the self-test's step, minus the ranks' computation and the all-reduces.

    Args:
        timings, shape: of the tested model.
    """
    if test is None:
        return GroupTimings(widths=widths, step_s=0.0)
    figures = tuple(
        AllReduce(bytes=figure.bytes, seconds=figure.median_us / 1e6)
        for figure in sorted(test.all_reduce, key=lambda figure: figure.bytes)
    )
    point = timings.decode[0]
    computed_s = point.layer_s * shape.n_layers + point.ends_s
    sums_s = shape.share(widths[0]).sums * figures[0].seconds if figures else 0.0
    return GroupTimings(widths=widths, step_s=max(0.0, test.step_ms / 1000 - computed_s - sums_s), all_reduce=figures)


def from_links(widths: tuple[int, ...], round_trips_s: Sequence[float], bytes_per_s: Sequence[float]) -> GroupTimings:
    """Derived from links alone: one round trip per step (a plan out, a report back), half a round trip per hop between
    stages, and all-reduces that go around a ring twice.

    Args:
        round_trips_s, bytes_per_s: of the links between the group's hosts; the slowest counts.
    """
    round_trip_s, speed = max(round_trips_s), min(bytes_per_s)
    width = max(widths)
    turns = 2 * (width - 1)
    sums = tuple(AllReduce(bytes=size, seconds=turns * (round_trip_s / 2 + size / width / speed)) for size in SIZES)
    step_s = round_trip_s + (len(widths) - 1) * round_trip_s / 2
    return GroupTimings(
        widths=widths, step_s=step_s, all_reduce=sums if width > 1 else (), bytes_per_s=speed, measured=False
    )
