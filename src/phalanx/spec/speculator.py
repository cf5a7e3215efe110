"""Speculation on the leader: connects a drafter and a control, and reports committed tokens to both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from phalanx.sched.drafts import useful_drafts
from phalanx.sched.plan import Commit, Step
from phalanx.sched.sequence import Sequence
from phalanx.spec.control import Committed, Control, DraftPrefill, StepTime
from phalanx.spec.drafters import Drafter
from phalanx.spec.running_grammars import Grammars
from phalanx.spec.stats import SpecMeter


@dataclass(eq=False, slots=True)
class Speculator:
    """Drives a drafter and a control, and counts drafts.

    In steps for which the comparison wants no drafts, neither is called, so that these steps have no cost of
    drafting. Their committed tokens are reported in the next step with drafts.
    """

    _drafter: Drafter
    _control: Control
    meter: SpecMeter
    _vocab_size: int  # of the target; drafts are cut before a token outside it
    _max_rows: float = math.inf  # with more decoding rows there are no drafts
    _prefilling: Callable[[], Iterable[Sequence]] = tuple  # rows that the target prefills, and a draft model reads
    _grammars: Grammars | None = None
    _without_drafts: bool = False  # the comparison wants no drafts in this step
    _pending: list[Committed] = field(default_factory=list)  # committed tokens of such steps
    _refused: bool = False  # all rows' requests refuse drafts: the control is not called
    _followed: set[int] = field(default_factory=set)  # sequences that the drafter knows
    _overhead_s: float = 0.0  # of the control, since its last `observe`
    _read_s: float = 0.0  # time of the last `draft` that went to reading prompts
    _read: tuple[int, float] = (0, 0.0)  # tokens and seconds, since the control's last `observe`
    _skipping: Collection[int] = ()  # sequences whose steps are skipped
    _skip: int = 0  # steps left to skip
    _skipped: int = 0  # since the control's last `observe`

    @property
    def computes(self) -> bool:
        """Whether the drafter is a model."""
        return self._drafter.computes

    def can_overlap(self, numbers: Collection[int]) -> bool:
        """Whether the next step of these sequences may be dispatched without drafts, before this one is committed."""
        comparison = self.meter.comparison
        if self._skip or len(numbers) > self._max_rows or not (comparison is None or comparison.next_may_draft):
            return True
        self._overhead_s -= time.perf_counter()
        can_overlap = self._control.can_overlap(numbers)
        self._overhead_s += time.perf_counter()
        return can_overlap

    def draft(self, draftable: Mapping[Sequence, int], *, overlapped: bool) -> dict[int, list[int]]:
        """Drafts for decoding rows: sequence number -> at least one token; rows without drafts are absent.

        Args:
            draftable: decoding row -> how many drafts are of use to it.
            overlapped: the step was dispatched without drafts; lookups are only compared with its tokens.
        """
        self._read_s = 0.0
        self._refused = bool(draftable) and all(seq.request.max_drafts == 0 for seq in draftable)
        if self.meter.comparison is not None:
            rows = () if self._refused else {seq.number for seq in draftable}
            self._without_drafts = not self.meter.comparison.begin(rows, time.perf_counter())
        if self._without_drafts:
            return {}
        self._observe_pending()
        if self._skip and not self._refused:
            same = self._skipping == {seq.number for seq in draftable}
            if same and (overlapped or self._grammars is None or not self._grammars.forces(self._skipping)):
                return {}
            self._skip = 0
        for seq in draftable:
            self._follow(seq)
        if self._refused:
            return {}
        crowded = len(draftable) > self._max_rows
        useful = {seq.number: 0 if crowded else n for seq, n in draftable.items()}
        unread = self._unread(useful) if self.computes else {}
        room = {number: 0 if number in unread else n for number, n in useful.items()}
        asked = self._control.request(room, unread, overlapped=overlapped)
        self._read_prompts({number: n for number, n in asked.items() if number in unread})
        wanted = {number: n for number, n in asked.items() if number not in unread}
        drafts = self._drafter.draft(wanted) if wanted else {}
        known = {number: cut for number, draft in drafts.items() if (cut := draft.within(self._vocab_size)).tokens}
        if self._grammars is not None:
            known = self._grammars.constrain(known, useful, force=not overlapped)
        chosen = self._control.choose(known) if known else {}
        return {number: known[number].tokens[:k] for number, k in chosen.items()}

    def observe(
        self, step: Step, verified: Committed, commits: Seq[Commit], seconds: float | None, drafting_s: float
    ) -> None:
        """A step is over.

        Args:
            verified: sequence number -> accepted drafts and the token after them.
            seconds: its duration without prefill; None if it captured a graph, and is not comparable.
            drafting_s: the part of `seconds` in `draft`.
        """
        if not verified:
            return
        fed = {n: valid - 1 for f in step.forwards if f.sample for n, valid in zip(f.seqs, f.valid, strict=True)}
        drafted = {number: k for number, k in fed.items() if k}
        self.meter.count((k, max(0, len(verified[number]) - 1)) for number, k in drafted.items())
        committed = {commit.seq: commit.tokens for commit in commits if commit.tokens}
        if self.meter.comparison is not None and not step.ops and all(f.sample for f in step.forwards):
            self.meter.comparison.end(sum(map(len, committed.values())))
        if self._without_drafts:
            self._pending.append(committed)
            return
        before = time.perf_counter()
        self._extend(committed)
        if self._skip and not self._refused:
            self._skip, self._skipped = self._skip - 1, self._skipped + 1
        elif not self._refused:
            usual = None if step.ops or seconds is None else seconds - self._read_s
            took = StepTime(usual, drafting_s - self._read_s, self._overhead_s, *self._read, self._skipped)
            self._skip, self._skipping = self._control.observe(committed, drafted, took), committed.keys()
            self._overhead_s, self._read, self._skipped = time.perf_counter() - before, (0, 0.0), 0

    def keep(self, alive: Collection[int]) -> None:
        """Forget all other sequences."""
        for number in self._followed.difference(alive):
            self._followed.remove(number)
            self._drafter.end(number)
            self._control.end(number)

    def _follow(self, seq: Sequence) -> None:
        if seq.number not in self._followed:
            self._followed.add(seq.number)
            self._drafter.begin(seq.number, seq.tokens, seq.request.sharing)

    def _extend(self, committed: Committed) -> None:
        for number in committed.keys() & self._followed:
            self._drafter.extend(number, committed[number])

    def _observe_pending(self) -> None:
        """Report the committed tokens of steps without drafts to drafter and control."""
        for committed in self._pending:
            followed = {number: tokens for number, tokens in committed.items() if number in self._followed}
            if followed:
                self._extend(followed)
                self._control.observe(followed, {}, None)
        self._pending.clear()

    def _unread(self, room: Mapping[int, int]) -> dict[int, DraftPrefill]:
        """Sequences that a draft model has to read first: decoding ones, and those that the target prefills."""
        useful = {number: n for number, n in room.items() if n > 0}
        for seq in self._prefilling():
            if (n := useful_drafts(seq)) > 0:
                self._follow(seq)
                useful[seq.number] = n
        return {number: DraftPrefill(tokens, useful[number]) for number, tokens in self._drafter.unread(useful).items()}

    def _read_prompts(self, reads: Mapping[int, int]) -> None:
        before = time.perf_counter()
        tokens = self._drafter.read(reads) if reads else 0
        self._read_s = time.perf_counter() - before if reads else 0.0
        self._read = (self._read[0] + tokens, self._read[1] + self._read_s)
