"""Counts the work for each sequence from the plans, for `GET /v1/requests/{id}` and the web page. Decides nothing."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.sched.plan import Admit, Forward, Step
from phalanx.sched.scheduler import Scheduler
from phalanx.types import Finished, PromptScored, SequenceProgress, SequenceWork, Tokens


class WorkLog:
    """Work by sequence id, from a sequence's first plan to its end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._work: dict[str, SequenceWork] = {}
        self._has_prefix_cache = scheduler.config.prefix_budget > 0

    def note(self, step: Step) -> None:
        """Count a plan's work. Call it while the scheduler's rows are still those of the plan."""
        for op in step.ops:
            if isinstance(op, Admit):
                self._admitted(op)
        for forward in step.forwards:
            self._computed(forward)

    def with_work(self, event: Tokens | Finished | PromptScored) -> Tokens | Finished | PromptScored:
        """The event; a sequence's last one with its work, which is then dropped."""
        if isinstance(event, Finished) and (work := self._work.pop(event.id, None)) is not None:
            return replace(event, work=work)
        return event

    def progress(self) -> list[SequenceProgress]:
        """Progress of each sequence that has a row."""
        return [
            SequenceProgress(
                id=row.id,
                computed=row.kv_len + row.in_flight,
                known=len(row.tokens),
                cached_tokens=row.cached_tokens,
                disk_tokens=row.disk_tokens,
                drafted_tokens=row.drafted,
                accepted_tokens=row.accepted,
                work=self._work.get(row.id, SequenceWork()),
            )
            for row in self._scheduler.layout.rows()
        ]

    def _admitted(self, op: Admit) -> None:
        """Count an admission, and the prefix that it reuses."""
        if (seq := self._scheduler.by_number.get(op.seq)) is None:
            return
        if (known := self._work.get(seq.id)) is not None:
            known.preemptions += 1
            return
        nearest, common = seq.nearest_len, seq.prefix_len
        if common == 0 and self._has_prefix_cache:
            nearest, common = self._scheduler.prefix.nearest(seq.request.sharing, seq.request.prompt)
        self._work[seq.id] = SequenceWork(nearest_tokens=nearest, left_at=common)

    def _computed(self, forward: Forward) -> None:
        for number in forward.seqs:
            if (seq := self._scheduler.by_number.get(number)) is None or (work := self._work.get(seq.id)) is None:
                continue
            if forward.sample:
                work.steps += 1
            else:
                work.chunks += 1
