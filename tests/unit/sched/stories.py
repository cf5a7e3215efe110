"""Random conversations on a simulated pipeline, with faults and restarts; a seed decides everything."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace
from pipeline import Pipeline, answer_alone, outputs_alone
from simulation import VOCAB, make_config
from support.play import Play

from phalanx.dist.stage_frames import HEADER_BYTES
from phalanx.dist.topology import Topology
from phalanx.errors import CollectiveFault, Desync, StageLinkError
from phalanx.types import Finished, SequenceRequest, Tokens

NOTICED = (Desync, StageLinkError, CollectiveFault)
"""By what a rank notices a fault."""

FAULTS = ("kill", "lost", "repeated", "swapped", "corrupted", "wrong sum", "lost plan", "kv_len", "crc", "seq")
SURE = frozenset({"lost", "swapped", "corrupted", "wrong sum", "lost plan"})
"""Faults that are always noticed. A repeated frame is if another one follows, a row that went astray unless it ends."""


class Story:
    """A conversation that a seed decides: requests, cancellations, stops, faults; every token is checked at once."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.rnd = rnd = Random(seed)
        self.topology = Topology(tuple(rnd.choice((1, 1, 1, 2)) for _ in range(rnd.randint(2, 4))))
        recurrent = rnd.random() < 0.2
        self.drafts = not recurrent and rnd.random() < 0.6
        config = make_config(
            max_num_seqs=rnd.randint(1, 12),
            max_num_batched_tokens=rnd.choice((16, 24, 64)),
            first_chunk=rnd.choice((16, 64)),
            max_model_len=rnd.choice((96, 128)),
            kv_budget=16 * 128 * rnd.choice((2, 2, 3, 8)),
            prefix_budget=rnd.choice((0, 16 * 80, 1 << 18)),
            recurrent=recurrent,
            bytes_per_row=8 if recurrent else 0,
            pack_above=rnd.choice((None, 4)),
            page_tokens=rnd.choice((0, 16)),
        )
        limits = replace(config.limits, row_groups=rnd.choice((1, self.topology.n_stages, self.topology.n_stages)))
        self.config = replace(config, limits=limits)
        self.play = Play(VOCAB, longest_prompt=50, longest_answer=rnd.choice((10, 40)))
        self.n_requests = rnd.randint(1, 12)
        self.n_faults = rnd.choice((0, 1, 2)) if faults else 0
        self.alone: dict[str, list[int]] = {}
        self._numbers: dict[str, int] = {}  # by which the scheduler knows requests
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}
        self.fault = ""  # the last one, until it is noticed
        self.noticed: list[str] = []
        self.n_steps = self.max_in_flight = self.max_decoding = self.preemptions = 0
        self.pipeline = Pipeline(self.config, self.topology, rnd)
        for _ in range(rnd.randint(0, self.n_requests)):
            self.arrive()

    def run(self) -> None:
        """Everything until all requests are answered."""
        for _ in range(20_000):
            try:
                if not self.step():
                    break
            except NOTICED as error:
                assert self.fault, f"noticed where there was no fault: {error}"
                self.noticed.append(f"{self.fault}: {type(error).__name__}")
                self.restart()
        else:
            raise AssertionError("the conversation does not come to an end")
        assert self.fault not in SURE, f"{self.fault}: no rank noticed"
        self.close()
        assert not self.pipeline.scheduler.admission.used and self.pipeline.scheduler.idle
        for name in self.play.requests.keys() - self.play.cancelled:
            finished = self.finished.get(name)
            if finished is not None and finished.reason in ("timeout", "error"):
                continue
            if name in self.play.finishes:
                assert finished is None or finished.n_tokens == self.play.finishes[name]
            else:
                assert finished is not None, f"{name} has no end"
                assert self.outputs[name] == self.alone[name] and finished.n_tokens == len(self.alone[name])

    def step(self) -> bool:
        """One thing happens; False when all is over."""
        rnd, pipeline = self.rnd, self.pipeline
        chance = rnd.random()
        if chance < 0.1:
            self.outside()
        elif chance < 0.13 and self.n_faults and not self.fault:
            self.break_something()
        elif (moves := pipeline.moves()) and chance < 0.7:
            rnd.choice(moves)()
        elif pipeline.plan(self._drafts() if self.drafts else {}):
            self.n_steps += 1
        elif moves:
            rnd.choice(moves)()
        elif any(rank.plans for rank in pipeline.ranks):
            pipeline.stand_still()
        elif len(self.play.requests) < self.n_requests:
            self.arrive()
        else:
            self.take_events()
            return False
        self.take_events()
        return True

    def outside(self) -> None:
        """What clients and the server do."""
        scheduler, rnd = self.pipeline.scheduler, self.rnd
        match rnd.choice(("arrive", "arrive", "cancel", "stop string", "reset", "pace")):
            case "arrive" if len(self.play.requests) < self.n_requests:
                self.arrive()
            case "cancel" if (leaving := self._running()) is not None and rnd.random() < 0.3:
                self.play.cancelled.add(leaving)
                scheduler.cancel(leaving, self.pipeline.now)
            case "stop string" if (found := self._running()) is not None and self.outputs[found]:
                self.play.finishes[found] = rnd.randint(1, len(self.outputs[found]))
                scheduler.finish(found, self.play.finishes[found], self.pipeline.now)
            case "reset" if rnd.random() < 0.2:
                scheduler.reset_prefix_cache()
            case "pace":
                scheduler.prefill_budget.observe(64, rnd.uniform(0.1, 10), rnd.uniform(0.1, 20))

    def arrive(self) -> None:
        """A request of one or more choices; some want their prompt scored, some have a deadline."""
        for request in self.play.arrive(self.rnd):
            if self.rnd.random() < 0.2:
                request = replace(request, prompt_logprobs=0)
            elif self.rnd.random() < 0.1:
                request = replace(request, timeout_s=self.rnd.uniform(5, 50))
            if self.config.recurrent:  # as the server asks for it
                request = replace(request, checkpoint=len(request.prompt) * 2 // 3)
            self.play.requests[request.id] = request
            self.alone[request.id] = answer_alone(self.topology.n_stages, request)
            self._submit(request)

    def break_something(self) -> None:
        """One fault, of those that are possible now."""
        rnd, ranks = self.rnd, self.pipeline.ranks
        kind, rank = rnd.choice(FAULTS), rnd.choice(ranks)
        inbox, rows = rank.runner.inbox, list(rank.mirror.rows.values())
        match kind:
            case "kill":
                self.noticed.append("kill")
                self.restart()
                self.n_faults -= 1
                return
            case "lost" if inbox:
                del inbox[rnd.randrange(len(inbox))]
            case "repeated" if inbox:
                inbox.insert(at := rnd.randrange(len(inbox)), inbox[at])
            case "swapped" if len(inbox) > 1:
                inbox[0], inbox[-1] = inbox[-1], inbox[0]
            case "corrupted" if inbox:
                at = rnd.randrange(len(inbox))
                inbox[at] = _flipped(rnd, *inbox[at])
            case "wrong sum":
                stage = [other for other in ranks if other.runner.stage == rank.runner.stage]
                planned = [step.id for other in stage for step in other.plans if step.forwards]
                free = [step for step in planned if all(step > other.mirror.step for other in stage)]
                if not free:
                    return
                for other in stage:
                    other.runner.wrong_from = min(free)
                self.pipeline.wrong_from = min(free)
            case "lost plan" if len(rank.plans) > 1:
                rank.plans.popleft()
            case "kv_len" if rows:
                rows[0].kv_len += 1
            case "crc" if rows:
                rows[0].crc ^= 1
            case "seq" if rows:
                rows[0].seq += 1000
            case _:
                return
        self.fault = kind
        self.n_faults -= 1

    def restart(self) -> None:
        """The journal's part: the unfinished go on from their committed tokens."""
        self.take_events()
        self.close()
        self.fault = ""
        self.pipeline = Pipeline(self.config, self.topology, self.rnd)
        settled = {*self.finished, *self.play.finishes, *self.play.cancelled}
        for request in self.play.requests.values():
            if request.id not in settled:
                self._submit(replace(request, committed=self.outputs[request.id]))

    def close(self) -> None:
        """Take the figures of a pipeline that ends."""
        self.max_in_flight = max(self.max_in_flight, self.pipeline.max_in_flight)
        self.max_decoding = max(self.max_decoding, self.pipeline.max_decoding)
        self.preemptions += self.pipeline.scheduler.counters.preemptions

    def take_events(self) -> None:
        """Clients get tokens; each must be the one that the request gets alone."""
        for event in self.pipeline.scheduler.take_events():
            if isinstance(event, Tokens):
                out = self.outputs[event.id]
                assert event.start == len(out)
                out.extend(event.tokens)
                assert out == self.alone[event.id][: len(out)], f"other tokens for {event.id}"
            else:
                assert event.id not in self.finished
                self.finished[event.id] = event
                self._check_scores(self.play.requests[event.id], event)

    def _check_scores(self, request: SequenceRequest, event: Finished) -> None:
        """Of a prompt that is scored, every position has been when the answer ends."""
        scores = self.pipeline.scores.pop(self._numbers.get(request.id, -1), {})
        ended = event.reason in ("stop", "length") and request.id not in self.play.finishes
        if ended and request.prompt_logprobs is not None:
            wanted = outputs_alone(self.topology.n_stages, request.prompt)[:-1]
            assert [scores.get(i) for i in range(1, len(request.prompt))] == wanted

    def _submit(self, request: SequenceRequest) -> None:
        self.outputs[request.id] = list(request.committed)
        self.pipeline.scheduler.submit(request, self.pipeline.now)
        if (seq := self.pipeline.scheduler.by_id.get(request.id)) is not None:
            self._numbers[request.id] = seq.number
        self.take_events()

    def _running(self) -> str | None:
        """A request that is not over, of which nobody has decided yet that it ends."""
        settled = {*self.play.finishes, *self.play.cancelled}
        ids = sorted(self.pipeline.scheduler.by_id.keys() - settled)
        return self.rnd.choice(ids) if ids else None

    def _drafts(self) -> dict[int, list[int]]:
        """Drafts of which most are right."""
        drafts = {}
        for row, room in self.pipeline.scheduler.draftable().items():
            right = self.alone[row.id][row.n_output : row.n_output + self.rnd.randint(0, min(room, 4))]
            drafts[row.number] = [t if self.rnd.random() < 0.8 else self.rnd.randrange(VOCAB) for t in right]
        return {number: tokens for number, tokens in drafts.items() if tokens}


def _flipped(rnd: Random, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """A frame with one bit changed."""
    data = bytearray(header + payload)
    data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
    return bytes(data[:HEADER_BYTES]), bytes(data[HEADER_BYTES:])
