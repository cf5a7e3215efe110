"""The sampling metadata of each sequence, kept between steps so that a history is extended by new tokens only."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from phalanx.model.sampling.metadata import SamplingMetadata, TokenBiases, TokenCounts
from phalanx.sched.sequence import Sequence


class SamplingMetadataCache:
    """The sampling metadata of running sequences, by number; made when a sequence is first asked for."""

    def __init__(self) -> None:
        self._next: dict[int, SamplingMetadata] = {}

    def next(self, seq: Sequence) -> SamplingMetadata:
        """Metadata of the token after the last known one. A later call changes the same object."""
        if (position := self._next.get(seq.number)) is None:
            history = TokenCounts(seq.request.prompt, [])
            biases = TokenBiases(seq.request.sampling.logit_bias)
            position = SamplingMetadata(sampling=seq.request.sampling, index=0, history=history, biases=biases)
            self._next[seq.number] = position
        position.history.add(seq.tokens[seq.prompt_len + position.index :])
        position.index = seq.n_output
        position.banned = _banned(seq, position.index)
        position.allowed = None
        return position

    def behind(self, seq: Sequence, drafts: Seq[int]) -> list[SamplingMetadata]:
        """Metadata of the tokens after y and after each draft, as if the drafts before were output: [k + 1]."""
        first = self.next(seq)
        return [first, *(_after(seq, first, tuple(drafts[: i + 1])) for i in range(len(drafts)))]

    def after(self, seq: Sequence, drafts: Seq[int]) -> SamplingMetadata:
        """Metadata of the token after the last of these drafts."""
        return _after(seq, self.next(seq), tuple(drafts))

    def keep(self, alive: Collection[int]) -> None:
        """Forget all other sequences."""
        if len(self._next) > len(alive):
            self._next = {number: position for number, position in self._next.items() if number in alive}


def _after(seq: Sequence, first: SamplingMetadata, drafts: tuple[int, ...]) -> SamplingMetadata:
    index = first.index + len(drafts)
    banned = _banned(seq, index)
    return SamplingMetadata(first.sampling, index, first.history, banned, drafts, biases=first.biases)


def _banned(seq: Sequence, index: int) -> frozenset[int]:
    return seq.request.stop.stop_ids if index < seq.request.stop.min_tokens else frozenset()
