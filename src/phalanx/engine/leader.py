"""The leader: receives messages, plans, executes, samples, commits and answers. One thread, one loop.

The scheduler holds all policy, and `sched/commit.py` decides all tokens. This file connects them with the model, the
other ranks and the server. A single rank is a leader too: it executes its own plans.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence

import mlx.core as mx

from phalanx.dist.fault_injection import Injection
from phalanx.engine.disk import DiskOutcomes
from phalanx.engine.execute import Execution, execute
from phalanx.engine.link import LeaderLink, SingleRank
from phalanx.engine.mirror import Mirror
from phalanx.engine.outbox import EventOutbox
from phalanx.engine.prompt_scores import PromptScores
from phalanx.engine.server_socket import ServerSocket
from phalanx.engine.stages import StagedRunner
from phalanx.engine.step_deadline import StepDeadline
from phalanx.engine.step_timer import StepTimer
from phalanx.engine.trace import Trace
from phalanx.engine.work_log import WorkLog
from phalanx.engine.worker import inject_fault, rank_stats
from phalanx.memory import trim_heap
from phalanx.sched.commit import commit_tokens
from phalanx.sched.drafts import after_next, useful_drafts
from phalanx.sched.plan import Commit, Forward, Order, Reset, Step
from phalanx.sched.scheduler import Scheduler
from phalanx.spec.running_grammars import Grammars, Masks
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.spec.speculator import Speculator
from phalanx.spec.stats import log_line
from phalanx.spec.verify import Verified, verify
from phalanx.types import (
    Cancel,
    EngineStats,
    Finish,
    KeepOwners,
    Ping,
    Pong,
    RankStats,
    ResetPrefixCache,
    Shutdown,
    Submit,
    ToEngine,
)

log = logging.getLogger("phalanx.engine")

IDLE_BEFORE_RELEASE_S = 2.0  # then the engine returns freed buffers to the system


class Leader:
    """Owns the scheduler, the mirror, the runner, and the connections to the server and to the other ranks.

    Args:
        staged: the runner, with its connections to other stages.
        plans_ahead: most plans broadcast ahead of this rank, behind plans that only prefill. Equals the number of
            stages, so that each stage computes a chunk and the first one never waits for its next plan.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        staged: StagedRunner,
        server_socket: ServerSocket,
        *,
        link: LeaderLink | SingleRank,
        deadline: StepDeadline,
        trace: Trace | None = None,
        injection: Injection | None = None,
        metadata: SamplingMetadataCache | None = None,
        speculator: Speculator | None = None,
        grammars: Grammars,
        disk_outcomes: DiskOutcomes | None = None,
        plans_ahead: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.runner = staged.runner
        self._staged = staged
        self._plans_ahead = plans_ahead
        self._broadcast_plans: deque[tuple[Step, float]] = deque()  # not executed here yet; with time limits
        self.mirror = Mirror()
        self._server_socket = server_socket
        self._outbox = EventOutbox(server_socket)
        self._link = link
        self._deadline = deadline
        self._timer = StepTimer()
        self._trace = trace
        self._injection = injection
        self._metadata = metadata or SamplingMetadataCache()
        self._speculator = speculator
        self._grammars = grammars
        self._disk_outcomes = disk_outcomes
        self._prompt_scores = PromptScores()
        self._work = WorkLog(scheduler)
        self._pings: list[int] = []  # nonces to answer with the next round of reports
        self._reported: list[int] = []  # nonces to answer with the round that was requested
        self._release_at_once = False  # after a reset of the prefix cache, which skips the idle time
        self._holds_memory = True  # buffers kept for reuse
        self._last_work = time.monotonic()
        self._stopping = False

    def run(self) -> None:
        """Serve until the server sends `Shutdown`."""
        while not self._stopping:
            for message in self._server_socket.drain(block=self._is_idle):
                self.handle(message)
            self.step()
            self._release_idle_memory()
            self.answer_pings()
        while self._broadcast_plans:
            self.step()
        self._outbox.flush()

    def step(self) -> None:
        """One step: draft, schedule, broadcast, execute, verify, commit, apply, observe; then publish the events."""
        self._timer.start()
        step, limit_s = self._next()
        if step is not None:
            self._link.enter(step.id, limit_s)
            execution = self._execute(step)
            verified = self._verify(step, execution)
            commits = self._commit(step, verified.tokens)
            self.scheduler.apply(commits, time.monotonic(), verified.logprobs)
            self._advance_grammars(commits, verified)
            self._observe(step, execution, verified, commits)
        self._publish(step)
        self._timer.stop(planned=step is not None)

    # -- the phases of a step ----------------------------------------------------------------------------------------

    def _next(self) -> tuple[Step | None, float]:
        """The plan to execute now, and its time limit.

        While the newest plan only prefills, the leader plans and broadcasts further ones, so that the other stages can
        begin: the outcome of a chunk is known in advance. During a shutdown it plans none ahead.
        """
        if not self._broadcast_plans and (planned := self._plan()) is not None:
            self._broadcast_plans.append(planned)
        while 0 < len(self._broadcast_plans) <= self._plans_ahead and not self._stopping:
            if not self._broadcast_plans[-1][0].is_chunk or (planned := self._plan()) is None:
                break
            self._broadcast_plans.append(planned)
        return self._broadcast_plans.popleft() if self._broadcast_plans else (None, 0.0)

    def _plan(self) -> tuple[Step, float] | None:
        """Draft, schedule and broadcast. Returns the plan and its time limit; None if there is nothing to do."""
        self._take_grammars()
        if self._disk_outcomes is not None:
            self._disk_outcomes.take()
        drafts = self._draft()
        step = self.scheduler.schedule(time.monotonic(), drafts, self._grammars.held)
        if step is None:
            return None
        limit_s = self._broadcast(step)
        self._work.note(step)  # after the broadcast: the other ranks compute meanwhile
        return step, limit_s

    def _take_grammars(self) -> None:
        """Admit sequences whose grammars have been compiled; end those whose grammars failed to compile."""
        for number, reason in self._grammars.take_made().items():
            self.scheduler.give_up(number, "error", reason, time.monotonic())

    def _draft(self) -> dict[int, list[int]]:
        """Drafts by sequence number; none while an early-dispatched forward runs, which feeds one token per row."""
        if self._speculator is None:
            return {}
        with self._timer.phase("draft"):
            self._outbox.before_draft(computes=self._speculator.computes)
            return self._speculator.draft(self.scheduler.draftable(), overlapped=self.runner.has_in_flight)

    def _broadcast(self, step: Step) -> float:
        """Send the plan to every rank, and announce its inputs to this one. Returns its time limit."""
        if self._trace is not None:
            self._trace.plan(step)
        with self._timer.phase("control"):
            limit_s = self._deadline.limit(step) * (1 + len(self._broadcast_plans))  # earlier plans run first
            if self._injection is not None:
                inject_fault(self._injection, step.id, self.mirror)
            self._link.send(Order(step, limit_s))
            self._staged.expect(step, limit_s)
        return limit_s

    def _execute(self, step: Step) -> Execution[mx.array]:
        with self._timer.phase("model"):
            self._outbox.before_execute(blocks=self.runner.blocks(step))
            return execute(step, self.mirror, self._staged)

    def _verify(self, step: Step, execution: Execution[mx.array]) -> Verified:
        """Score prompts, sample after every token of the sampling forwards, verify drafts; one wait in all."""
        with self._timer.phase("model"):
            self._outbox.while_computing()
            by_number = self.scheduler.by_number
            for output in execution.outputs:
                if output.forward.score and (seq := by_number.get(output.forward.seqs[0])) is not None:
                    self._prompt_scores.add(seq, output)
            sampling = [(output.forward, output.logits) for output in execution.outputs if output.forward.sample]
            caches = self.runner.written_caches()
            masks = self._masks(sampling, caches)
            dispatch_next = self.runner.dispatch_next if self._rows_repeat(step) else None
            try:
                verified = verify(sampling, by_number, self._metadata, caches, dispatch_next, masks)
            finally:
                self.runner.check_sums()  # first: a wrong all-reduce can itself make sampling fail
            self.runner.start_in_flight()
        self._link.leave(step.id)
        return verified

    def _masks(self, sampling: list[tuple[Forward, mx.array]], caches: list[mx.array]) -> Masks:
        """Allowed tokens after every fed token, for rows with a grammar; computed while the device computes logits."""
        drafts = {
            number: tokens[1:valid]
            for forward, _ in sampling
            for number, tokens, valid in zip(forward.seqs, forward.tokens, forward.valid, strict=True)
        }
        if not self._grammars.constrains(drafts.keys()):
            return {}
        mx.async_eval([logits for _, logits in sampling], caches)  # type: ignore[no-untyped-call]
        return self._grammars.masks(drafts)

    def _rows_repeat(self, step: Step) -> bool:
        """Whether the next step will probably feed the same rows, one newly sampled token each.

        False if the next step contains a prompt's chunk or copies a prefix: an early forward would be discarded.
        """
        if self.scheduler.waiting or not self.runner.may_dispatch_next(step.forwards):
            return False
        numbers = step.forwards[0].seqs
        others = [row for row in self.scheduler.layout.prefilling() if row.number not in numbers]
        if any(row.prefix for row in others) or (others and not self.scheduler.prefill_budget.still_owes):
            return False
        rows = [self.scheduler.by_number[number] for number in numbers]
        if not all(map(after_next, rows)):
            return False
        if self._speculator is not None and not all(
            self._grammars.may_run_ahead(row.number) for row in rows if useful_drafts(row)
        ):
            return False
        return self._speculator is None or not any(map(useful_drafts, rows)) or self._speculator.can_overlap(numbers)

    def _commit(self, step: Step, verified: Mapping[int, list[int]]) -> list[Commit]:
        """One commit per row that the step sampled; `schedule` has already committed prefill chunks."""
        by_number = self.scheduler.by_number
        return [
            commit_tokens(by_number[number], by_number[number].kv_len, valid, verified[number])
            for forward in step.forwards
            if forward.sample
            for number, valid in zip(forward.seqs, forward.valid, strict=True)
        ]

    def _advance_grammars(self, commits: list[Commit], verified: Verified) -> None:
        """Advance grammars by the committed tokens; end rows whose grammar allows no token."""
        for number in verified.nothing_left:
            self.scheduler.give_up(number, *self._grammars.ending(number), time.monotonic())
        for commit in commits:
            if commit.tokens and commit.finish is None:
                self._grammars.advance(commit.seq, commit.tokens)

    def _observe(self, step: Step, execution: Execution[mx.array], verified: Verified, commits: list[Commit]) -> None:
        """Report the duration of the step to the deadline, the prefill budget and the speculator."""
        seconds = self._timer.elapsed_s - execution.prefill_s
        decode_s = self._timer.phases_s["model"] - execution.prefill_s
        self._deadline.observe(execution.prefill_tokens, execution.prefill_s, decode_s, step.width)
        # Copies follow the rows' own step, which must not seem longer because of them.
        delayed_s = max(0.0, decode_s - execution.copy_s) if step.has_older_rows else 0.0
        # In a run of chunks the wait overlaps: the previous stage was computing the next chunk.
        waited_s = self._staged.waited_s if step.is_chunk else 0.0
        self.scheduler.prefill_budget.observe(execution.prefill_tokens, execution.prefill_s - waited_s, delayed_s)
        if self._speculator is not None:
            comparable_s = None if self.runner.captured_graph else seconds
            self._speculator.observe(step, verified.tokens, commits, comparable_s, self._timer.phases_s["draft"])
        self._holds_memory = True
        self._last_work = time.monotonic()
        if self._trace is not None:
            self._trace.cost(step.id, self._timer, execution.prefill_s)

    def _publish(self, step: Step | None) -> None:
        """Put the step's events into the outbox and drop state of finished sequences."""
        new = [*self._prompt_scores.take_events(), *self.scheduler.take_events()]
        events = [self._work.with_work(event) for event in new]
        self._outbox.add(step.id if step is not None else self.scheduler.step_id, events)
        alive = self.scheduler.by_number.keys()
        self._metadata.keep(alive)
        self._prompt_scores.keep(alive)
        self._grammars.keep(alive)
        if self._speculator is not None:
            self._speculator.keep(alive)
        self._outbox.after_step(idle=step is None or self.scheduler.idle)

    # -- messages ----------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._nothing_to_compute and not (self._pings or self._reported or self._release_at_once)

    @property
    def _nothing_to_compute(self) -> bool:
        """Whether no rank has anything to compute."""
        return self.scheduler.idle_except(self._grammars.held) and not self._broadcast_plans

    def handle(self, message: ToEngine) -> None:
        """Handle a message from the server. It takes effect in the next step."""
        if self._trace is not None and not isinstance(message, Ping):
            self._trace.message(message)
        now = time.monotonic()
        match message:
            case Submit():
                self.scheduler.submit(message.request, now)
                self._prompt_scores.begin(message.request)
                if (seq := self.scheduler.by_id.get(message.request.id)) is not None:
                    self._grammars.begin(seq.number, seq.request)
            case Cancel():
                self.scheduler.cancel(message.id, now)
            case Finish():
                self.scheduler.finish(message.id, message.n_tokens, now)
            case Ping():
                self._pings.append(message.nonce)
            case ResetPrefixCache():
                self.scheduler.reset_prefix_cache()
                self._release_at_once = True
            case KeepOwners():
                self.scheduler.disk.keep_owners(message.owners)
            case Shutdown():
                self._stopping = True

    def answer_pings(self) -> None:
        """Answer pings with figures of every rank, which prove that each engine loop runs.

        Each rank reports after the plans in flight; new plans may follow meanwhile. The leader blocks for the reports
        only when idle, because other ranks of its stage may wait for it. Only one round is requested at a time: a ping
        that arrives during a round gets the next one, so its figures are never older than the ping.
        """
        if self._pings and not self._reported:
            self._reported, self._pings = self._pings, []
            self._link.request_reports()
        if self._reported and (reports := self._link.take_reports(wait=self._nothing_to_compute)) is not None:
            self._outbox.flush()  # the server expects all earlier events before a pong
            stats = self.stats(reports)
            for nonce in self._reported:
                self._server_socket.send(Pong(nonce, stats))
            self._reported = []

    def _release_idle_memory(self) -> None:
        """Return buffers kept for reuse to the system, once each time the engine becomes idle."""
        idle_s = time.monotonic() - self._last_work
        is_due = self._release_at_once or idle_s > IDLE_BEFORE_RELEASE_S
        if not self.scheduler.idle or self._broadcast_plans or not is_due:
            return
        self._release_at_once = False
        if self._holds_memory:
            self._holds_memory = False
            self._link.send(Order(Reset()))
            self.runner.reset()
            trim_heap()
            if self._speculator is not None:
                log.info("%s", log_line(self._speculator.meter.stats()))

    # -- figures -----------------------------------------------------------------------------------------------------

    def stats(self, reports: Sequence[RankStats]) -> EngineStats:
        """Current counters and gauges. `reports`: of the other ranks, in rank order."""
        ranks = [rank_stats(self._link, self.mirror, self._staged), *reports]
        scheduler, counters = self.scheduler, self.scheduler.counters
        used, budget = scheduler.admission.used, scheduler.config.limits.kv_budget
        return EngineStats(
            step=scheduler.step_id,
            running=scheduler.n_running,
            waiting=len(scheduler.waiting),
            kv_bytes=used,
            kv_usage=used / budget if budget else 0.0,
            prefix_bytes=scheduler.prefix.used,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            disk_queries=scheduler.disk.queries,
            disk_hits=counters.disk_hits,
            disk_failures=scheduler.disk.failures,
            disk_mismatches=0 if self._disk_outcomes is None else self._disk_outcomes.mismatches,
            disk_blocks=len(scheduler.disk.index),
            preemptions=counters.preemptions,
            prefill_tokens=counters.prefill_tokens,
            generated_tokens=counters.generated_tokens,
            decode_steps=counters.decode_steps,
            step_s=self._timer.steps_s,
            model_s=self._timer.totals_s["model"],
            control_s=self._timer.totals_s["control"],
            active_bytes=ranks[0].active_bytes,
            peak_bytes=ranks[0].peak_bytes,
            cache_bytes=mx.get_cache_memory(),
            rss_bytes=ranks[0].rss_bytes,
            ranks=ranks,
            spec=None if self._speculator is None else self._speculator.meter.stats(),
            sequences=self._work.progress(),
        )
