"""A pipeline of stages made of integers: phalanx's scheduler, mirrors, topology and frames; several plans in flight.

Each stage keeps the values that it was fed and hands on, for every position, a hash of all values up to it. So the last
stage's token depends on every cell of every stage. Ranks execute plans when their frames are there, in any order that
chance chooses.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from math import inf
from random import Random

from simulation import VOCAB, FakeRunner

from phalanx.dist.stage_frames import Frame, FrameSequence, encode
from phalanx.dist.topology import Topology
from phalanx.engine.execute import ForwardOutput, execute
from phalanx.engine.mirror import Mirror
from phalanx.errors import CollectiveFault
from phalanx.sched.commit import accept, commit_tokens
from phalanx.sched.plan import Commit, Forward, RowOp, Share, Step, Store
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.types import SequenceRequest


def hashes(stage: int, history: Seq[int | None], new: Seq[int]) -> Iterator[int]:
    """What a stage hands on behind each of the new values. Reading an unwritten cell (None) is a TypeError."""
    crc = zlib.crc32(array("q", history).tobytes(), stage)
    for value in new:
        crc = zlib.crc32(value.to_bytes(8, "little"), crc)
        yield crc & 0xFFFFFF  # a float32 holds it


def outputs_alone(n_stages: int, tokens: Seq[int]) -> list[int]:
    """The token behind each position of a text that is computed alone."""
    values: Seq[int] = tokens
    for stage in range(n_stages):
        values = list(hashes(stage, (), values))
    return [value % VOCAB for value in values]


def answer_alone(n_stages: int, request: SequenceRequest) -> list[int]:
    """Output tokens of a request that is computed alone."""
    crcs = list(range(n_stages))
    out: list[int] = []

    def feed(value: int) -> int:
        for stage in range(n_stages):
            crcs[stage] = zlib.crc32(value.to_bytes(8, "little"), crcs[stage])
            value = crcs[stage] & 0xFFFFFF
        return value % VOCAB

    following = [feed(token) for token in request.prompt][-1]
    while len(out) < request.stop.max_tokens:
        out.append(following)
        if following in request.stop.stop_ids:
            break
        following = feed(following)
    return out


class StageRunner(FakeRunner):
    """One rank's buffers, and the ends of its links."""

    def __init__(self, stage: int, n_stages: int, link: str, *, recurrent: bool) -> None:
        super().__init__()
        self.stage, self.last = stage, n_stages - 1
        self.recurrent = recurrent
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.outboxes: list[deque[tuple[bytes, bytes]]] = []
        self.sequence = FrameSequence(link)
        self.wrong_from = inf  # the step from which on its sums are wrong

    def begin(self, step: int) -> None:
        super().begin(step)
        self.n_forwards = 0

    def _apply(self, op: RowOp) -> None:
        if self.recurrent and isinstance(op, Store | Share):
            arena, slot = (op.arena, op.slot) if isinstance(op, Store) else (op.src_arena, op.src)
            row = self.arenas[arena][slot]
            assert None not in row[: op.length] and row[op.length : op.length + 1] in ([], [None]), "cut a state"
        super()._apply(op)

    def forward(self, forward: Forward, kv_len: Seq[int]) -> list[list[int]] | None:
        """Values in, values to the next stage; the last one gives the token behind every valid position."""
        shape = (len(forward.seqs), len(forward.tokens[0]), 1)
        frame = Frame(self.step, self.n_forwards, 0, "float32", shape)
        self.n_forwards += 1
        fed = forward.tokens if self.stage == 0 else self._receive(frame)
        out, rows = [], self.arenas[forward.arena]
        for i, (values, valid, start) in enumerate(zip(fed, forward.valid, kv_len, strict=True)):
            row, width = rows[forward.start + i], valid if forward.packed else len(values)
            assert start + width <= len(row), "padding would be written past the buffer"
            row[start : start + width] = values[:width]
            out.append([*hashes(self.stage, row[:start], values[:valid])])
        if self.step >= self.wrong_from:
            raise CollectiveFault(f"stage {self.stage} received a wrong sum in step {self.step}")
        if self.stage < self.last:
            self._send(frame, out)
            return None
        wanted = forward.sample or forward.score
        return [[value % VOCAB for value in row] for row in out] if wanted else None

    def _receive(self, frame: Frame) -> list[list[int]]:
        self.sequence.expect(frame, due=1.0)
        if not self.inbox:
            self.sequence.check_time(inf)
        header, payload = self.inbox.popleft()
        self.sequence.begin(header)
        self.sequence.end(payload)
        values = list(map(int, array("f", payload)))
        width = frame.shape[1]
        return [values[i : i + width] for i in range(0, len(values), width)]

    def _send(self, frame: Frame, out: list[list[int]]) -> None:
        width = frame.shape[1]
        payload = array("f", [value for row in out for value in [*row, *[0] * (width - len(row))]]).tobytes()
        header = encode(frame, payload)
        for outbox in self.outboxes:
            outbox.append((header, payload))


class Rank:
    """A mirror, a runner, and the plans that have arrived."""

    def __init__(self, runner: StageRunner) -> None:
        self.mirror = Mirror()
        self.runner = runner
        self.plans: deque[Step] = deque()

    @property
    def ready(self) -> bool:
        """Whether it can execute its next plan without waiting for frames."""
        return bool(self.plans) and (self.runner.stage == 0 or len(self.runner.inbox) >= len(self.plans[0].forwards))


class Pipeline:
    """The leader and all ranks; `depth` plans are in flight at most."""

    def __init__(self, config: SchedulerConfig, topology: Topology, rnd: Random) -> None:
        self.scheduler = Scheduler(config)
        self.depth = topology.n_stages + 1
        self.rnd = rnd
        self.ranks = []
        for rank in range(topology.size):
            stage, link = topology.place(rank).stage, f"rank {topology.sender(rank)} to rank {rank}"
            self.ranks.append(Rank(StageRunner(stage, topology.n_stages, link, recurrent=config.recurrent)))
        for rank, sends in enumerate(self.ranks):
            sends.runner.outboxes = [self.ranks[other].runner.inbox for other in topology.receivers(rank)]
        self.in_flight: deque[Step] = deque()
        self.outcomes: deque[tuple[Step, list[ForwardOutput]]] = deque()
        self.states: dict[int, dict] = {}  # step -> rows after it, as the first rank had them
        self.scores: dict[int, dict[int, int]] = {}  # sequence -> position -> token behind the one before
        self.wrong_from = inf  # the first step in which some stage's sums are wrong
        self.now = 0.0
        self.max_decoding = self.max_in_flight = 0  # plans at once

    def moves(self) -> list:
        """What can happen next, apart from the world outside."""
        found = [lambda rank=rank: self.execute(rank) for rank in self.ranks if rank.ready]
        if self.outcomes:
            found.append(self.take_outcome)
        return found

    def plan(self, drafts: dict[int, list[int]]) -> bool:
        """The leader plans a step if it may; False if there is nothing to plan."""
        self.now += 1.0
        if len(self.in_flight) == self.depth:
            return False
        step = self.scheduler.schedule(self.now, drafts)
        assert self.scheduler.admission.used <= self.scheduler.config.limits.kv_budget
        if step is None:
            return False
        self.in_flight.append(step)
        for rank in self.ranks:
            rank.plans.append(step)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        sampling = sum(any(forward.sample for forward in step.forwards) for step in self.in_flight)
        self.max_decoding = max(self.max_decoding, sampling)
        return True

    def execute(self, rank: Rank) -> None:
        """A rank executes its next plan; its rows must then be those of every other rank after that plan."""
        step = rank.plans.popleft()
        outputs = execute(step, rank.mirror, rank.runner).outputs
        state = rank.mirror.snapshot()
        assert self.states.setdefault(step.id, state) == state, f"rows differ after step {step.id}"
        if rank is self.ranks[0]:
            self.outcomes.append((step, outputs))

    def take_outcome(self) -> None:
        """The leader commits the oldest plan in flight."""
        step, outputs = self.outcomes.popleft()
        assert step is self.in_flight.popleft()
        assert step.id < self.wrong_from, "committed in spite of a wrong sum"
        commits = []
        for output in outputs:
            if output.forward.score:
                (number,), (start,), (tokens,) = output.forward.seqs, output.kv_len, output.logits
                self.scores.setdefault(number, {}).update(enumerate(tokens, start + 1))
            else:
                commits += self.commits(output)
        self.scheduler.apply(commits, self.now)
        for commit in commits:
            if not commit.tokens and commit.seq in self.scheduler.by_number:
                self.scheduler.give_up(commit.seq, "error", "", self.now)

    def commits(self, output: ForwardOutput) -> Iterator[Commit]:
        """The commits of a sampling forward. Now and then a row is left no token, as a grammar may leave it none."""
        forward = output.forward
        for number, fed, valid, sampled in zip(forward.seqs, forward.tokens, forward.valid, output.logits, strict=True):
            seq = self.scheduler.by_number[number]
            nothing_left = self.rnd.random() < 0.005
            yield commit_tokens(seq, seq.kv_len, valid, () if nothing_left else accept(fed[1:valid], sampled))

    def stand_still(self) -> None:
        """Nothing can move: a rank that waits for a frame says so when its time is over."""
        for rank in self.ranks:
            if rank.plans and rank.runner.stage:
                self.execute(rank)
        raise AssertionError("the pipeline stands still, and no frame is missing")
