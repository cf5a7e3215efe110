"""Tokens that a grammar forces, among drafts: their chance is 1, and they say nothing about a drafter."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from support.drafts import by_position

from phalanx.sched.plan import Commit, Forward, Step
from phalanx.sched.sequence import Sequence as Row
from phalanx.spec.acceptance import AcceptanceTracker
from phalanx.spec.adaptive import AdaptiveControl
from phalanx.spec.control import Committed, StepTime
from phalanx.spec.drafters import CERTAIN, Draft, RandomDrafter
from phalanx.spec.rules import Always
from phalanx.spec.running_grammars import Grammars
from phalanx.spec.speculator import Speculator
from phalanx.spec.stats import SpecMeter
from phalanx.types import Sampling, SequenceRequest, StopRule


def forced(n: int) -> Draft:
    return Draft([*range(n)], [CERTAIN] * n)


def test_their_chance_is_one_whatever_the_drafter_is_worth():
    tracker = AcceptanceTracker()
    for _ in range(50):
        tracker.pending[1] = by_position([7, 8, 9]), 0
        assert not tracker.observe(1, [0])
    chances = tracker.chances({1: [CERTAIN] * 5, 2: [CERTAIN, CERTAIN, 0, 1]})
    assert chances[1] == [1.0] * 5
    assert chances[2][:2] == [1.0, 1.0] and len(chances[2]) == 2, "the drafter's own tokens are not worth a place"


def test_they_do_not_make_a_drafter_look_better():
    tracker = AcceptanceTracker()
    before = tracker.chances({1: range(3)})
    for _ in range(50):
        tracker.pending[1] = forced(3), 0
        assert tracker.observe(1, [0, 1, 2, 3])
    assert tracker.chances({1: range(3)}) == before


def test_the_control_verifies_them_all_once_it_knows_what_a_step_costs():
    """A step of four tokens takes 1.2 times as long as one of one token; all but the forced drafts are wrong."""
    control = AdaptiveControl(8, cheap=True)
    taken = []
    for step in range(200):
        control.request({1: 8}, {}, overlapped=False)
        draft = forced(3) if step % 4 == 0 else by_position([90, 91, 92])
        k = control.choose({1: draft}).get(1, 0)
        if step % 4 == 0:
            taken.append(k)
        right = k if step % 4 == 0 else 0
        tokens = [*range(right + 1)]
        control.observe({1: tokens}, {1: k} if k else {}, StepTime(1.2 if k else 1.0))
    assert set(taken[5:]) == {3}


def answer(control: AdaptiveControl, disturbed: Collection[int] = ()) -> list[int]:
    """An answer with five forced tokens in every ten; a step costs .3 more for each draft. Returns how many of each
    five were verified.

    Args:
        disturbed: steps, of those with drafts, that take five times as long.
    """
    place, taken = 0, list[int]()
    while place < 100:
        control.request({1: 99 - place}, {}, overlapped=False)
        draft = forced(5) if place % 10 == 5 else None
        k = 0 if draft is None else control.choose({1: draft}).get(1, 0)
        seconds = 1.0 + 0.3 * k
        if k and sum(map(bool, taken)) in disturbed:
            seconds *= 5
        if draft is not None:
            taken.append(k)
        control.observe({1: [*range(k + 1)]}, {1: k} if k else {}, StepTime(seconds))
        place += k + 1
    control.end(1)
    return taken


@pytest.mark.parametrize("disturbed", [(), (0,), (0, 1)])
def test_a_disturbed_first_try_does_not_end_them(disturbed):
    control = AdaptiveControl(8, cheap=True)
    answer(control, disturbed)
    assert set(answer(control)[-5:]) == {5}


def test_they_need_no_budget():
    """Whatever other drafts have lost: what is gained for certain is no exploration."""
    control = AdaptiveControl(8, cheap=True)
    answer(control)
    control._budget.balance = -100.0
    assert set(answer(control)) == {5}
    control.request({1: 8}, {}, overlapped=False)
    assert control.choose({1: by_position([90, 91, 92])}) == {}


def test_the_base_time_is_measured_again_where_no_step_overlaps_any_more():
    """Steps overlapped once; then a grammar holds them back, and the machine has become half as fast."""
    control = AdaptiveControl(8, cheap=True)
    for overlapped, seconds in [(True, 1.0)] * 20 + [(False, 2.0)] * 120:
        control.request({1: 500}, {}, overlapped=overlapped)
        control.observe({1: [0]}, {}, StepTime(seconds))
    assert control._costs.base(1) == 2.0


class Forcing(Grammars):
    """One way to go on for some rows."""

    def __init__(self, forced: dict[int, list[int]]) -> None:
        self.forced = forced

    def forces(self, numbers: Collection[int]) -> bool:
        return not self.forced.keys().isdisjoint(numbers)

    def constrain(self, drafts: Mapping[int, Draft], room: Mapping[int, int], *, force: bool) -> dict[int, Draft]:
        forced = {n: Draft(t, [CERTAIN] * len(t)) for n, t in self.forced.items() if force and room.get(n)}
        return {**drafts, **forced}


class Nothing(RandomDrafter):
    """Finds nothing."""

    def __init__(self) -> None:
        super().__init__(100)

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        return {}


class BacksOff(Always):
    """Skips the next steps after each one."""

    def observe(self, committed: Committed, verified: Mapping[int, int], time: StepTime | None) -> int:
        return 5


def row(number: int, max_drafts: int | None = None) -> Row:
    stop = StopRule(max_tokens=50)
    request = SequenceRequest(
        id=f"{number}", group="g", prompt=[1], sampling=Sampling(), stop=stop, max_drafts=max_drafts
    )
    return Row(number, request, 0.0)


def step_of(spec: Speculator, rows: dict[Row, int], *, overlapped: bool = False) -> dict[int, list[int]]:
    drafts = spec.draft(rows, overlapped=overlapped)
    tokens = {r.number: [*drafts.get(r.number, []), 9] for r in rows}
    fed = {n: (1, *drafts.get(n, [])) for n in tokens}
    forwards = [Forward(0, n, (n,), (row,), (len(row),), sample=True) for n, row in fed.items()]
    commits = [Commit(n, tuple(got), 1 + len(got), len(got)) for n, got in tokens.items()]
    spec.observe(Step(1, (), (), tuple(forwards), 0), tokens, commits, 1.0, 0.0)
    return drafts


def test_they_end_a_backoff_and_nothing_else_does():
    grammars = Forcing({})
    spec = Speculator(Nothing(), BacksOff(4), SpecMeter("test"), 100, _grammars=grammars)
    rows = {row(0): 10, row(1): 10}
    assert step_of(spec, rows) == {}
    assert step_of(spec, rows) == {} and spec._skip == 4
    grammars.forced = {1: [4, 5, 6]}
    assert step_of(spec, rows, overlapped=True) == {} and spec._skip == 3
    assert step_of(spec, rows) == {1: [4, 5, 6]}
    stats = spec.meter.stats()
    assert (stats.drafted, stats.accepted) == (3, 3)


@pytest.mark.parametrize("why", ["the request", "too many rows", "dispatched ahead"])
def test_where_there_are_no_drafts_there_are_none_of_a_grammar_either(why):
    spec = Speculator(Nothing(), Always(4), SpecMeter("test"), 100, 0 if why == "too many rows" else 9)
    spec._grammars = Forcing({0: [4, 5]})
    refusing = why == "the request"
    rows = {row(0, 0 if refusing else None): 0 if refusing else 10}
    assert spec.draft(rows, overlapped=why == "dispatched ahead") == {}
