"""Links as the page shows them: both ends' figures as one, bad ones first with remedies, nothing that is not known."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.faults import by_name, recognise
from phalanx.server.endpoints.overview_links import FRESH_S, links
from phalanx.types import AllReduceFigure, LinkStats, RankStats, SelfTest

BROKEN = "rank 0: FrameLost: rank 1 on b to rank 0 on a: the connection broke: Connection timed out."
TEST = SelfTest(
    all_reduce=[
        AllReduceFigure(bytes=4096, median_us=80.0, gb_per_s=0.05),
        AllReduceFigure(bytes=1 << 20, median_us=900.0, gb_per_s=1.16),
    ]
)


def stages(**control: Any) -> list[RankStats]:
    """Two stages on two hosts. `control`: of the leader's end of the connection that carries plans."""
    return [
        RankStats(
            rank=0, stage=1, host="a", pid=1, links=[
                LinkStats(peer=1, carries="plans", **control),
                LinkStats(peer=1, carries="hidden states", frames=7, bytes=700, waited_s=1.26, round_trip_us=300,
                          segments=5, resent=0),
            ],
        ),
        RankStats(
            rank=1, stage=0, host="b", pid=2, links=[
                LinkStats(peer=0, carries="plans"),
                LinkStats(peer=0, carries="hidden states", round_trip_us=250, segments=40, resent=1),
            ],
        ),
    ]  # fmt: skip


def pair(hosts: tuple[str, str] = ("a", "a"), reductions: int = 9) -> list[RankStats]:
    """A stage of two ranks, whose control connection nothing is known of."""
    return [
        RankStats(
            rank=rank, host=host, pid=rank, reductions=reductions, links=[LinkStats(peer=1 - rank, carries="plans")]
        )
        for rank, host in enumerate(hosts)
    ]


def test_both_ends_of_a_connection_are_one_row() -> None:
    (row,) = [row for row in links(stages(), None, []) if row["carries"] == "hidden states"]
    assert row == {
        "name": "rank 0 on a, rank 1 on b", "carries": "hidden states", "messages": 7, "bytes": 700, "segments": 45,
        "resent": 1, "waited_seconds": 1.3, "latency_us": 250, "faults": 0,
    }  # fmt: skip


def test_what_is_not_known_is_left_out() -> None:
    sums, plans = links(pair(reductions=0), None, [])
    assert sums == {"name": "ranks 0, 1", "carries": "all-reduces", "faults": 0}
    assert plans == {"name": "ranks 0, 1", "carries": "plans", "faults": 0}
    assert links([RankStats(rank=0, host="a", pid=1)], None, []) == []


def test_all_reduces_have_the_figures_of_the_self_test() -> None:
    sums, _ = links(pair(), TEST, [])
    assert (sums["messages"], sums["latency_us"], sums["gb_per_s"]) == (9, 80.0, 1.16)


@pytest.mark.parametrize(
    ("what", "ranks", "carries", "fault"),
    [
        (BROKEN, stages(), "hidden states", "stage-link"),
        ("rank 1 (b, pid 7) has given no sign of life for 2.1 s", stages(), "plans", "rank-silent"),
        (
            "rank 0: CollectiveFault: step 2: the all-reduce is wrong at layers.3.mlp (checksum) on rank 1 on b.",
            pair(("a", "b")), "all-reduces", "wrong-sums",
        ),
    ],
)  # fmt: skip
def test_a_link_that_a_fault_names_is_first_for_an_hour(
    what: str, ranks: list[RankStats], carries: str, fault: str
) -> None:
    bad, *others = links(ranks, None, [("rank 1 was killed by signal 9", 5.0), (what, FRESH_S - 1)])
    assert (bad["carries"], bad["problem"], bad["faults"]) == (carries, what, 1)
    assert bad["remedy"] == by_name(fault).remedy
    assert all("problem" not in row and row["faults"] == 0 for row in others)
    later = links(ranks, None, [(what, FRESH_S)])
    assert not any("problem" in row for row in later)
    assert [row["faults"] for row in later if row["carries"] == carries] == [1]


@pytest.mark.parametrize(
    ("control", "fault"),
    [
        ({"segments": 900, "resent": 10}, "link-loses"),
        ({"segments": 2000, "resent": 10}, None),
        ({"segments": 100, "resent": 9}, None),
        ({"round_trip_us": 5200}, "link-slow"),
        ({"round_trip_us": 1000}, None),
    ],
)
def test_a_link_that_loses_packets_or_is_slow_is_bad(control: dict[str, int], fault: str | None) -> None:
    first = links(stages(**control), None, [])[0]
    if fault is None:
        assert "problem" not in first
        return
    assert first["carries"] == "plans" and first["remedy"] == by_name(fault).remedy
    assert recognise(first["problem"]) == by_name(fault), "logs that say so are recognised as well"


def test_the_self_tests_warning_of_a_slow_link_is_recognised_and_that_of_a_busy_machine_is_not() -> None:
    slow = "the control connection took 5.2 ms for a round trip, and should take less than 1 ms: it should be wired"
    assert recognise(slow) == by_name("link-slow")
    assert recognise(slow.replace("it should be wired", "other programs keep this machine busy")) is None


@pytest.mark.parametrize(
    "what",
    [
        f"rank {'9' * 6000} on a to rank 1 on b: the frame of step 1",
        "rank 1 on a to " * 70,
        "rank 7 (zz, pid 1) has given no sign of life for 3 s",
        "CollectiveFault rank " + "1" * 5000 + " on b",
        "",
    ],
)
def test_texts_of_hostile_ranks_name_no_link_and_break_nothing(what: str) -> None:
    assert all(row["faults"] == 0 for row in links(stages(), None, [(what, 1.0)]))


def test_an_end_whose_rank_is_not_there_is_left_out() -> None:
    alone = [RankStats(rank=0, host="a", pid=1, links=[LinkStats(peer=5, carries="plans")])]
    assert links(alone, None, []) == []
