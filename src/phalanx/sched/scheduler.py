"""The scheduler decides what runs next; no other file does.

`schedule(now, drafts)` turns the state of all sequences into one `Step`, every rank executes the step, and
`apply(commits)` takes in its outcome. With pipeline stages, further steps may be scheduled before that; outcomes
return in the order of their steps (design: Plans in flight). `now` is an argument: the same calls give the same plans.
Requests of clients (`submit`, `cancel`, `finish`) take effect in the next plan; a row in flight ends after its step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType

from msgspec import Struct

from phalanx.sched.admission import KvLimits
from phalanx.sched.arena import ArenaLayout
from phalanx.sched.commit import commit_chunk
from phalanx.sched.counters import Counters
from phalanx.sched.disk_prefixes import DiskPrefixes
from phalanx.sched.drafts import Drafts, fit_drafts, useful_drafts
from phalanx.sched.forwards import decode_forwards, prefill_forwards
from phalanx.sched.page_admission import admission_for
from phalanx.sched.plan import Commit, Evict, Forward, Step, Store
from phalanx.sched.prefill_budget import PrefillBounds, PrefillBudget, share_out
from phalanx.sched.prefix import PrefixIndex, sibling_prefills
from phalanx.sched.prefix_copies import PrefixCopies
from phalanx.sched.sequence import Hit, Sequence, SequenceEnding, limit_length, state_digest
from phalanx.sched.waiting import WaitingQueue, victim
from phalanx.types import Finished, FinishReason, SequenceRequest, TokenLogprobs, Tokens


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Constants of one engine."""

    limits: KvLimits
    prefill: PrefillBounds
    target_step_s: float
    decode_share: float
    prefix_budget: int  # bytes
    recurrent: bool = False  # rows hold recurrent state: no padding, a fresh row alone, prefixes whole
    max_logits: int = 256  # tokens with logits in one step: of a scored chunk, or of all rows with drafts
    pack_above: int | None = None
    """Sampling forwards of more tokens (rows x widest row) are packed: fed without padding. Smaller ones stay padded,
    because only padded ones are replayed from captured graphs. None: some rank cannot pack."""


class Scheduler:
    """The leader's policy and state. Used from one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        limits = config.limits
        self.layout = ArenaLayout(limits.n_arenas, limits.row_groups)
        self.admission = admission_for(limits, self.layout)
        self.prefix = PrefixIndex(
            config.prefix_budget, limits.bytes_per_token, limits.bytes_per_row, whole_only=config.recurrent
        )
        self.disk = DiskPrefixes(self.prefix, self.layout.ops)
        self._copies = PrefixCopies(self.prefix, self.disk, self.layout, whole_only=config.recurrent)
        self.prefill_budget = PrefillBudget(config.prefill, config.target_step_s, config.decode_share)
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self.by_id: dict[str, Sequence] = {}
        self.by_number: dict[int, Sequence] = {}
        self.step_id = 0
        self._numbers = 0
        self._decoded = -1  # the row group that decoded last
        self._commits: list[Commit] = []  # carried by the next step
        self._events: list[Tokens | Finished] = []

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: SequenceRequest, now: float) -> None:
        """Queue a sequence. One that cannot run ends at once, with an event that names the reason."""
        room = self.config.limits.max_model_len - len(request.prompt)
        seq = Sequence(self._numbers, limit_length(request, room), now)
        self._numbers += 1
        if request.id in self.by_id:
            raise ValueError(f"sequence {request.id} is unfinished already")
        self.by_id[seq.id] = seq
        self.by_number[seq.number] = seq
        self.waiting.append(seq)
        if seq.prompt_len == 0 or room < 1:
            limit = self.config.limits.max_model_len
            detail = f"A prompt of {seq.prompt_len} tokens does not fit in the context of {limit} with an answer."
            self._end(seq, SequenceEnding("error", detail), now)
        elif seq.n_output >= seq.request.stop.max_tokens:
            self._end(seq, SequenceEnding("length"), now)

    def cancel(self, seq_id: str, now: float) -> None:
        """End a sequence, waiting or running; its computed prefix may be kept."""
        self._end_or_mark(self.by_id.get(seq_id), SequenceEnding("cancelled"), now)

    def finish(self, seq_id: str, n_tokens: int, now: float) -> None:
        """The server found a stop string: the sequence ends with its first `n_tokens` output tokens."""
        self._end_or_mark(self.by_id.get(seq_id), SequenceEnding("stop", n_tokens=n_tokens), now)

    def give_up(self, number: int, reason: FinishReason, detail: str, now: float) -> None:
        """End a sequence that cannot continue, unless it has ended; its computed prefix may be kept."""
        ending = SequenceEnding(reason, detail, keep=not self.config.recurrent)
        self._end_or_mark(self.by_number.get(number), ending, now)

    def reset_prefix_cache(self) -> None:
        """Drop every kept prefix."""
        self.layout.ops.extend(Evict(number) for number in self.prefix.clear())
        self.disk.reset()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to send to the ranks."""
        return self.idle_except(frozenset())

    def idle_except(self, held: Collection[int]) -> bool:
        """Whether nothing can be done until one of the `held` sequences, or one loading from disk, may get a row."""
        return not (self.by_number.keys() - {*held, *self.disk.held} or self.layout.ops or self._commits)

    @property
    def n_running(self) -> int:
        """Sequences that hold a slot."""
        return self.layout.n_rows

    def take_events(self) -> list[Tokens | Finished]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- one step ----------------------------------------------------------------------------------------------

    def draftable(self) -> dict[Sequence, int]:
        """The rows that decode in the next step, and how many drafts each can use. Excludes rows that finish their
        prompt in that step."""
        if self.config.recurrent:
            return {}
        group = self.layout.next_group(self._decoded)
        return {row: useful_drafts(row) for row in self.layout.decoding(group)}

    def schedule(
        self, now: float, drafts: Drafts = MappingProxyType({}), held: Collection[int] = frozenset()
    ) -> Step | None:
        """The next step; None if there is nothing to do until a message or an outcome arrives. Changes state.

        Args:
            drafts: proposed tokens for decoding rows (`draftable`); cut to what fits.
            held: numbers of waiting sequences that get no row yet, because their grammars are being compiled.
        """
        assert not (drafts and self.config.recurrent), "recurrent state cannot roll back"
        self._expire(now)
        for row in self.layout.rows():
            self.disk.compare(row)
            if row.kv_len == row.checkpoint > 0 and not row.decoding:
                self._keep_checkpoint(row)
        short_groups = self._grow()
        if not short_groups:
            self._admit(now, held)
        self._copy_prefixes()
        self.admission.settle()
        group = self.layout.next_group(self._decoded, short_groups)
        rows = self.layout.decoding(group)
        max_tokens = min(self.config.prefill.max_tokens, self.config.max_logits)
        drafts = {row.number: drafts[row.number] for row in rows if row.number in drafts}
        fitted = fit_drafts(self.layout, self.admission, drafts, max_tokens)
        chunks = self._plan_chunks(len(rows) + sum(map(len, fitted.values())))
        forwards = self._prefill_forwards(chunks)
        if group is None:
            group = self.layout.next_group(self._decoded, short_groups)  # rows that have just finished their prompts
        forwards += self._decode_forwards(group, fitted)
        if not forwards and not self.layout.ops and not self._commits:
            return None
        self.step_id += 1
        step = Step(
            id=self.step_id,
            commits=tuple(self._commits),
            ops=tuple(self.layout.ops),
            forwards=tuple(forwards),
            digest=self.digest(),
        )
        self._commits.clear()
        self.layout.ops.clear()
        self._put_in_flight(forwards)
        return step

    def apply(
        self, commits: list[Commit], now: float, logprobs: Mapping[int, list[TokenLogprobs]] = MappingProxyType({})
    ) -> None:
        """Apply the outcome of a step: clients get the commits as events now, the ranks with the next plan.

        Args:
            commits: of the rows that the step's sampling forwards fed.
            logprobs: by sequence number, one entry per verified token, if the request asked for them.
        """
        for commit in commits:
            seq = self.by_number[commit.seq]
            assert seq.in_flight == commit.computed - seq.kv_len, "the outcome of a forward that did not run"
            seq.kv_len, seq.in_flight = commit.kv_len, 0
            self._commits.append(commit)
            if commit.tokens:
                self._commit_output(seq, commit, now, logprobs.get(seq.number))
            if seq.ending is not None:
                exact = commit.kv_len == commit.computed or not self.config.recurrent
                self._end(seq, seq.ending._replace(keep=seq.ending.keep and exact), now)
            elif commit.finish is not None:
                self._end(seq, SequenceEnding(commit.finish, stop_id=commit.stop_id), now)

    def digest(self) -> int:
        """The leader's row state, to compare with every rank's mirror. Includes positions in flight: a mirror counts
        them as soon as its rank has computed them."""
        rows = self.layout.rows()
        return state_digest((r.arena, r.slot, r.number, r.kv_len + r.in_flight, r.crc) for r in rows)

    # -- parts of apply ----------------------------------------------------------------------------------------

    def _commit_output(self, seq: Sequence, commit: Commit, now: float, logprobs: list[TokenLogprobs] | None) -> None:
        kept = None if logprobs is None else logprobs[: len(commit.tokens)]
        start = seq.n_output
        seq.commit(commit, now)
        self.counters.generated_tokens += len(commit.tokens)
        self._events.append(Tokens(id=seq.id, start=start, tokens=list(commit.tokens), logprobs=kept))

    def _end_or_mark(self, seq: Sequence | None, ending: SequenceEnding, now: float) -> None:
        """End the sequence now; if it is in flight, when its step returns. Its first ending counts."""
        if seq is None:
            return
        if seq.in_flight:
            seq.ending = seq.ending or ending
        else:
            self._end(seq, ending, now)

    def _end(self, seq: Sequence, ending: SequenceEnding, now: float) -> None:
        """End the sequence: keep its prefix, free its row, tell the client."""
        del self.by_id[seq.id]
        del self.by_number[seq.number]
        keep = ending.keep
        if ending.n_tokens is not None:
            del seq.tokens[seq.prompt_len + ending.n_tokens :]
            keep = keep and not (seq.kv_len > len(seq.tokens) and self.config.recurrent)  # cannot roll back
            seq.kv_len = min(seq.kv_len, len(seq.tokens))
        self.disk.leave(seq)
        if seq.slot >= 0:
            if keep:
                self._keep_prefix(seq)
            self.layout.release(seq)
        else:
            self.waiting.remove(seq)
        self._events.append(seq.finished(ending, now))

    def _keep_prefix(self, seq: Sequence) -> None:
        kept = seq.kv_len
        entry, evicted = self.prefix.add(seq.request.sharing, seq.tokens[:kept])
        self.layout.ops.extend(Evict(number) for number in evicted)
        if entry is not None:
            self.layout.ops.append(Store(seq.arena, seq.slot, entry, kept))
            self.disk.write(seq, entry, kept)

    def _keep_checkpoint(self, seq: Sequence) -> None:
        """Keep the prefix of a row that stopped at its checkpoint: prompts may go on differently from there."""
        seq.checkpoint = 0
        self._keep_prefix(seq)
        if seq.to_prefill == 0:
            self.layout.promote(seq)

    # -- parts of schedule -------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        late = [s for s in self.by_id.values() if s.deadline is not None and now >= s.deadline]
        for seq in late:
            detail = f"The request's timeout of {seq.request.timeout_s:g} s passed."
            self._end_or_mark(seq, SequenceEnding("timeout", detail), now)

    def _grow(self) -> set[int]:
        """Give every row room for its known tokens; preempt rows when memory is short.

        Returns:
            Row groups that cannot decode yet: one of their rows lacks room, and the row to preempt is in flight.
        """
        short_groups: set[int] = set()
        for seq in sorted(self.layout.rows(), key=lambda s: s.number):
            while seq.slot >= 0 and not self.admission.make_room(seq):
                if self.n_running == 1:
                    raise AssertionError(f"one row of {len(seq.tokens)} tokens exceeds the KV budget")
                row = victim(self.layout.rows(), self.layout.rows_by_owner())
                if row.in_flight:
                    short_groups.add(self.layout.arenas[seq.arena].group)
                    break
                self._preempt(row)
        return short_groups

    def _preempt(self, seq: Sequence) -> None:
        """Free a row. The sequence keeps its known tokens, which will be computed again."""
        self.counters.preemptions += 1
        self.layout.release(seq)
        self.waiting.put_first(seq)

    def _admit(self, now: float, held: Collection[int]) -> None:
        """Give rows to waiting sequences, in turns between owners. Further choices of a request wait until the first
        has prefilled the prompt."""
        if not self.waiting:
            return
        rows = self.layout.rows_by_owner()
        for seq in self.waiting.by_turns(rows):
            if self.n_running >= self.config.limits.max_num_seqs and rows[seq.request.owner]:
                return  # all rows are taken, and every waiting owner has one
            if seq.number in held or self._must_wait(seq, now):
                continue
            while not self.admission.admit(seq):
                if not self._preempt_for(seq, rows):
                    return
            self.waiting.remove(seq)
            rows[seq.request.owner] += 1
            if seq.first_scheduled is None:
                seq.first_scheduled = now
            self._reuse_prefix(seq)
            if seq.to_prefill == 0:
                self.layout.promote(seq)

    def _preempt_for(self, seq: Sequence, rows: Counter[str]) -> bool:
        """For an owner without a row: preempt a row of the owner with the most. False if `seq`'s owner has a row, if no
        owner has two, or if the row is in flight."""
        if rows[seq.request.owner] or not any(count > 1 for count in rows.values()):
            return False
        row = victim(self.layout.rows(), rows)
        if row.in_flight:
            return False
        rows[row.request.owner] -= 1
        self._keep_prefix(row)  # in the prefix cache's memory, so that little is recomputed
        self._preempt(row)
        return True

    def _must_wait(self, seq: Sequence, now: float) -> bool:
        """Whether to wait for a prefix that is being computed by another choice or loaded from disk."""
        if not self.config.recurrent and sibling_prefills(self.layout.rows(), seq):
            return True
        cached = self._copies.find(seq)[0] if self.disk.may_look_up(seq) else 0
        return not seq.wants_scores and self.disk.waits(seq, cached, self.prefill_budget.speed, now)

    def _reuse_prefix(self, seq: Sequence) -> None:
        """Start from the longest computed prefix."""
        if seq.wants_scores or self.config.prefix_budget == 0:
            return
        self._copies.begin(seq)
        if seq.first_token is None:
            seq.is_loaded = isinstance(seq.prefix, Hit) and seq.prefix.entry == seq.load
            seq.cached_tokens = seq.disk_tokens = 0
            self.counters.prefix_queries += seq.prompt_len

    def _copy_prefixes(self) -> None:
        """Copy prefixes of new rows: at once, or beside decoding rows as much as a step of theirs allows."""
        decoding = any(arena.n_decoding for arena in self.layout.arenas)
        max_bytes = self.prefill_budget.copied_bytes if decoding else math.inf
        for row in self._copies.plan(max_bytes / max(1, self.config.limits.bytes_per_token)):
            if row.to_prefill == 0:
                self.layout.promote(row)
            if row.first_token is None:  # only now: a prefix may be dropped while it is copied
                row.cached_tokens = min(row.kv_len, row.prompt_len)
                row.disk_tokens = row.cached_tokens if row.is_loaded else 0
                self.counters.prefix_hits += row.cached_tokens
                self.counters.disk_hits += row.disk_tokens

    def _plan_chunks(self, decoding: int) -> dict[int, int]:
        """Sequence number -> tokens to prefill, in a step that feeds `decoding` tokens to decoding rows."""
        rows = [row for row in self.layout.prefilling() if row.prefix is None]
        return share_out(self.prefill_budget.tokens(decoding), rows, max_scored=self.config.max_logits)

    def _prefill_forwards(self, chunks: dict[int, int]) -> list[Forward]:
        """The chunks as forwards. A row that finishes its prompt decodes in the same step."""
        rows = [row for row in self.layout.rows() if row.number in chunks]
        for row in rows:
            if chunks[row.number] == row.to_prefill != row.checkpoint - row.kv_len:
                self.layout.promote(row)
        return prefill_forwards(self.layout, rows, chunks, pad=not self.config.recurrent)

    def _decode_forwards(self, group: int | None, drafts: Drafts) -> list[Forward]:
        """Sampling forwards for the decoding rows of each arena of a row group."""
        if group is None:
            return []
        self._decoded = group
        self.counters.decode_steps += 1
        alone, pack_above = self.config.recurrent, self.config.pack_above
        return [
            forward
            for arena in self.layout.group(group)
            for forward in decode_forwards(arena, drafts, fresh_alone=alone, pack_above=pack_above)
        ]

    def _put_in_flight(self, forwards: Collection[Forward]) -> None:
        """Mark the forwards as in flight. A chunk's outcome is certain, so it is committed at once, or with the token
        that the same step samples for its row."""
        sampled = {number for forward in forwards if forward.sample for number in forward.seqs}
        for forward in forwards:
            for number, valid in zip(forward.seqs, forward.valid, strict=True):
                seq = self.by_number[number]
                if forward.sample:
                    seq.in_flight = valid
                    continue
                if number not in sampled:
                    self._commits.append(commit_chunk(seq, seq.kv_len, valid))
                seq.kv_len += valid
                self.counters.prefill_tokens += valid
