"""Compares two servers by the same load, in turns: figures by round, and ratios with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
from msgspec.structs import replace

from phalanx.bench.measurement import Measurement, figures
from phalanx.bench.workload import LoadConfig

RATIOS = (
    "output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms"
)  # fmt: skip
"""Figures that are compared; for the first two, higher is better."""

Figures = Mapping[str, Any]


class Side(NamedTuple):
    """One of the two servers."""

    name: str
    client: httpx.AsyncClient
    model: str


async def compare(
    sides: Sequence[Side],
    config: LoadConfig,
    rounds: int,
    found: Mapping[str, list[Figures]],
    on_end: Callable[[bool], None],
) -> None:
    """Measure the servers in the order A B, B A, A B, ...: slow drifts of the machine affect both.

    Each round has its own prompts, so that no prefix is cached. Only the first round has warm-ups.

    Args:
        found: name of a server -> gets its figures after each round in which both were measured.

    Raises:
        RequestFailed: a warm-up failed.
    """
    for turn in range(rounds):
        of_turn = replace(config, seed=config.seed + turn, num_warmups=0 if turn else config.num_warmups)
        measured = {}
        for side in sides if turn % 2 == 0 else sides[::-1]:
            one = Measurement(of_turn, side.model, on_end)
            await one.run(side.client)
            measured[side.name] = figures(one.load)
        for name, of_side in measured.items():
            found[name].append(of_side)


def ratios(a: Sequence[Figures], b: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Figure -> the ratio of the medians of A and B, and the least and greatest ratio within a round.

    Figures without a value in some round, or of 0, are left out.
    """
    found = {}
    for name in RATIOS:
        pairs = [(one[name], other[name]) for one, other in zip(a, b, strict=True)]
        if pairs and all(one is not None and other for one, other in pairs):
            of_rounds = [one / other for one, other in pairs]
            of_medians = statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)
            found[name] = {"ratio": of_medians, "min": min(of_rounds), "max": max(of_rounds)}
    return found
