"""Leader and workers in pure simulation, over random conversations: all mirrors stay equal, or it is noticed (A1, A9).

A fault changes what one worker believes, or loses it a plan; the next step that looks must raise Desync. Then every
rank starts again, and what was unfinished is submitted with the tokens already committed, as the server does.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace
from simulation import VOCAB, Simulation, half_right, make_config, reference
from support.examples import SOAK
from support.play import Play

from phalanx.errors import Desync

WORKERS = 3
STEPS, FAULTS = (20_000, 40) if SOAK else (2_000, 10)


class Conversation(RuleBasedStateMachine):
    """Arrivals, cancels, stops found by the server, chunk sizes, drafts, faults."""

    steps: ClassVar[int] = 0
    faults: ClassVar[int] = 0

    @initialize(
        rows=st.integers(1, 8),
        batched=st.sampled_from((16, 33, 64, 200)),
        kv_rows=st.sampled_from((3, 8, 64)),
        prefix=st.sampled_from((0, 1 << 12, 1 << 18)),
        drafter=st.sampled_from((None, 1, 2)),
        page_tokens=st.sampled_from((0, 16)),
    )
    def start(self, rows: int, batched: int, kv_rows: int, prefix: int, drafter: int | None, page_tokens: int) -> None:
        self.draft = None if drafter is None else half_right(drafter)
        self.config = make_config(
            max_num_seqs=rows,
            max_num_batched_tokens=max(batched, rows),
            first_chunk=16,
            kv_budget=kv_rows * 512 * 16,
            max_model_len=512,
            prefix_budget=prefix,
            page_tokens=page_tokens,
        )
        self.play = Play(VOCAB, longest_prompt=200, longest_answer=60)
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.sim = Simulation(self.config, WORKERS, self.draft)

    @rule(rnd=st.randoms(use_true_random=False))
    def arrive(self, rnd: Random) -> None:
        for request in self.play.arrive(rnd):
            self.sim.submit(request)

    @rule(rnd=st.randoms(use_true_random=False))
    def cancel(self, rnd: Random) -> None:
        if (leaving := self.play.cancel(rnd)) is not None:
            self.sim.scheduler.cancel(leaving, self.sim.now)

    @rule(rnd=st.randoms(use_true_random=False))
    def stop_string(self, rnd: Random) -> None:
        """The server finds a stop string in some running answer: it ends with its first n tokens."""
        settled = {*self.sim.finished, *self.play.finishes}
        running = [i for i, out in self.sim.outputs.items() if out and i not in settled]
        if running:
            found = rnd.choice(sorted(running))
            self.play.finishes[found] = rnd.randint(1, len(self.sim.outputs[found]))
            self.sim.scheduler.finish(found, self.play.finishes[found], self.sim.now)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.sim.scheduler.reset_prefix_cache()

    @rule(n=st.integers(1, 16), pace=st.floats(1e-5, 1e-1))
    def go_on(self, n: int, pace: float) -> None:
        """Some steps, in which prefill takes `pace` seconds a token: chunks grow or shrink by that."""
        for _ in range(n):
            if not self.sim.step():
                return
            type(self).steps += 1
            tokens = sum(sum(f.valid) for f in self.sim.steps[-1].forwards if not f.sample)
            self.sim.scheduler.prefill_budget.observe(tokens, tokens * pace, 0.01)
            self.agree()

    @precondition(lambda self: self.sim.scheduler.n_running)
    @rule(worker=st.integers(1, WORKERS), kind=st.sampled_from(("kv_len", "crc", "seq", "lost plan")))
    def fault(self, worker: int, kind: str) -> None:
        """One worker goes astray; nothing more is committed."""
        mirror = self.sim.ranks[worker][0]
        if not mirror.rows:
            return
        row = next(iter(mirror.rows.values()))
        number = row.seq
        match kind:
            case "kv_len":
                row.kv_len += 1
            case "crc":
                row.crc ^= 1
            case "seq":
                row.seq += 1000
            case _:
                mirror.step -= 1
        before = {i: list(out) for i, out in self.sim.outputs.items()}
        try:
            going = self.sim.step()
        except Desync:
            assert all(self.sim.outputs[i] == out for i, out in before.items()), "something was committed"
            type(self).faults += 1
            self.restart()
        else:
            still_there = {other.seq for other in self.sim.ranks[0][0].rows.values()}
            assert not going or (kind != "lost plan" and number not in still_there), "astray, and nobody noticed"
            self.restart()  # the row was freed before it could matter, or there was no step

    def restart(self) -> None:
        """The journal's part: unfinished requests go on from their committed tokens."""
        old = self.sim
        self.collect()
        self.sim = Simulation(self.config, WORKERS, self.draft)
        for number, request in self.play.requests.items():
            settled = number in self.ended or number in self.play.finishes or number in self.play.cancelled
            if number in old.outputs and not settled:
                self.sim.submit(replace(request, committed=old.outputs[number]))

    def collect(self) -> None:
        """What clients have: tokens up to where their answers ended, or were cut by the server."""
        for number, tokens in self.sim.outputs.items():
            finished = self.sim.finished.get(number)
            n = finished.n_tokens if finished is not None else self.play.finishes.get(number)
            self.outputs[number] = tokens[:n]
        self.ended.update(self.sim.finished)

    def agree(self) -> None:
        mirrors = [mirror for mirror, _ in self.sim.ranks]
        assert all(mirror.rows == mirrors[0].rows for mirror in mirrors)
        assert all(mirror.entries == mirrors[0].entries for mirror in mirrors)
        assert all(mirror.matches == mirror.step for mirror in mirrors)

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        while self.sim.step():
            type(self).steps += 1
        self.agree()
        self.collect()
        assert self.ended | self.play.cancelled | set(self.play.finishes) >= set(self.play.requests)
        for number, request in self.play.requests.items():
            if number not in self.play.cancelled:
                assert self.outputs[number] == self.play.expected(request, reference(request))


@pytest.mark.grows
def test_thousands_of_steps_in_lock_step():
    Conversation.steps = Conversation.faults = 0
    health = list(HealthCheck)
    while Conversation.steps < STEPS or Conversation.faults < FAULTS:  # how many come is left to chance
        run_state_machine_as_test(
            Conversation,
            settings=settings(max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=health),
        )
