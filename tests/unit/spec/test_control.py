"""The control: speculation where it pays, and hardly any cost where it does not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import (
    CURVES,
    ROWS,
    World,
    compute_bound,
    draft_model,
    few_cores,
    guess,
    lookup,
    memory_bound,
    predictable,
    stairs,
)
from support.examples import examples

from phalanx.spec.adaptive import AdaptiveControl
from phalanx.spec.budget import ALLOWANCE, PROBE_SHARE
from phalanx.spec.control import StepTime
from phalanx.spec.rules import BACKOFF, Always, FloorControl, build
from phalanx.speculation_config import DraftModelSpeculation, NgramSpeculation


class Fixed(Always):
    """Always k tokens, or none."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.k = k

    def request(self, room, unread, *, overlapped):
        return super().request(room, unread, overlapped=overlapped) if self.k else {}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
class TestHopeless:
    """Free text never below 0.98 of the speed without speculation, from the first step on."""

    def test_lookups(self, curve, rows, noise):
        world = World(lookup(), curve, predictable(0.0), noise=noise, drafting_s=0.0005)
        assert world.run(rows, 256 * rows) > 0.98

    def test_a_draft_model(self, curve, rows, noise):
        world = World(draft_model(), curve, predictable(0.0), noise=noise, drafting_s=0.1)
        assert world.run(rows, 256 * rows) > 0.98
        assert world.run(rows, 256 * rows) > 1 - 1.2 * PROBE_SHARE

    def test_sparse_luck(self, curve, rows, noise):
        """An idea in a third of the steps, a tenth of them right: free text under prompt lookup."""
        world = World(lookup(), curve, predictable(0.1), noise=noise, offers=lambda row, place: place % 3 == 0)
        assert world.run(rows, 256 * rows) > 0.98


class TestPacked:
    """Sixteen rows, of which each has as many drafts as are worth it."""

    def control(self, packs: bool) -> AdaptiveControl:
        return AdaptiveControl(8, cheap=True, pack_above=32 if packs else None)

    @pytest.mark.parametrize("noise", [0.0, 0.1])
    @pytest.mark.parametrize("curve", CURVES)
    def test_free_text(self, curve, noise):
        world = World(self.control(True), curve, predictable(0.0), noise=noise, drafting_s=0.0005, packs=True)
        assert world.run(16, 256 * 16) > 0.98

    def test_texts_that_differ(self):
        """Half of the rows can be foretold, half cannot: what pads those is not paid for."""
        speeds = {}
        for packs in (False, True):
            right = predictable(0.9)
            world = World(
                self.control(packs), lambda rows, width: 16.0 + rows * width,
                lambda row, place, right=right: right(row, place) if row % 2 else 0, packs=packs,
            )  # fmt: skip
            world.run(16, 256 * 16)
            speeds[packs] = world.run(16, 256 * 16)
        assert speeds[True] > 1.1 * speeds[False] and speeds[False] > 0.98

    def test_rows_are_given_by_what_is_known_of_them(self):
        control = self.control(True)
        right = {row: 8 if row < 8 else 1 for row in range(16)}
        world = World(control, lambda rows, width: 16.0 + rows * width, lambda row, place: right[row], packs=True)
        world.run(16, 256 * 16)
        drafts = {row: guess(*range(world.places[row], world.places[row] + 8)) for row in range(16)}
        control.request(dict.fromkeys(range(16), 8), {}, overlapped=False)
        chosen = control.choose(drafts)
        sure, unsure = ([chosen.get(row, 0) for row in rows] for rows in (range(8), range(8, 16)))
        assert min(sure) > max(unsure)


def test_without_control_it_would_have_cost_a_lot():
    """The tests above can fail."""
    assert World(Always(8), few_cores, predictable(0.0)).run(1, 256) < 0.3
    assert World(Always(8), memory_bound, predictable(0.0)).run(16, 256) < 0.5


@pytest.mark.parametrize(("rate", "rows"), [(0.5, 1), (0.7, 6), (0.9, 1), (1.0, 6)])
@pytest.mark.parametrize("curve", CURVES)
def test_nearly_the_best_fixed_k(curve, rows, rate):
    """Of what the best k in hindsight gains over non-speculative steps, most; where none gains, hardly a loss."""
    best = max(World(Fixed(k), curve, predictable(rate)).run(rows, 200 * rows) for k in range(9))
    world = World(lookup(), curve, predictable(rate))
    world.run(rows, 200 * rows)
    assert world.run(rows, 200 * rows) > 1 + 0.75 * (best - 1) - 0.03


@pytest.mark.parametrize("make", [lookup, draft_model])
def test_it_comes_up_when_the_text_becomes_predictable(make):
    drafting_s = 0.0005 if make is lookup else 0.05
    world = World(make(), memory_bound, lambda row, place: 16 if place >= 300 else 0, drafting_s=drafting_s)
    world.run(1, 300)
    steps = next(n for n in range(100) if world.step(1) >= 4)
    assert steps <= 16  # the draft model is asked now and then only, but again at once where it was right


@pytest.mark.parametrize("make", [lookup, draft_model])
@pytest.mark.parametrize("curve", [memory_bound, few_cores])
def test_it_goes_down_when_the_text_becomes_free(make, curve):
    world = World(make(), curve, lambda row, place: 16 if place < 600 else 0, drafting_s=0.01)
    assert world.run(1, 600) > 1.2
    ks = [world.step(1) for _ in range(200)]
    assert sum(map(bool, ks[60 if curve is memory_bound else 15 :])) <= 4  # where a step costs little, hope may last
    assert sum(world.curve(1, 1 + k) - 1 for k in ks) < 12.0  # non-speculative steps lost


@pytest.mark.parametrize("make", [lookup, draft_model])
def test_a_neighbour_that_takes_half_of_the_machine(make):
    """Steps take twice as long now and then, for a while: what pays goes on, what does not stays off."""
    assert World(make(), stairs, predictable(0.8), noise=0.1, neighbour=True).run(1, 300) > 2
    assert World(make(), stairs, predictable(0.0), noise=0.1, neighbour=True).run(1, 300) > 0.98


@pytest.mark.parametrize("overlap", [False, True])
def test_texts_with_shorter_contexts_after_long_ones(overlap):
    """Beside much attention a draft costs little; without it the non-speculative steps of before say nothing."""

    def long(rows: int, width: float) -> float:
        return 12.0 + compute_bound(rows, width)

    world = World(AdaptiveControl(8, cheap=False), long, predictable(0.83), drafting_s=0.05, overlap=overlap)
    assert world.run(4, 2000) > 1.2
    for row in range(4):
        world.begin(row, 0)
    world.curve = compute_bound
    assert world.run(4, 1000) > 0.98


def test_short_answers_are_not_made_of_plain_steps():
    """Each of them is another sequence, but what such a step takes without drafts need not be measured anew in each."""
    world = World(AdaptiveControl(8, cheap=True), memory_bound, lambda row, place: 8, overhead_s=0.003, overlap=True)
    for _ in range(400):
        world.answer(0, 5, 40)
    assert sum(world.places.values()) * memory_bound(1, 1) / world.seconds > 5


@pytest.mark.parametrize("curve", CURVES)
def test_what_a_text_has_won_is_not_lost_on_the_next(curve):
    """Free texts that take turns with one that repeats itself, on one server."""
    control = lookup(15)
    world = World(control, curve, lambda row, place: 16 if place % 516 < 260 else 0)
    for _ in range(6):
        world.run(1, 260)  # and what a draft brings beyond
        control.end(0)
        world.places[0] += -world.places[0] % 516 - 256
        assert world.run(1, 256) > 0.98
        control.end(0)
        world.places[0] += -world.places[0] % 516


@pytest.mark.parametrize("right", [3, 16])
@pytest.mark.parametrize("curve", [memory_bound, stairs])
def test_short_texts_that_repeat_themselves_gain_each_time(curve, right):
    """Each begins with what is inherited, and free ones in between lose theirs."""
    control = lookup(15)
    world = World(control, curve, lambda row, place: 0 if place >= 10_000 else right)
    speeds = []
    for text in range(8):
        world.places[0] = 200 * text
        speeds.append(world.run(1, 100))
        control.end(0)
        world.places[0] = 10_000
        world.run(1, 60)
        control.end(0)
    assert min(speeds[1:]) > 0.75 * max(speeds) > 1.2


def test_steps_that_move_rows_as_well_teach_nothing():
    """Rows come and go, and the step in which they do takes eight times as long."""

    def speed(**told):
        world = World(lookup(), memory_bound, predictable(0.8), **told)
        for rows in [16, 11, 7, 3] * 10:
            for _ in range(12):
                world.step(rows)
        return sum(world.widths[-240:])

    undisturbed = speed()
    assert speed(moving=8.0) >= 0.9 * undisturbed
    assert speed(moving=8.0, told=False) < 0.9 * undisturbed  # the test can fail


def test_one_row_of_many():
    """Fifteen free rows pay for the one that repeats itself, where rows cost: not worth it; alone it is."""
    world = World(lookup(), few_cores, lambda row, place: 16 if row == 0 else 0)
    world.run(16, 1600)
    assert sum(world.widths[-50:]) == 50
    alone = World(lookup(), few_cores, lambda row, place: 16)
    assert alone.run(1, 300) > 1.3


def test_rows_without_hope_are_not_sampled():
    """The forward has room for their drafts as well, but every position sampled costs."""
    control = lookup()
    world = World(control, memory_bound, lambda row, place: 16 if row == 0 else 0)
    world.run(2, 400)
    control.request({0: 8, 1: 8}, {}, overlapped=False)
    assert control.choose(dict.fromkeys((0, 1), guess(*[-1] * 8))) == {0: 8}


@dataclass(frozen=True)
class Phase:
    """Some steps of one kind, with new sequences behind a prompt of this length, or with those that were."""

    steps: int
    rows: int
    right: int
    prompt: int | None


PHASES = st.lists(
    st.builds(Phase, st.integers(1, 200), st.integers(1, 6), st.integers(0, 8), st.none() | st.integers(0, 3000)),
    min_size=1,
    max_size=12,
)
COSTS = st.lists(st.floats(0, 1.5), min_size=16, max_size=16)


@examples(30, soak=1000)
@given(PHASES, COSTS, st.booleans(), st.floats(0, 0.3), st.floats(0.001, 0.2))
def test_losses_are_bounded(phases, costs, cheap, drafting_s, reading_s):
    """Whatever the texts, the prompts, the rows and the machine: the allowance, the share, and the one step that
    emptied them."""

    def curve(rows: int, width: int) -> float:
        return rows * (1.0 + sum(costs[: width - 1]))

    world = World(AdaptiveControl(8, cheap=cheap), curve, lambda row, place: 0, drafting_s=0.0 if cheap else drafting_s)
    world.reading_s = 0.0 if cheap else reading_s
    for phase in phases:
        world.right = lambda row, place, phase=phase: phase.right
        for row in range(phase.rows if phase.prompt is not None else 0):
            world.begin(row, phase.prompt)
        for _ in range(phase.steps):
            world.step(phase.rows)
    worst = sum(costs[:8]) + 8 * drafting_s + 16 * world.reading_s
    assert world.lost <= 2 * ALLOWANCE + PROBE_SHARE * world.paid + worst + 1e-6


@pytest.mark.parametrize(("meanwhile", "is_open"), [([2], True), ([3], False), ([2, 3, 4], False)])
def test_drafts_are_judged_by_what_came_while_nothing_could_be_drafted_as_well(meanwhile, is_open):
    control = lookup()
    assert control.request({0: 8}, {}, overlapped=False) == {0: 8}
    assert control.choose({0: guess(1, 2, 3, 4)}) == {}  # nothing is known of the machine
    control.observe({0: [1]}, {}, StepTime(1.0))
    assert 0 in control._tracker.pending
    control.observe({0: meanwhile}, {}, None)
    assert (0 in control._tracker.pending) == is_open


def test_the_same_steps_give_the_same_answers():
    runs = [World(draft_model(), few_cores, predictable(0.8), noise=0.1, drafting_s=0.1) for _ in range(2)]
    for world in runs:
        world.run(3, 600)
    assert runs[0].widths == runs[1].widths
    assert max(runs[0].widths) > 2


@pytest.mark.parametrize("make", [lookup, draft_model, Always, lambda: FloorControl(8, floor=0.4, window=50)])
def test_room_is_respected(make):
    control = make(8) if make is Always else make()
    for _ in range(30):
        assert all(
            1 <= n <= {0: 3, 2: 8}[key]
            for key, n in control.request({0: 3, 1: 0, 2: 100}, {}, overlapped=False).items()
        )
        control.choose({})
        control.observe({0: [7], 1: [7], 2: [7]}, {}, StepTime(1.0))
    assert control.request({}, {}, overlapped=False) == {}
    assert control.request({1: 0}, {}, overlapped=False) == {}


def test_what_a_stop_cut_off_is_not_judged():
    """Three of four drafted tokens are committed, then the sequence ends: the fourth was not wrong."""
    control = FloorControl(4, floor=1.0, window=1)
    control.request({0: 4}, {}, overlapped=False)
    assert control.choose({0: guess(1, 2, 3, 4)}) == {0: 4}
    control.observe({0: [1, 2, 9]}, {0: 4}, StepTime(1.0))
    assert control.request({0: 4}, {}, overlapped=False) == {}
    cost = lookup(4)
    for _ in range(3):
        cost.request({0: 4}, {}, overlapped=False)
        cost.choose({0: guess(1, 2, 3, 4)})
        cost.observe({0: [1, 2, 3]}, {}, StepTime(1.0))
        cost.end(0)
    rates = cost._tracker._pool.rates
    assert min(rates[:3]) > 0.5
    assert rates[3] == rates[2]


def test_sequences_that_ended_leave_nothing():
    control = lookup()
    world = World(control, memory_bound, predictable(0.8))
    world.run(3, 100)
    for key in range(3):
        control.end(key)
    control.end(99)
    control.observe({7: [1]}, {}, StepTime(1.0))  # its first token was its last: it was never asked about
    assert (control._tracker._rows, control._tracker.pending, control._begun) == ({}, {}, set())


class TestFloor:
    """The field's fixed rule."""

    def test_it_stays_on_at_the_floor(self):
        world = World(FloorControl(5, floor=0.4, window=50), memory_bound, lambda row, place: 2)
        world.run(1, 900)
        assert set(world.widths) == {6}

    def test_it_goes_off_below_it_and_tries_again(self):
        world = World(FloorControl(5, floor=0.41, window=50), memory_bound, lambda row, place: 2)
        for _ in range(50 + 50 * BACKOFF + 50 + 1):
            world.step(1)
        assert world.widths == [6] * 50 + [1] * 50 * BACKOFF + [6] * 50 + [1]

    def test_the_window_rolls(self):
        world = World(FloorControl(5, floor=0.4, window=10), memory_bound, lambda row, place: 5 if place < 60 else 0)
        for _ in range(18):
            world.step(1)
        assert world.widths == [6] * 17 + [1]  # ten right; with seven wrong of the last ten it is below


class TestBuild:
    """What a configuration asks for."""

    def test_each_control(self):
        assert type(build(NgramSpeculation(control="always"))) is Always
        assert isinstance(build(NgramSpeculation(control="floor")), FloorControl)
        assert isinstance(build(NgramSpeculation()), AdaptiveControl)

    def test_lookups_are_cheap_and_models_are_not(self):
        room = dict.fromkeys(range(3), 8)
        assert build(NgramSpeculation()).request(room, {}, overlapped=False) == room
        assert build(DraftModelSpeculation(model="demo")).request(room, {}, overlapped=False) == dict.fromkeys(
            range(3), 1
        )

    def test_values_arrive(self):
        world = World(build(NgramSpeculation(control="floor", floor=0.0)), memory_bound, lambda row, place: 0)
        world.run(1, 200)
        assert set(world.widths) == {16}
        world = World(build(NgramSpeculation(control="floor", window=5)), memory_bound, lambda row, place: 0)
        world.run(1, 50)
        assert world.widths.count(16) == 5
        patient = build(DraftModelSpeculation(model="demo", probe_share=0.0))
        world = World(patient, memory_bound, lambda row, place: 0, drafting_s=0.3)
        world.run(1, 1000)
        assert world.lost <= 2 * ALLOWANCE + 0.3


def test_the_last_width_before_a_stair_is_found():
    """Eight tokens in 1.8 steps; four in one come first, and from there nothing looks better but by trying."""
    world = World(lookup(), stairs, lambda row, place: 16)
    world.run(1, 400)
    assert set(world.widths[-20:]) == {8}


def test_a_high_first_stair_is_climbed():
    """A fifth token costs as much as a fourteenth: from what narrow steps cost, wide ones look hopeless."""
    costs = [1.0, 1.35, 1.7, 2.0]
    world = World(lookup(16), lambda rows, width: costs[width - 1] if width <= 4 else 2.0, predictable(0.8))
    assert world.run(1, 400) > 1.8
    assert max(world.widths[:60]) > 8


def test_what_is_tried_wide_is_paid_from_winnings():
    """A machine on which every token costs, and that little is gained on: tries must not eat it up."""
    best = max(World(Fixed(k), few_cores, predictable(0.8)).run(3, 600) for k in range(9))
    world = World(lookup(16), few_cores, predictable(0.8))
    world.run(3, 600)
    assert world.run(3, 600) > 1 + 0.75 * (best - 1) - 0.03


def test_compute_bound_machines_do_not_speculate():
    world = World(lookup(), compute_bound, lambda row, place: 16)
    world.run(4, 800)
    assert sum(width > 1 for width in world.widths) < 10
