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
    return ServingCost(step_s=step_s, row_s=row_s, first_s=max(0.0, served.first_s - prompt_s))


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
    figures = _tested(test)
    all_reduces_s = shape.share(widths[0]).all_reduces * figures[0].seconds if figures else 0.0
    beyond = {
        rows: s - _computed_s(timings, shape, rows, served) - cost.step_s - rows * cost.row_s - all_reduces_s
        for rows, s in served.step_s.items()
    }
    step_s, row_s = _line(beyond)
    return GroupTimings(widths=widths, step_s=step_s, row_s=row_s, all_reduce=figures)


def _tested(test: SelfTest | None) -> tuple[AllReduce, ...]:
    figures = sorted([] if test is None else test.all_reduce, key=lambda figure: figure.bytes)
    return tuple(AllReduce(bytes=figure.bytes, seconds=figure.median_us / 1e6) for figure in figures)


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
    test: SelfTest | None = None,
) -> GroupTimings:
    """Derived from links: one round trip per step (a plan out, a report back), half a round trip per hop between
    stages, and all-reduces that go around a ring twice, unless they were timed.

    Args:
        round_trips_s, bytes_per_s: of the links between the group's hosts; the slowest counts.
        test: of a stage's hosts.
    """
    round_trip_s, speed = max(round_trips_s), min(bytes_per_s)
    width = max(widths)
    turns = 2 * (width - 1)
    derived = tuple(AllReduce(bytes=size, seconds=turns * (round_trip_s / 2 + size / width / speed)) for size in SIZES)
    all_reduce = (_tested(test) or derived) if width > 1 else ()
    step_s = round_trip_s + (len(widths) - 1) * round_trip_s / 2
    return GroupTimings(widths=widths, step_s=step_s, all_reduce=all_reduce, bytes_per_s=speed, measured=False)
