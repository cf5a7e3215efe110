"""The leader: takes messages, plans, executes, samples, commits, answers. One thread, one loop.

All policy is in the scheduler, all tokens are decided by `sched/commit.py`; this file only connects them with the
model, with the other ranks and with the server. With no workers the leader is already the leader: what it executes is
the plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import mlx.core as mx

from phalanx.dist.fault_injection import Injection
from phalanx.engine.execute import ForwardOutput, execute
from phalanx.engine.link import LeaderLink, SingleRank
from phalanx.engine.mirror import Mirror
from phalanx.engine.server_socket import ServerSocket
from phalanx.engine.step_deadline import StepDeadline
from phalanx.engine.trace import Trace
from phalanx.engine.worker import inject_fault, rank_stats
from phalanx.memory import trim_heap
from phalanx.model.runner import Runner
from phalanx.model.sampling.sampler import score
from phalanx.sched.commit import commit_chunk, commit_tokens
from phalanx.sched.drafts import after_next, useful_drafts
from phalanx.sched.plan import Commit, Forward, Order, Reset, Step, Stop
from phalanx.sched.scheduler import Scheduler
from phalanx.sched.sequence import Sequence
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.spec.speculator import Speculator
from phalanx.spec.stats import line
from phalanx.spec.verify import Verified, verify
from phalanx.types import (
    Batch,
    Cancel,
    EngineStats,
    Finish,
    Ping,
    Pong,
    PromptScored,
    ResetPrefixCache,
    Shutdown,
    Submit,
    ToEngine,
    TokenLogprobs,
)

log = logging.getLogger("phalanx.engine")

REST_AFTER_S = 2.0  # seconds without work after which freed buffers are not kept for reuse any more


class Leader:
    """Owns the scheduler, the mirror, the model's runner, the lines to the server and to the other ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        server_socket: ServerSocket,
        *,
        link: LeaderLink | SingleRank,
        deadline: StepDeadline,
        trace: Trace | None = None,
        injection: Injection | None = None,
        metadata: SamplingMetadataCache | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.mirror = Mirror()
        self._server = server_socket
        self._link = link
        self._deadline = deadline
        self._trace = trace
        self._injection = injection
        self._metadata = metadata or SamplingMetadataCache()
        self._speculator = speculator
        self._scores: dict[int, list[TokenLogprobs | None]] = {}
        self._scored: list[PromptScored] = []
        self._unsent: list[Batch] = []
        self._pings: list[int] = []
        self._reset = False  # the prefix cache was dropped: do not wait with giving memory back
        self._kept_memory = True
        self._last_work = time.monotonic()
        self._stopping = False
        self._step_s = 0.0
        self._model_s = 0.0
        self._control_s = 0.0

    def run(self) -> None:
        """Serve until the server says `Shutdown`."""
        while not self._stopping:
            for message in self._server.drain(block=self._idle):
                self._take(message)
            self.step()
            self._answer_pings()
        self._send_events()
        self._link.send(Order(Stop()))

    def step(self) -> None:
        """One step of the state machine: draft, plan, execute, verify, commit, answer."""
        started = time.perf_counter()
        if self._speculator is not None and self._speculator.computes:
            self._send_events()
        drafts = self._draft()
        draft_s = time.perf_counter() - started
        step = self.scheduler.schedule(time.monotonic(), drafts)
        if step is not None:
            if self._trace is not None:
                self._trace.plan(step)
            self._begin(step)
            before = time.perf_counter()
            if self.runner.blocks(step):
                self._send_events()
            execution = execute(step, self.mirror, self.runner)
            self._send_events()
            verified = self._sample(execution.outputs, self.runner.dispatch_next if self._comes_again(step) else None)
            model_s = time.perf_counter() - before
            decode_s = model_s - execution.prefill_s
            self._model_s += model_s
            self._link.leave(step.id)
            self._deadline.observe(execution.prefill_tokens, execution.prefill_s, decode_s, step.width)
            self.scheduler.prefill_budget.observe(execution.prefill_tokens, execution.prefill_s, decode_s)
            commits = self._commits(step, verified.tokens)
            self.scheduler.apply(commits, time.monotonic(), verified.logprobs)
            if self._speculator is not None:
                seconds = time.perf_counter() - started - execution.prefill_s
                took = None if self.runner.captured_graph else seconds
                self._speculator.observe(step, verified.tokens, commits, took, draft_s)
        self._collect_events(step)
        if step is None or self.scheduler.idle:
            self._send_events()
        if step is not None:
            self._kept_memory = True
            self._last_work = time.monotonic()
            self._step_s += time.perf_counter() - started

    def _begin(self, step: Step) -> None:
        """Hand the plan to every rank, so that all begin at once."""
        before = time.perf_counter()
        limit_s = self._deadline.limit(step)
        if self._injection is not None:
            inject_fault(self._injection, step.id, self.mirror)
        self._link.send(Order(step, limit_s))
        self._link.enter(step.id, limit_s)
        self._control_s += time.perf_counter() - before

    @property
    def _idle(self) -> bool:
        return self.scheduler.idle and not self._pings and not self._reset

    # -- messages --------------------------------------------------------------------------------------------------

    def _take(self, message: ToEngine) -> None:
        if self._trace is not None and not isinstance(message, Ping):
            self._trace.message(message)
        now = time.monotonic()
        match message:
            case Submit():
                self.scheduler.submit(message.request, now)
            case Cancel():
                self.scheduler.cancel(message.id, now)
            case Finish():
                self.scheduler.finish(message.id, message.n_tokens, now)
            case Ping():
                self._pings.append(message.nonce)
            case ResetPrefixCache():
                self.scheduler.reset_prefix_cache()
                self._reset = True
            case Shutdown():
                self._stopping = True

    def _answer_pings(self) -> None:
        if self.scheduler.idle and (self._reset or time.monotonic() - self._last_work > REST_AFTER_S):
            self._rest()
        if self._pings:
            self._send_events()
            stats = self.stats()
            for nonce in self._pings:
                self._server.send(Pong(nonce, stats))
            self._pings.clear()

    def _rest(self) -> None:
        """An idle engine gives the buffers it keeps for reuse back to the system, once after each time of work."""
        self._reset = False
        if self._kept_memory:
            self._kept_memory = False
            self._link.send(Order(Reset()))
            self.runner.reset()
            trim_heap()
            if self._speculator is not None:
                log.info("%s", line(self._speculator.meter.stats()))

    def _collect_events(self, step: Step | None) -> None:
        """Note what the server has to know, and forget sequences that are over."""
        events = [*self._scored, *self.scheduler.take_events()]
        self._scored.clear()
        if events:
            self._unsent.append(Batch(step.id if step is not None else self.scheduler.step_id, events))
        alive = self.scheduler.by_number.keys()
        self._metadata.keep(alive)
        if self._speculator is not None:
            self._speculator.keep(alive)
        if self._scores.keys() - alive:
            self._scores = {n: s for n, s in self._scores.items() if n in alive}

    def _send_events(self) -> None:
        """Tell the server: where a device computes meanwhile, since the server, once woken, takes a processor."""
        for batch in self._unsent:
            self._server.send(batch)
        self._unsent.clear()

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _draft(self) -> dict[int, list[int]]:
        if self._speculator is None:
            return {}
        return self._speculator.draft(self.scheduler.draftable(), overlapped=self.runner.has_in_flight)

    def _comes_again(self, step: Step) -> bool:
        """Whether the next step is probably the same rows again, each with the token that is drawn in this one."""
        if self.scheduler.waiting or not self.runner.may_dispatch_next(step.forwards):
            return False
        numbers = step.forwards[0].seqs
        rows = [self.scheduler.by_number[n] for n in numbers]
        if not all(map(after_next, rows)):
            return False
        return self._speculator is None or not any(map(useful_drafts, rows)) or self._speculator.can_overlap(numbers)

    def _sample(self, outputs: list[ForwardOutput[mx.array]], meanwhile: Callable[[mx.array], None] | None) -> Verified:
        """Score prompts; sample and verify everything else at once."""
        for output in outputs:
            if output.forward.score:
                self._score(output)
        sampling = [(output.forward, output.logits) for output in outputs if output.forward.sample]
        return verify(sampling, self.scheduler.by_number, self._metadata, self.runner.settle(), meanwhile)

    def _score(self, output: ForwardOutput[mx.array]) -> None:
        """Log-probabilities of the prompt tokens that follow the fed ones."""
        (number,), (start,), (valid,) = output.forward.seqs, output.kv_len, output.forward.valid
        seq = self.scheduler.by_number[number]
        targets = seq.tokens[start + 1 : min(start + 1 + valid, seq.prompt_len)]
        top = seq.request.prompt_logprobs or 0
        known = self._scores.setdefault(number, [None])
        known.extend(score(output.logits[0, : len(targets)], targets, top))
        if len(known) == seq.prompt_len:
            self._scored.append(PromptScored(seq.id, known))

    def _commits(self, step: Step, verified: Mapping[int, list[int]]) -> list[Commit]:
        """One commit per row of the step, chunk and sampling forward of one row taken together."""
        commits: dict[int, Commit] = {}
        for forward in step.forwards:
            for number, valid in zip(forward.seqs, forward.valid, strict=True):
                seq = self.scheduler.by_number[number]
                commits[number] = self._commit(seq, forward, valid, verified)
        return list(commits.values())

    def _commit(self, seq: Sequence, forward: Forward, valid: int, verified: Mapping[int, list[int]]) -> Commit:
        if forward.sample:
            return commit_tokens(seq, len(seq.tokens) - 1, valid, verified[seq.number])
        return commit_chunk(seq, seq.kv_len, valid)

    # -- figures ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges now; every rank has answered for itself."""
        ranks = self._link.report(rank_stats(0, self.mirror, self.runner))
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
            preemptions=counters.preemptions,
            prefill_tokens=counters.prefill_tokens,
            generated_tokens=counters.generated_tokens,
            decode_steps=counters.decode_steps,
            step_s=self._step_s,
            model_s=self._model_s,
            control_s=self._control_s,
            active_bytes=ranks[0].active_bytes,
            peak_bytes=ranks[0].peak_bytes,
            cache_bytes=mx.get_cache_memory(),
            rss_bytes=ranks[0].rss_bytes,
            ranks=ranks,
            spec=None if self._speculator is None else self._speculator.meter.stats(),
        )
