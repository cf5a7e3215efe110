"""What serving and a group add to each step: from a small model served on the same machine, or from link speeds.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.planning.model_shape import ModelShape
from phalanx.planning.predictor import decode_point
from phalanx.planning.timings import AllReduce, GroupTimings, RankTimings, ServedSteps, ServingCost
from phalanx.types import SelfTest

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)  # bytes of all-reduces derived from link speeds


def serving_cost(served: ServedSteps, timings: RankTimings, shape: ModelShape) -> ServingCost:
    """What a client of one rank waits for besides the rank's computation.

    Args:
        timings, shape: of the served model.
    """
    step_s, row_s = _line({rows: s - _computed_s(timings, shape, rows, served) for rows, s in served.step_s.items()})
    prompt_s = (served.prompt - 1) * shape.n_layers * timings.token_s + _computed_s(timings, shape, 1, served)
    return ServingCost(
        step_s=step_s, row_s=row_s, first_s=max(0.0, served.first_s - prompt_s),
        small_step_s=_computed_s(timings, shape, 1, served),
    )  # fmt: skip


def overhead(
    widths: tuple[int, ...],
    served: ServedSteps,
    cost: ServingCost,
    test: SelfTest | None,
    timings: RankTimings,
    shape: ModelShape,
) -> GroupTimings:
    """The time of the served steps, minus the ranks' computation, the all-reduces and what serving costs.

    Args:
        cost: of one rank's server on this machine.
        timings, shape: of the served model.
    """
    figures = tuple(
        AllReduce(bytes=figure.bytes, seconds=figure.median_us / 1e6)
        for figure in sorted([] if test is None else test.all_reduce, key=lambda figure: figure.bytes)
    )
    all_reduces_s = shape.share(widths[0]).all_reduces * figures[0].seconds if figures else 0.0
    beyond = {
        rows: s - _computed_s(timings, shape, rows, served) - cost.step_s - rows * cost.row_s - all_reduces_s
        for rows, s in served.step_s.items()
    }
    step_s, row_s = _line(beyond)
    return GroupTimings(widths=widths, step_s=step_s, row_s=row_s, all_reduce=figures)


def all_reduce_of_steps(test: SelfTest, alone_s: float) -> float | None:
    """Seconds of an all-reduce within a step, where a rank also waits for others to arrive: what a group's steps of a
    small model take longer than computing. All-reduces measured alone are faster.

    Args:
        alone_s: of one rank's step.
    """
    if test.summed < 2 or not test.reductions or not test.step_ms:
        return None
    return max(0.0, test.step_ms / 1e3 - alone_s / test.summed) / test.reductions


def _computed_s(timings: RankTimings, shape: ModelShape, rows: int, served: ServedSteps) -> float:
    """Seconds of a step without anything around it."""
    layer_s, ends_s = decode_point(timings, rows)
    return shape.n_layers * (layer_s + rows * served.context[rows] * timings.decode_context_s) + ends_s


def _line(by_rows: Mapping[int, float]) -> tuple[float, float]:
    """Seconds of a step and of each of its rows, neither below 0: through the fewest and the most rows."""
    few, many = min(by_rows), max(by_rows)
    least, most = max(0.0, by_rows[few]), max(0.0, by_rows[many])
    row_s = max(0.0, (most - least) / (many - few)) if many > few else 0.0
    row_s = min(row_s, least / few)
    return least - few * row_s, row_s


def from_links(
    widths: tuple[int, ...],
    round_trips_s: Sequence[float],
    bytes_per_s: Sequence[float],
    all_reduce_s: float | None = None,
) -> GroupTimings:
    """Derived from links: one round trip per step (a plan out, a report back), half a round trip per hop between
    stages, and all-reduces that go around a ring twice.

    Args:
        round_trips_s, bytes_per_s: of the links between the group's hosts; the slowest counts.
        all_reduce_s: of a small all-reduce, if it is known from a group's steps.
    """
    round_trip_s, speed = max(round_trips_s), min(bytes_per_s)
    width = max(widths)
    turns = 2 * (width - 1)
    least_s = turns * round_trip_s / 2 if all_reduce_s is None else all_reduce_s
    sums = tuple(AllReduce(bytes=size, seconds=least_s + turns * size / width / speed) for size in SIZES)
    step_s = round_trip_s + (len(widths) - 1) * round_trip_s / 2
    return GroupTimings(
        widths=widths, step_s=step_s, all_reduce=sums if width > 1 else (), bytes_per_s=speed, measured=False
    )
