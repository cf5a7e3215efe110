"""The control where a draft model has to read before it drafts."""

from __future__ import annotations

import pytest
from machine import World, draft_model, guess, memory_bound, predictable

from phalanx.spec.budget import ALLOWANCE, PROBE_SHARE
from phalanx.spec.control import DraftPrefill, StepTime
from phalanx.spec.rules import Always, FloorControl


class TestReading:
    """A draft model reads a prompt before it drafts; that is work like any other."""

    def world(self, rate: float, reading_s: float = 1 / 40) -> World:
        return World(draft_model(), memory_bound, predictable(rate), drafting_s=0.02, reading_s=reading_s)

    @pytest.mark.parametrize("prompt", [20, 60, 200, 1000, 8000])
    def test_hopeless_texts_behind_prompts(self, prompt):
        """Never below 0.98, from the first answer on, however long the prompts are."""
        world = self.world(0.0)
        for n in range(1, 9):
            world.answer(0, prompt, 256)
            assert world.lost < 0.02 * 256 * n

    @pytest.mark.parametrize("prompt", [12, 18, 38])
    @pytest.mark.parametrize("steps", [2, 5, 20])
    @pytest.mark.parametrize("silent", [True, False])
    def test_sequences_that_leave_when_they_have_been_read(self, prompt, steps, silent):
        """Little is learned from them but that answers are short; what was read is paid all the same."""
        world = self.world(0.0)
        world.offers = lambda row, place: not silent
        for _ in range(100):
            world.begin(0, prompt)
            for _ in range(steps):
                world.step(1)
        assert world.lost <= 2 * ALLOWANCE + PROBE_SHARE * world.paid + 0.5

    def test_short_answers_to_long_prompts_are_not_drafted_for(self):
        """However good the drafter is known to be."""
        world = self.world(0.95)
        world.answer(0, 60, 2000)
        before = world.read
        for _ in range(5):
            world.answer(0, 2000, 20)
        assert world.read == before
        world.answer(0, 200, 200)
        assert world.read >= before + 199

    @pytest.mark.parametrize("prompt", [100, 200])
    def test_a_first_long_prompt_is_read_where_chunks_are_what_takes_time(self, prompt):
        """Eight tokens take as long as fifty, so that at their price the savings would not pay for the others."""
        world = self.world(0.9, 1 / 2000)
        world.reading_at_all_s = 1 / 10
        world.answer(0, prompt, 256)
        assert world.read >= prompt - 8
        assert world.seconds < 256 * memory_bound(1, 1) / 1.3

    @pytest.mark.parametrize("reading_s", [1 / 160, 1 / 60, 1 / 30])
    @pytest.mark.parametrize("prompt", [100, 300, 600])
    def test_hope_for_cheaper_chunks_costs_no_more_than_the_share(self, prompt, reading_s):
        world = self.world(0.0, reading_s)
        for n in range(1, 5):
            world.answer(0, prompt, 256)
            assert world.lost < 0.02 * 256 * n

    def test_a_good_drafter_earns_long_prompts(self):
        """From short ones alone on; what is spent on them comes back."""
        world = self.world(0.9)
        for prompt in (8, 100, 300, 1000, 2000):
            read, seconds = world.read, world.seconds
            world.answer(0, prompt, 800)
            assert world.read - read >= prompt - 8
            assert 800 * memory_bound(1, 1) / (world.seconds - seconds) > 1.5

    def test_one_disturbed_reading_means_nothing(self):
        """The machine stood still for a thousand steps; the prompts after it are read as those before."""
        world = self.world(0.9)
        world.answer(0, 8, 1000)
        world.answer(0, 300, 400)
        plain, world.reading_s, world.left = world.reading_s, 40.0, lambda row: 1000
        world.begin(0, 300)
        read = world.read
        while world.read == read:
            world.step(1)
        world.reading_s, read = plain, world.read
        world.answer(0, 300, 400)
        assert world.read - read >= 292

    def test_newcomers_are_weighed_together(self):
        """One of six rows alone would not pay for wider steps; all of them do. The others decode meanwhile."""
        world = self.world(0.9, 1 / 200)
        world.answer(0, 8, 1000)
        world.left = lambda row: 1000
        for row in range(6):
            world.begin(row, 100)
        for _ in range(60):
            world.step(6)
        assert world.unread(6) == {}
        assert min(world.widths[-10:]) > 3

    def test_long_prompts_alone_are_read_in_the_end(self):
        """What the share saves pays for a first one; from then on the drafter is known."""
        world = self.world(0.9)
        answers = 0
        while world.read < 600:
            world.answer(0, 600, 500)
            answers += 1
        assert answers < 12
        read, seconds = world.read, world.seconds
        world.answer(0, 600, 500)
        assert world.read - read >= 592
        assert 500 / (world.seconds - seconds) > 1.3

    @pytest.mark.parametrize("reading_s", [1 / 200, 1 / 40, 1 / 10])
    def test_a_step_reads_for_no_longer_than_a_plain_step(self, reading_s):
        world = self.world(1.0, reading_s)
        for prompt in (8, 100, 300, 600):
            world.answer(0, prompt, 1000)
        assert world.read > 100
        assert world.longest_reading_s <= memory_bound(1, 1) + 1e-9

    def test_a_drafter_that_stopped_helping_reads_no_more(self):
        world = self.world(0.95)
        world.answer(0, 8, 2000)
        world.right = lambda row, place: 0
        lost = world.lost
        for _ in range(4):
            world.answer(0, 400, 256)
        assert world.lost - lost < 0.035 * 4 * 256  # of the 1,600 steps that it gained before
        before = world.read
        world.answer(0, 400, 256)
        assert world.read - before < 400
        lost = world.lost
        for _ in range(20):
            world.answer(0, 400, 256)
        assert world.lost - lost < PROBE_SHARE * 20 * 256 * 1.1

    def test_a_prompt_is_read_while_the_target_prefills_it(self):
        """By a drafter that is known to be good: the first decoding step has drafts."""
        world = self.world(0.9)
        world.answer(0, 60, 800)
        world.left = lambda row: 400
        world.prefill(0, 200, 8)
        assert world.unread(1) == {}
        assert world.longest_reading_s <= memory_bound(1, 1) + 1e-9
        assert any(world.step(1) for _ in range(4))  # the time without drafts is measured anew

    def test_a_drafter_that_does_not_help_reads_nothing_beside_the_target(self):
        world = self.world(0.0)
        world.answer(0, 60, 800)
        world.left = lambda row: 400
        read = world.read
        world.prefill(0, 400, 8)
        assert world.read - read < 0.02 * 400

    def test_fixed_rules_read_everything(self):
        unread = {0: DraftPrefill(100, 9), 1: DraftPrefill(100, 9), 2: DraftPrefill(5, 9)}
        assert Always(8).request({0: 0, 1: 0, 2: 0}, unread, overlapped=False) == {0: 100, 1: 28}
        off = FloorControl(8, floor=1.0, window=1)
        off.choose({0: guess(5)})
        off.observe({0: [6]}, {0: 1}, StepTime(1.0))
        assert off.request({0: 0}, {0: DraftPrefill(100, 9)}, overlapped=False) == {}
