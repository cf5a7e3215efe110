"""The scheduler decides what runs next; no other file does.

`schedule(now, drafts)` turns the state of all sequences into one `Step`, every rank executes the step, and
`apply(commits)` takes its outcome back in. Pure: no MLX, no I/O, no clock (`now` is an argument); the same calls give
the same plans. What clients ask for (`submit`, `cancel`, `finish`) changes state and takes effect in the next plan.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from phalanx.sched.admission import Admission, KvLimits
from phalanx.sched.arena import Layout
from phalanx.sched.drafts import Drafts, fit_drafts, useful_drafts
from phalanx.sched.forwards import decode_forwards, prefill_forwards
from phalanx.sched.plan import Commit, Evict, Forward, Restore, Share, Step, Store
from phalanx.sched.prefill_budget import SMALLEST_CHUNK, PrefillBudget
from phalanx.sched.prefix import BLOCK, PrefixIndex, common_prefix
from phalanx.sched.sequence import Sequence, extend_crc
from phalanx.types import Finished, FinishReason, SequenceRequest, TokenLogprobs, Tokens


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Constants of one engine."""

    limits: KvLimits
    max_num_batched_tokens: int
    target_step_s: float
    prefix_budget: int  # bytes
    recurrent: bool = False  # rows hold recurrent state: no padding, a fresh row alone, prefixes whole
    first_chunk: int = SMALLEST_CHUNK  # prompt tokens of the first step; see `PrefillBudget`
    largest_logits: int = 256  # tokens with logits in one step: of a chunk that is scored, of all rows with drafts
    pack_above: int | None = None
    """Sampling forwards of more tokens (rows x widest row) are fed without padding: smaller ones are replayed from
    captured graphs, which packed ones are not. None: some rank cannot leave padding out."""


class Counters(Struct):
    """Cumulative counts, for `EngineStats`."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0


def state_digest(rows: Iterable[tuple[int, int, int, int, int]]) -> int:
    """CRC-32 over (arena, slot, seq, kv_len, crc of committed tokens) of every row, in slot order."""
    return zlib.crc32(array("q", [value for row in rows for value in row]).tobytes())


def limit_length(request: SequenceRequest, room: int) -> SequenceRequest:
    """The request with `max_tokens` limited to what the context leaves."""
    if request.stop.max_tokens <= room:
        return request
    stop = msgspec.structs.replace(request.stop, max_tokens=max(1, room))
    return msgspec.structs.replace(request, stop=stop)


class Scheduler:
    """The leader's policy and state. Used from one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.layout = Layout(config.limits.n_arenas)
        self.admission = Admission(config.limits, self.layout)
        self.prefix = PrefixIndex(
            config.prefix_budget,
            config.limits.bytes_per_token,
            config.limits.bytes_per_row,
            exact_only=config.recurrent,
        )
        self.prefill_budget = PrefillBudget(config.first_chunk, config.max_num_batched_tokens, config.target_step_s)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.by_id: dict[str, Sequence] = {}
        self.by_number: dict[int, Sequence] = {}
        self.step_id = 0
        self._numbers = 0
        self._commits: list[Commit] = []  # of the last step, carried by the next
        self._events: list[Tokens | Finished] = []

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: SequenceRequest, now: float) -> None:
        """Queue a sequence. One that cannot run ends at once, with an event that says why."""
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
            self._end(seq, "error", now, detail=detail)
        elif seq.n_output >= seq.request.stop.max_tokens:
            self._end(seq, "length", now)

    def cancel(self, seq_id: str, now: float) -> None:
        """End a sequence, waiting or running; its computed prefix may be kept."""
        seq = self.by_id.get(seq_id)
        if seq is not None:
            self._end(seq, "cancelled", now)

    def finish(self, seq_id: str, n_tokens: int, now: float) -> None:
        """The server found a stop string: the sequence ends with its first `n_tokens` output tokens."""
        seq = self.by_id.get(seq_id)
        if seq is None:
            return
        del seq.tokens[seq.prompt_len + n_tokens :]
        rolled_back = seq.kv_len > len(seq.tokens)
        seq.kv_len = min(seq.kv_len, len(seq.tokens))
        self._end(seq, "stop", now, keep=not (rolled_back and self.config.recurrent))

    def reset_prefix_cache(self) -> None:
        """Drop every kept prefix."""
        self.layout.ops.extend(Evict(number) for number in self.prefix.clear())

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to tell the ranks."""
        return not self.by_id and not self.layout.ops and not self._commits

    @property
    def n_running(self) -> int:
        """Sequences that hold a slot."""
        return sum(len(arena.rows) for arena in self.layout.arenas)

    def take_events(self) -> list[Tokens | Finished]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- one step ----------------------------------------------------------------------------------------------

    def draftable(self) -> dict[Sequence, int]:
        """Decoding rows, and how many drafts are of use to each. Rows that finish their prompt in the next step are not
        among them yet."""
        if self.config.recurrent:
            return {}
        rows = (row for arena in self.layout.arenas for row in arena.rows[: arena.n_decoding])
        return {row: useful_drafts(row) for row in rows}

    def schedule(self, now: float, drafts: Drafts = MappingProxyType({})) -> Step | None:
        """The next step, or None when there is nothing to do. Changes state.

        Args:
            drafts: tokens that may follow in decoding rows (`draftable`); cut to what fits, or left out.
        """
        assert not (drafts and self.config.recurrent), "recurrent state cannot roll back (A3)"
        self._expire(now)
        self._grow()
        self._admit(now)
        self.layout.free_empty()
        most = min(self.config.max_num_batched_tokens, self.config.largest_logits)
        fitted = fit_drafts(self.layout, self.admission, drafts, most)
        chunks = self._plan_chunks(fitted)
        forwards = [*self._prefill_forwards(chunks), *self._decode_forwards(fitted)]
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
        return step

    def apply(
        self, commits: list[Commit], now: float, logprobs: Mapping[int, list[TokenLogprobs]] = MappingProxyType({})
    ) -> None:
        """Take the outcome of a step: the commits go to clients as events now, and to the ranks with the next plan.

        Args:
            logprobs: by sequence number, one entry per verified token, where the request asked for them.
        """
        for commit in commits:
            seq = self.by_number[commit.seq]
            computed = commit.kv_len - seq.kv_len
            seq.kv_len = commit.kv_len
            self._commits.append(commit)
            self.counters.prefill_tokens += computed - len(commit.tokens)
            if commit.tokens:
                self._commit_output(seq, commit, now, logprobs.get(seq.number))

    def digest(self) -> int:
        """The leader's row state, to be compared with every rank's mirror."""
        return state_digest((r.arena, r.slot, r.number, r.kv_len, r.crc) for r in self.layout.rows())

    # -- parts of apply ----------------------------------------------------------------------------------------

    def _commit_output(self, seq: Sequence, commit: Commit, now: float, logprobs: list[TokenLogprobs] | None) -> None:
        kept = None if logprobs is None else logprobs[: len(commit.tokens)]
        start = seq.n_output
        seq.drafted += commit.computed - len(seq.tokens)
        seq.accepted += len(commit.tokens) - 1
        seq.tokens.extend(commit.tokens)
        seq.crc = extend_crc(seq.crc, commit.tokens)
        seq.last_token = now
        if seq.first_token is None:
            seq.first_token = now
        self.counters.generated_tokens += len(commit.tokens)
        self._events.append(Tokens(id=seq.id, start=start, tokens=list(commit.tokens), logprobs=kept))
        if commit.finish is not None:
            self._end(seq, commit.finish, now, stop_id=commit.stop_id)

    def _end(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        *,
        detail: str = "",
        stop_id: int | None = None,
        keep: bool = True,
    ) -> None:
        """End the sequence: keep its prefix, free its row, tell the client."""
        del self.by_id[seq.id]
        del self.by_number[seq.number]
        if seq.slot >= 0:
            if keep:
                self._keep_prefix(seq)
            self.layout.release(seq)
        else:
            self.waiting.remove(seq)
        self._events.append(
            Finished(
                id=seq.id,
                reason=reason,
                n_tokens=seq.n_output,
                cached_tokens=seq.cached_tokens,
                drafted_tokens=seq.drafted,
                accepted_tokens=seq.accepted,
                timing=seq.timing(now),
                detail=detail,
                stop_id=stop_id,
            )
        )

    def _keep_prefix(self, seq: Sequence) -> None:
        kept = seq.kv_len
        entry, evicted = self.prefix.add(seq.request.cache_salt, seq.tokens[:kept])
        self.layout.ops.extend(Evict(number) for number in evicted)
        if entry is not None:
            self.layout.ops.append(Store(seq.arena, seq.slot, entry, kept))

    # -- parts of schedule -------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        late = [s for s in self.by_id.values() if s.deadline is not None and now >= s.deadline]
        for seq in late:
            self._end(seq, "timeout", now, detail=f"The request's timeout of {seq.request.timeout_s:g} s passed.")

    def _grow(self) -> None:
        """Every row gets room for its known tokens; the newest rows are preempted when memory is short."""
        for seq in sorted(self.layout.rows(), key=lambda s: s.number):
            while seq.slot >= 0 and not self._make_room(seq):
                victim = max(self.layout.rows(), key=lambda s: s.number)
                if victim is seq and self.n_running == 1:
                    raise AssertionError(f"one row of {len(seq.tokens)} tokens exceeds the KV budget")
                self._preempt(victim)

    def _make_room(self, seq: Sequence) -> bool:
        """Room for the row's known tokens, where need be in the arena of longer rows; False when memory is short."""
        need = len(seq.tokens)
        arena = self.layout.arenas[seq.arena]
        target = self.admission.arena_for(need)
        if target is arena or target.index < arena.index:
            return self.admission.reserve(arena, len(arena.rows), need)
        if not self.admission.reserve(target, len(target.rows) + 1, need):
            return False
        self.layout.transfer(seq, target)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Free a row; its known tokens do not change and will be computed again."""
        self.counters.preemptions += 1
        self.layout.release(seq)
        self.waiting.appendleft(seq)

    def _admit(self, now: float) -> None:
        """First come, first served. Choices of one request wait until the first of them has prefilled the prompt."""
        held: list[Sequence] = []
        while self.waiting and self.n_running < self.config.limits.max_num_seqs:
            seq = self.waiting[0]
            if self._sibling_prefills(seq):
                held.append(self.waiting.popleft())
                continue
            need = len(seq.tokens) + 1
            arena = self.admission.arena_for(need)
            if not self.admission.reserve(arena, len(arena.rows) + 1, need):
                break
            self.waiting.popleft()
            self.layout.admit(seq, arena)
            if seq.first_scheduled is None:
                seq.first_scheduled = now
            self._reuse_prefix(seq)
            if seq.to_prefill == 0:
                self.layout.promote(seq)
        self.waiting.extendleft(reversed(held))

    def _sibling_prefills(self, seq: Sequence) -> bool:
        """Whether another choice of the same request is prefilling the prompt, which this one can then share."""
        if seq.request.sampling.choice == 0 or seq.prompt_len <= BLOCK or seq.wants_scores or self.config.recurrent:
            return False
        return any(
            row.request.group == seq.request.group and row.request.prompt == seq.request.prompt and not row.decoding
            for row in self.layout.rows()
        )

    def _reuse_prefix(self, seq: Sequence) -> None:
        """Start from the longest computed prefix: that of a kept entry or of another live row."""
        if seq.wants_scores or self.config.prefix_budget == 0:
            return
        limit = len(seq.tokens) - 1
        if seq.first_token is None:
            self.counters.prefix_queries += seq.prompt_len
        hit = self.prefix.find(seq.request.cache_salt, seq.tokens, limit)
        live, shared = self._live_prefix(seq, limit)
        length = 0
        if live is not None and (hit is None or shared > hit.length):
            self.layout.ops.append(Share(live.arena, live.slot, seq.arena, seq.slot, shared))
            length = shared
        elif hit is not None:
            self.layout.ops.append(Restore(seq.arena, seq.slot, hit.entry, hit.length))
            length = hit.length
        seq.kv_len = length
        if seq.first_token is None:
            seq.cached_tokens = min(length, seq.prompt_len)
            self.counters.prefix_hits += seq.cached_tokens

    def _live_prefix(self, seq: Sequence, limit: int) -> tuple[Sequence | None, int]:
        """The live row that shares the longest computed prefix, at least one block; and that prefix's length."""
        best, best_length = None, BLOCK - 1
        for row in self.layout.rows():
            if row is seq or row.request.cache_salt != seq.request.cache_salt:
                continue
            if self.config.recurrent and row.kv_len > limit:
                continue
            length = common_prefix(row.tokens, seq.tokens, min(row.kv_len, limit))
            if length > best_length and (not self.config.recurrent or length == row.kv_len):
                best, best_length = row, length
        return best, best_length

    def _plan_chunks(self, drafts: Drafts) -> dict[int, int]:
        """How many tokens each prefilling row computes in this step: sequence number -> tokens.

        The prefill budget goes in equal shares to the rows, those with the least left first, so that a short prompt
        beside a long one is answered soon and the long one still advances.
        """
        rows = [row for row in self.layout.rows() if not row.decoding]
        decoding = self.n_running - len(rows) + sum(map(len, drafts.values()))
        left = self.prefill_budget.tokens(decoding)
        chunks: dict[int, int] = {}
        rows.sort(key=lambda row: (row.to_prefill, row.number))
        for i, row in enumerate(rows):
            share = -(-left // (len(rows) - i))
            count = min(row.to_prefill, share)
            if row.wants_scores:
                count = min(count, self.config.largest_logits)
            if count > 0:
                chunks[row.number] = count
                left -= count
        return chunks

    def _prefill_forwards(self, chunks: dict[int, int]) -> list[Forward]:
        """The chunks as forwards. A row that finishes its prompt becomes a decoding row of this same step."""
        rows = [row for row in self.layout.rows() if row.number in chunks]
        for row in rows:
            if chunks[row.number] == row.to_prefill:
                self.layout.promote(row)
        return prefill_forwards(self.layout, rows, chunks, pad=not self.config.recurrent)

    def _decode_forwards(self, drafts: Drafts) -> list[Forward]:
        """Sampling forwards for the decoding rows of each arena."""
        alone, pack_above = self.config.recurrent, self.config.pack_above
        found = [
            forward
            for arena in self.layout.arenas
            for forward in decode_forwards(arena, drafts, fresh_alone=alone, pack_above=pack_above)
        ]
        self.counters.decode_steps += bool(found)
        return found
