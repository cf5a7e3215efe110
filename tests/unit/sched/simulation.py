"""A model made of integers: the scheduler and the mirrors against KV buffers that remember which token wrote them.

The next token is a hash of the row's whole valid region, so a wrong move, share, restore, rollback or length changes
the output. `reference` computes the same without buffers. Unwritten cells hold None: reading one fails.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from phalanx.engine.execute import execute
from phalanx.engine.mirror import Mirror
from phalanx.sched.admission import KvLimits
from phalanx.sched.commit import accept, commit_tokens
from phalanx.sched.plan import (
    Admit,
    Commit,
    Evict,
    Forward,
    Free,
    Move,
    Resize,
    Restore,
    RowOp,
    Share,
    Step,
    Store,
    Swap,
)
from phalanx.sched.prefill_budget import PrefillBounds
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.types import Finished, Sampling, SequenceRequest, StopRule, Tokens

VOCAB = 50


def next_token(history: Seq[int | None]) -> int:
    """The model: a hash of everything computed."""
    assert None not in history, "an unwritten cell was read"
    return zlib.crc32(array("q", history).tobytes()) % VOCAB


def reference(request: SequenceRequest) -> list[int]:
    """Output tokens of one request, computed alone."""
    tokens = list(request.prompt)
    out: list[int] = []
    while len(out) < request.stop.max_tokens:
        out.append(next_token(tokens))
        tokens.append(out[-1])
        if out[-1] in request.stop.stop_ids:
            break
    return out


Draft = Callable[[list[int], int], list[int]]
"""From known tokens, and how many drafts are of use, to drafts."""


def half_right(seed: int, longest: int = 8) -> Draft:
    """Drafts of 0 to `longest` tokens, each right with even odds, now and then more than are of use."""
    rnd = random.Random(seed)

    def draft(tokens: list[int], room: int) -> list[int]:
        history, drafts = list(tokens), []
        for _ in range(rnd.randint(0, longest)):
            history.append(next_token(history) if rnd.random() < 0.5 else rnd.randrange(VOCAB))
            drafts.append(history[-1])
        return drafts if rnd.random() < 0.1 else drafts[:room]

    return draft


class FakeRunner:
    """Buffers of tokens, executing the plan's operations literally."""

    def __init__(self) -> None:
        self.arenas: dict[int, list[list[int | None]]] = {}
        self.entries: dict[int, list[int | None]] = {}

    def begin(self, step: int) -> None:
        self.step = step

    def apply(self, ops: Seq[RowOp]) -> None:
        for op in ops:
            self._apply(op)

    def _apply(self, op: RowOp) -> None:
        match op:
            case Resize():
                old = self.arenas.get(op.arena, [])
                rows = [(old[i] if i < len(old) else [])[: op.capacity] for i in range(op.rows)]
                self.arenas[op.arena] = [row + [None] * (op.capacity - len(row)) for row in rows]
            case Admit():
                self.arenas[op.arena][op.slot] = [None] * len(self.arenas[op.arena][op.slot])
            case Restore():
                self.arenas[op.arena][op.slot][op.start : op.length] = self.entries[op.entry][op.start : op.length]
            case Share():
                row = self.arenas[op.src_arena][op.src]
                self.arenas[op.arena][op.slot][op.start : op.length] = row[op.start : op.length]
            case Move():
                source, target = self.arenas[op.src_arena][op.src], self.arenas[op.arena]
                capacity = len(target[op.dst])
                target[op.dst] = (source + [None] * capacity)[:capacity]
            case Swap():
                rows = self.arenas[op.arena]
                rows[op.a], rows[op.b] = rows[op.b], rows[op.a]
            case Store():
                self.entries[op.entry] = self.arenas[op.arena][op.slot][: op.length]
            case Evict():
                del self.entries[op.entry]
            case Free():
                pass

    def forward(self, forward: Forward, kv_len: Seq[int]) -> list[list[int]] | None:
        """The next token behind every valid position: [rows][valid]."""
        out = []
        rows = self.arenas[forward.arena]
        for i, (tokens, valid, start) in enumerate(zip(forward.tokens, forward.valid, kv_len, strict=True)):
            width = len(forward.tokens[0])
            assert len(tokens) == width and 1 <= valid <= width
            row = rows[forward.start + i]
            if forward.packed:
                tokens, width = tokens[:valid], valid
            assert start + width <= len(row), "padding would be written past the buffer"
            row[start : start + width] = tokens
            if forward.sample:
                out.append([next_token(row[: start + i + 1]) for i in range(valid)])
        return out if forward.sample else None


class Simulation:
    """A leader with its scheduler and one runner, plus workers that see nothing but the plans."""

    def __init__(self, config: SchedulerConfig, n_workers: int = 1, draft: Draft | None = None) -> None:
        self.scheduler = Scheduler(config)
        self.draft = draft
        self.accept = accept
        self.drafted = self.accepted = 0
        self.ranks = [(Mirror(), FakeRunner()) for _ in range(1 + n_workers)]
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}
        self.now = 0.0
        self.steps: list[Step] = []
        self.largest_kv = 0

    def submit(self, request: SequenceRequest) -> None:
        self.outputs[request.id] = list(request.committed)
        self.scheduler.submit(request, self.now)
        self._take_events()

    def step(self) -> bool:
        """One step on all ranks; False when idle."""
        self.now += 1.0
        step = self.scheduler.schedule(self.now, self._drafts())
        self.largest_kv = max(self.largest_kv, self.scheduler.admission.used)
        if step is None:
            self._take_events()
            return False
        self.steps.append(step)
        results = [execute(step, mirror, runner) for mirror, runner in self.ranks]
        assert all(r.outputs == results[0].outputs for r in results)
        self.scheduler.apply(self._commits(results[0].outputs), self.now)
        self._take_events()
        return True

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the simulation does not come to an end")

    def _drafts(self) -> dict[int, list[int]]:
        if self.draft is None:
            return {}
        return {row.number: self.draft(row.tokens, room) for row, room in self.scheduler.draftable().items()}

    def _commits(self, outputs: list) -> list[Commit]:
        commits = []
        for output in outputs:
            forward = output.forward
            rows = zip(forward.seqs, output.kv_len, forward.tokens, forward.valid, output.logits, strict=True)
            for number, kv_len, fed, valid, sampled in rows:
                verified = self.accept(fed[1:valid], sampled)
                commits.append(commit_tokens(self.scheduler.by_number[number], kv_len, valid, verified))
                self.drafted += valid - 1
                self.accepted += len(verified) - 1
        return commits

    def _take_events(self) -> None:
        for event in self.scheduler.take_events():
            if isinstance(event, Tokens):
                assert event.start == len(self.outputs[event.id])
                self.outputs[event.id].extend(event.tokens)
            else:
                assert event.id not in self.finished
                self.finished[event.id] = event


def make_request(seq_id: str, prompt: list[int], max_tokens: int = 8, **more) -> SequenceRequest:
    stop = StopRule(max_tokens=max_tokens, stop_ids=frozenset(more.pop("stop_ids", ())))
    sampling = Sampling(choice=more.pop("choice", 0))
    return SequenceRequest(
        id=seq_id, group=more.pop("group", seq_id), prompt=prompt, sampling=sampling, stop=stop, **more
    )


def make_config(**more) -> SchedulerConfig:
    limits = KvLimits(
        max_num_seqs=more.pop("max_num_seqs", 4),
        max_model_len=more.pop("max_model_len", 2048),
        kv_budget=more.pop("kv_budget", 1 << 20),
        bytes_per_token=more.pop("bytes_per_token", 16),
        bytes_per_row=more.pop("bytes_per_row", 0),
        page_tokens=more.pop("page_tokens", 0),
    )
    prefill = PrefillBounds(more.pop("first_chunk", 64), more.pop("max_num_batched_tokens", 64))
    defaults = {"prefill": prefill, "target_step_s": 1.0, "decode_share": 0.5, "prefix_budget": 1 << 18}
    return SchedulerConfig(limits=limits, **{**defaults, **more})
