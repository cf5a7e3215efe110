"""Where each sequence samples next, kept from step to step so that histories grow by their new tokens only. Does not
know logits, plans or drafters."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from phalanx.model.sampling.metadata import SamplingMetadata, TokenCounts
from phalanx.sched.sequence import Sequence


class SamplingMetadataCache:
    """By sequence number. A sequence is met when it is first asked for."""

    def __init__(self) -> None:
        self._next: dict[int, SamplingMetadata] = {}

    def next(self, seq: Sequence) -> SamplingMetadata:
        """Where the token after the last known one is drawn. The same object is changed by a later call."""
        if (position := self._next.get(seq.number)) is None:
            history = TokenCounts(seq.request.prompt, [])
            position = SamplingMetadata(sampling=seq.request.sampling, index=0, history=history)
            self._next[seq.number] = position
        position.history.add(seq.tokens[seq.prompt_len + position.index :])
        position.index = seq.n_output
        position.banned = _banned(seq, position.index)
        return position

    def behind(self, seq: Sequence, drafts: Seq[int]) -> list[SamplingMetadata]:
        """Where the tokens behind y and behind each draft are drawn, as if the drafts before were output: [k + 1]."""
        first = self.next(seq)
        return [first, *(_after(seq, first, tuple(drafts[: i + 1])) for i in range(len(drafts)))]

    def after(self, seq: Sequence, drafts: Seq[int]) -> SamplingMetadata:
        """Where the token behind the last of these drafts is drawn."""
        return _after(seq, self.next(seq), tuple(drafts))

    def keep(self, alive: Collection[int]) -> None:
        """Forget all others."""
        if len(self._next) > len(alive):
            self._next = {number: position for number, position in self._next.items() if number in alive}


def _after(seq: Sequence, first: SamplingMetadata, drafts: tuple[int, ...]) -> SamplingMetadata:
    index = first.index + len(drafts)
    return SamplingMetadata(first.sampling, index, first.history, _banned(seq, index), drafts)


def _banned(seq: Sequence, index: int) -> frozenset[int]:
    return seq.request.stop.stop_ids if index < seq.request.stop.min_tokens else frozenset()
