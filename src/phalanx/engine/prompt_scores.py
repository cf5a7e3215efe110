"""Log-probabilities of prompt tokens (`prompt_logprobs`), collected over the chunks of a prompt."""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx

from phalanx.engine.execute import ForwardOutput
from phalanx.model.sampling.sampler import score
from phalanx.sched.sequence import Sequence
from phalanx.types import PromptScored, SequenceRequest, TokenLogprobs


class PromptScores:
    """Scores by sequence number, until a prompt is complete."""

    def __init__(self) -> None:
        self._scores: dict[int, list[TokenLogprobs | None]] = {}
        self._complete: list[PromptScored] = []

    def begin(self, request: SequenceRequest) -> None:
        """Register a request. A prompt of one token has nothing to score, so it is complete at once."""
        if request.prompt_logprobs is not None and len(request.prompt) == 1:
            self._complete.append(PromptScored(request.id, [None]))

    def add(self, seq: Sequence, output: ForwardOutput[mx.array]) -> None:
        """Score the prompt tokens that follow the fed ones, except those that were scored before a preemption.

        Args:
            output: of a forward that scores, which has one row.

        Raises:
            NonFiniteLogits: as `score`.
        """
        (start,), (valid,) = output.kv_len, output.forward.valid
        scores = self._scores.setdefault(seq.number, [None])
        known = len(scores)
        targets = seq.tokens[known : min(start + 1 + valid, seq.prompt_len)]
        if not targets:
            return
        first = known - 1 - start  # place of the fed token before the first target
        top = seq.request.prompt_logprobs or 0
        scores.extend(score(output.logits[0, first : first + len(targets)], targets, top))
        if len(scores) == seq.prompt_len:
            self._complete.append(PromptScored(seq.id, scores))

    def take_events(self) -> list[PromptScored]:
        """Prompts completed since the last call."""
        events, self._complete = self._complete, []
        return events

    def keep(self, alive: Collection[int]) -> None:
        """Forget all sequences but these."""
        for number in [number for number in self._scores if number not in alive]:
            del self._scores[number]
