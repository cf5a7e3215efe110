"""The links between ranks for the page and `phalanx top`: one row per link with its traffic, figures and state; bad
links first.

Bad is a link that a fault of the last hour names, that loses packets, or that is slow. What no rank measures is left
out. The remedies are those of `faults.py`, which knows the words by which the links are called bad here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from phalanx.faults import by_name, recognise
from phalanx.types import LinkStats, RankStats, SelfTest

FRESH_S = 3600.0  # after a fault
SLOW_US = 1000.0  # a round trip through a switch takes 200
MIN_RESENT, LOSSY = 10, 0.01  # segments, and their share: a sound cable loses none in a million

_STAGES = re.compile(r"rank (\d{1,4}) on \S+ to rank (\d{1,4}) on \S+:")
_SUMMED = re.compile(r"rank (\d{1,4}) on ")
_SILENT = re.compile(r"rank (\d{1,4}) \(")
SUMS = ("wrong-sums", "ring-peer-lost")
SILENT = ("rank-silent", "agent-unreachable")


class Blame(Struct, frozen=True, kw_only=True):
    """A fault of a link."""

    what: str
    remedy: str
    carries: str
    ranks: frozenset[int]


Blames = Sequence[tuple[Blame, float]]
"""Faults and their ages in seconds, oldest first."""


@lru_cache(maxsize=128)  # more than a server remembers: the patterns are searched once for each fault
def blame(what: str) -> Blame | None:
    """The link that a fault's text names; None if the fault concerns no link."""
    fault = recognise(what)
    if fault is None:
        return None
    if fault.name == "stage-link" and (stages := _STAGES.search(what)) is not None:
        carries, ranks = "hidden states", frozenset(map(int, stages.groups()))
    elif fault.name in SUMS or fault.name.startswith("rdma-"):
        carries, ranks = "all-reduces", frozenset(map(int, _SUMMED.findall(what)))
    elif fault.name in SILENT and (silent := _SILENT.search(what)) is not None:
        carries, ranks = "plans", frozenset((0, int(silent[1])))
    else:
        return None
    return Blame(what=what, remedy=fault.remedy, carries=carries, ranks=ranks)


def links(
    ranks: Sequence[RankStats], test: SelfTest | None, faults: Iterable[tuple[str, float]]
) -> list[dict[str, Any]]:
    """The rows, bad ones first.

    Args:
        ranks: of the group, in order.
        test: the self-test at its start.
        faults: the texts of the engine's last ones and their ages in seconds, oldest first.
    """
    blames = [(found, age_s) for what, age_s in faults if (found := blame(what)) is not None]
    rows = [*_all_reduces(ranks, test, blames), *_connections(ranks, blames)]
    return sorted(rows, key=lambda row: "problem" not in row)


def _all_reduces(ranks: Sequence[RankStats], test: SelfTest | None, blames: Blames) -> Iterator[dict[str, Any]]:
    """A row for each stage whose ranks sum."""
    for stage in sorted({rank.stage for rank in ranks}):
        here = [rank for rank in ranks if rank.stage == stage]
        if len(here) == 1:
            continue
        row: dict[str, Any] = {"name": _among(here), "carries": "all-reduces"}
        if verified := max(rank.reductions for rank in here):
            row["messages"] = verified
        if test is not None and test.all_reduce and ranks[0] in here:  # the self-test tells of rank 0's stage
            row |= {"latency_us": test.all_reduce[0].median_us, "gb_per_s": test.all_reduce[-1].gb_per_s}
        numbers = {rank.rank for rank in here}
        mine = [
            (found, age_s)
            for found, age_s in blames
            if found.carries == "all-reduces" and (found.ranks & numbers or not found.ranks)
        ]
        yield row | _verdict(row, mine)


def _connections(ranks: Sequence[RankStats], blames: Blames) -> Iterator[dict[str, Any]]:
    """A row for each connection, from what its two ends know."""
    ends: dict[tuple[int, int, str], list[LinkStats]] = {}
    for rank in ranks:
        for end in rank.links:
            pair = min(rank.rank, end.peer), max(rank.rank, end.peer)
            ends.setdefault((*pair, end.carries), []).append(end)
    by_rank = {rank.rank: rank for rank in ranks}
    for (one, other, carries), found in sorted(ends.items()):
        if one not in by_rank or other not in by_rank:
            continue
        row: dict[str, Any] = {"name": _among([by_rank[one], by_rank[other]]), "carries": carries}
        for name, key in (("messages", "frames"), ("bytes", "bytes"), ("segments", "segments"), ("resent", "resent")):
            if known := _known(found, key):
                row[name] = sum(known)
        if known := _known(found, "waited_s"):
            row["waited_seconds"] = round(sum(known), 1)
        if known := _known(found, "round_trip_us"):
            row["latency_us"] = min(known)
        mine = [
            (blamed, age_s) for blamed, age_s in blames if blamed.carries == carries and blamed.ranks == {one, other}
        ]
        yield row | _verdict(row, mine)


def _known(ends: Iterable[LinkStats], name: str) -> list[Any]:
    return [value for end in ends if (value := getattr(end, name)) is not None]


def _verdict(row: Mapping[str, Any], blames: Blames) -> dict[str, Any]:
    """Its faults, and what is wrong with it now."""
    found: dict[str, Any] = {"faults": len(blames)}
    latency, resent, segments = (row.get(key, 0) for key in ("latency_us", "resent", "segments"))
    if blames and blames[-1][1] < FRESH_S:
        last = blames[-1][0]
        return found | {"problem": last.what, "remedy": last.remedy}
    if resent >= MIN_RESENT and resent > LOSSY * segments:
        problem, fault = f"{row['name']}: {resent:,} of {segments:,} TCP segments were sent again.", "link-loses"
    elif latency > SLOW_US and row["carries"] != "all-reduces":
        problem, fault = f"{row['name']}: took {latency / 1000:.1f} ms for a round trip at best.", "link-slow"
    else:
        return found
    return found | {"problem": problem, "remedy": by_name(fault).remedy}


def _among(ranks: Sequence[RankStats]) -> str:
    """The ranks, with their hosts if there are several."""
    if len({rank.host for rank in ranks}) == 1:
        return f"ranks {', '.join(str(rank.rank) for rank in ranks)}"
    return ", ".join(f"rank {rank.rank} on {rank.host}" for rank in ranks)
