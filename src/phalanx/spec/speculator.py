"""Speculation on the leader: asks the controller how much, the drafter what, and tells both what came of it.

What a drafter learns of a sequence are its commits (A2). Does not know the model's forward, nor how drafts are
verified.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

from phalanx.sched.plan import Commit, Step
from phalanx.sched.sequence import Sequence
from phalanx.spec.comparison import Comparison
from phalanx.spec.control import Control, Took
from phalanx.spec.drafters import Draft, Drafter
from phalanx.spec.stats import SpecMeter


class Speculator:
    """Drives a drafter and a controller, and counts.

    Args:
        vocab_size: of the target; a draft ends before the first token that it does not have.
        comparison: with steps that may have no drafts. They are spared all that drafting costs, and the others pay for
            it: drafter and control hear of them only there.
    """

    def __init__(
        self,
        drafter: Drafter,
        control: Control,
        meter: SpecMeter,
        vocab_size: int,
        comparison: Comparison | None = None,
    ) -> None:
        self.meter = meter
        self._drafter = drafter
        self._control = control
        self._vocab_size = vocab_size
        self._comparison = comparison
        self._plain = False  # the comparison wants no drafts in this step
        self._unheard: list[Mapping[int, Seq[int]]] = []  # what was committed in such steps
        self._followed: set[int] = set()
        self._sleepers: set[int] = set()  # during whose steps the control is not to be asked
        self._nap = 0  # steps of it that are left
        self._slept = 0
        self._telling_s = 0.0  # of the control, since it was last told
        self._reading_s = 0.0  # of the last `draft`
        self._refused = False  # all rows' requests refuse drafts: such steps are none of the control's business

    @property
    def computes(self) -> bool:
        """Whether drafting takes as long as a model does."""
        return self._drafter.computes

    def can_overlap(self, numbers: Collection[int]) -> bool:
        """Whether the next step of these sequences would hardly have drafts, nor wait for a drafter."""
        if self._nap or not (self._comparison is None or self._comparison.next_may_draft):
            return True
        before = time.perf_counter()
        rests = self._control.rests(numbers)
        self._telling_s += time.perf_counter() - before
        return rests

    def draft(self, draftable: Mapping[Sequence, int], *, overlapped: bool = False) -> dict[int, list[int]]:
        """Drafts for decoding rows.

        Args:
            draftable: decoding row -> how many drafts are of use to it.
            overlapped: the step takes none. What a lookup finds is judged by what comes all the same.

        Returns:
            Sequence number -> at least one token; rows without are absent.
        """
        self._refused = bool(draftable) and all(seq.request.most_drafts == 0 for seq in draftable)
        if self._comparison is not None:
            rows = () if self._refused else {seq.number for seq in draftable}
            self._plain = not self._comparison.begin(rows, time.perf_counter())
        if self._plain:
            return {}
        self._hear()
        if self._nap and not self._refused:
            if self._sleepers == {seq.number for seq in draftable}:
                return {}
            self._wake()
        if overlapped and self.computes and not self._refused:
            self._control.forgo({})
            return {}
        for seq in draftable:
            if seq.number not in self._followed:
                self._followed.add(seq.number)
                self._drafter.begin(seq.number, seq.tokens, seq.request.cache_salt)
        if self._refused:
            return {}
        room = {seq.number: useful for seq, useful in draftable.items()}
        unread = self._read(room)
        useful = {number: 0 if number in unread else n for number, n in room.items()}
        wanted = self._control.want(useful, bound=overlapped)
        drafts = self._drafter.draft(wanted) if wanted else {}
        known = {number: cut for number, draft in drafts.items() if (cut := self._known(draft)).tokens}
        if overlapped:
            self._control.forgo(known)
            return {}
        return {number: known[number].tokens[:k] for number, k in self._control.choose(known).items()}

    def observe(
        self,
        step: Step,
        verified: Mapping[int, Seq[int]],
        commits: Seq[Commit],
        seconds: float | None,
        drafting: float,
    ) -> None:
        """A step is over.

        Args:
            verified: sequence number -> accepted drafts and the token after them.
            seconds: what it took, without prefill; None where that says nothing about its like.
            drafting: of those, `draft`; what it read is accounted for already.
        """
        if not verified:
            return
        fed = {n: valid - 1 for f in step.forwards if f.sample for n, valid in zip(f.seqs, f.valid, strict=True)}
        drafted = {number: k for number, k in fed.items() if k}
        self.meter.count((k, len(verified[number]) - 1) for number, k in drafted.items())
        committed = {commit.seq: commit.tokens for commit in commits if commit.tokens}
        if self._comparison is not None and not step.ops and all(f.sample for f in step.forwards):
            self._comparison.end(sum(map(len, committed.values())))
        if self._plain:
            self._unheard.append(committed)
            return
        for number, tokens in committed.items():
            if number in self._followed:
                self._drafter.extend(number, tokens)
        if self._refused:
            return
        if self._nap:
            self._nap, self._slept = self._nap - 1, self._slept + 1
            if not self._nap:
                self._wake()
            return
        before = time.perf_counter()
        usual = None if step.ops or seconds is None else seconds - self._reading_s
        self._control.observe(committed, drafted, Took(usual, drafting - self._reading_s, self._telling_s))
        self._nap, self._sleepers = self._control.naps(committed.keys()), set(committed)
        self._telling_s = time.perf_counter() - before

    def _hear(self) -> None:
        """Tell drafter and control what came while there could be no drafts."""
        for committed in self._unheard:
            followed = {number: tokens for number, tokens in committed.items() if number in self._followed}
            for number, tokens in followed.items():
                self._drafter.extend(number, tokens)
            if followed and not self._nap:
                self._control.hear(followed)
        self._unheard.clear()

    def _wake(self) -> None:
        """The nap is over, or somebody else is there."""
        self._control.slept(self._sleepers, self._slept)
        self._nap = self._slept = 0

    def keep(self, alive: Collection[int]) -> None:
        """All other sequences are over."""
        over = [number for number in self._followed if number not in alive]
        if over and self._nap:
            self._wake()
        for number in over:
            self._followed.remove(number)
            self._drafter.end(number)
            self._control.end(number)

    def _read(self, room: Mapping[int, int]) -> Collection[int]:
        """Let the drafter read what is worth it; the sequences that it cannot draft for after that."""
        self._reading_s = 0.0
        useful = [number for number, n in room.items() if n > 0]
        behind = self._drafter.behind(useful)
        reads = self._control.read(room, behind) if behind else {}
        if not reads:
            return behind
        before = time.perf_counter()
        n_read = self._drafter.read(reads)
        self._reading_s = time.perf_counter() - before
        self._control.has_read(n_read, self._reading_s)
        return self._drafter.behind(useful)

    def _known(self, draft: Draft) -> Draft:
        if min(draft.tokens) >= 0 and max(draft.tokens) < self._vocab_size:
            return draft
        return draft.cut(next(i for i, token in enumerate(draft.tokens) if not 0 <= token < self._vocab_size))
