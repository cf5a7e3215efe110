"""The control under async scheduling: which steps wait for drafts."""

from __future__ import annotations

import pytest
from machine import CURVES, ROWS, World, draft_model, guess, lookup, memory_bound, predictable

from phalanx.spec.budget import PROBE_SHARE
from phalanx.spec.control import StepTime
from phalanx.spec.rules import BACKOFF, Always, FloorControl


class TestOverlap:
    """Async scheduling: a step that begins before the one before has ended takes no drafts."""

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("curve", CURVES)
    @pytest.mark.parametrize("model", [False, True])
    def test_hopeless_texts_are_left_alone(self, curve, rows, model):
        control = draft_model() if model else lookup()
        world = World(control, curve, predictable(0.0), drafting_s=0.1 if model else 0.0005, overlap=True)
        bound = 0
        for _ in range(400):
            world.step(rows)
            bound += world.overlapped
        assert bound > (60 if model else 320)  # a model that drafts for a thirtieth of a step is asked often
        assert world.paid / world.steps < 1.02

    @pytest.mark.parametrize("model", [False, True])
    @pytest.mark.parametrize("overlap", [False, True])
    def test_the_control_of_a_small_model_sleeps_most_of_the_time(self, model, overlap):
        """It takes a tenth of a step to ask it, and nothing comes of it."""
        control = draft_model() if model else lookup()
        drafting_s = 0.1 if model else 0.01
        world = World(control, memory_bound, predictable(0.0), drafting_s=drafting_s, overlap=overlap)
        world.overhead_s = 0.1
        for n in range(20):
            world.begin(0, 0)
            world.run(1, 256)
            assert world.lost < 0.02 * 256 * (n + 1)
        assert world.lost / world.steps < 1.5 * PROBE_SHARE

    def test_lookups_that_promise_what_they_rarely_hold_are_hardly_waited_for(self):
        """Eight are right at one place in sixty."""
        world = World(lookup(), memory_bound, lambda row, place: 8 * (place % 60 == 0), drafting_s=0.0005, overlap=True)
        for _ in range(20):
            world.begin(0, 0)
            world.run(1, 256)
        assert world.lost / world.steps < 1.2 * PROBE_SHARE

    def test_no_step_waits_for_a_model_that_has_not_read(self):
        """The prompts of these texts are not worth reading."""
        world = World(draft_model(), memory_bound, predictable(0.0), drafting_s=0.02, reading_s=1 / 40, overlap=True)

        bound = 0
        for _ in range(10):
            world.begin(0, 4000)
            for _ in range(256):
                world.step(1)
                bound += world.overlapped
        assert bound > 0.95 * 2560

    @pytest.mark.parametrize("model", [False, True])
    def test_what_pays_is_found_and_goes_on(self, model):
        drafting_s = 0.1 if model else 0.0005
        speeds = []
        for overlap in (False, True):
            control = draft_model() if model else lookup()
            world = World(control, memory_bound, predictable(0.0), drafting_s=drafting_s, overlap=overlap)
            world.run(1, 300)
            world.right = predictable(0.9)
            world.run(1, 600)
            speeds.append(world.run(1, 300))
            assert not world.overlapped
        assert speeds[1] > 0.97 * speeds[0] / 1.25 > 1.5

    @pytest.mark.parametrize("model", [False, True])
    def test_what_a_plain_step_takes_is_measured_again(self, model):
        """No step without drafts begins early while drafts are verified, and what one took does not hold for ever."""
        control = draft_model() if model else lookup()
        drafting_s = 0.1 if model else 0.0005
        world = World(control, memory_bound, predictable(0.9), drafting_s=drafting_s, overlap=True)
        world.run(1, 600)
        assert all(world.run(1, 600) > 1.5 for _ in range(5))
        world.overlap = False  # another request waits for a place
        assert all(world.run(1, 600) > 1.5 for _ in range(5))

    def test_fixed_rules(self):
        assert not Always(4).can_overlap([0])
        floor = FloorControl(4, floor=1.0, window=1)
        assert not floor.can_overlap([0])
        floor.choose({0: guess(5)})
        floor.observe({0: [6]}, {0: 1}, StepTime(1.0))
        steps = 0
        while floor.can_overlap([0]):
            floor.observe({0: [6]}, {}, StepTime(1.0))
            steps += 1
            assert floor.request({0: 4}, {}, overlapped=False) == {}
        assert steps == BACKOFF - 1


@pytest.mark.parametrize("model", [False, True])
def test_what_a_step_waits_for_is_asked_for(model):
    """Although the control's own time has emptied the budget since the step decided to wait; so what becomes good late
    is found."""
    control, waited, asked = draft_model() if model else lookup(), 0, 0
    text = predictable(0.9)

    def late(row, place):
        return text(row, place) if place > 400 else 0

    drafting_s = 0.1 if model else 0.0005
    world = World(control, memory_bound, late, drafting_s=drafting_s, overhead_s=0.02, overlap=True)
    request = control.request

    def watched(room, unread, *, overlapped):
        nonlocal waited, asked
        waits = control._gave_up_overlap
        wanted = request(room, unread, overlapped=overlapped)
        waited += waits
        asked += waits and bool(wanted)
        return wanted

    control.request = watched
    world.run(1, 1200)
    assert asked == waited > 0
    assert world.run(1, 300) > 1.5


def test_another_text_is_not_waited_for_because_of_the_one_before():
    """Drafts of the one before were right; there are none for this one."""
    control = lookup()
    world = World(control, memory_bound, predictable(0.9), drafting_s=0.0005, overlap=True)
    world.run(1, 600)
    world.offers = lambda row, place: False
    world.begin(0, 0)
    world.lost = 0.0
    world.run(1, 100)
    assert world.lost < 4 * world.late
