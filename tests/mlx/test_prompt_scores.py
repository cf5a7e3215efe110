"""A prompt's log-probabilities are complete once and in order, whatever chunks compute them, and however often."""

from __future__ import annotations

import mlx.core as mx
import pytest

from phalanx.engine.execute import ForwardOutput
from phalanx.engine.prompt_scores import PromptScores
from phalanx.sched.plan import Forward
from phalanx.sched.sequence import Sequence
from phalanx.types import PromptScored, Sampling, SequenceRequest, StopRule

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LOGITS = mx.random.normal((len(PROMPT), 12), key=mx.random.key(1))


def scored(*chunks: tuple[int, int]) -> list[PromptScored]:
    """Events after chunks of (first position, tokens)."""
    request = SequenceRequest(
        id="a", group="a", prompt=PROMPT, sampling=Sampling(), stop=StopRule(max_tokens=9), committed=[7, 7],
        prompt_logprobs=2,
    )  # fmt: skip
    seq, scores, events = Sequence(0, request, 0.0), PromptScores(), []
    for start, n in chunks:
        fed = tuple(seq.tokens[start : start + n])
        forward = Forward(0, 0, (0,), (fed,), (n,), sample=False, score=True)
        logits = mx.concatenate([LOGITS, LOGITS])[None, start : start + n]
        scores.add(seq, ForwardOutput(forward, [start], logits))
        events += scores.take_events()
    return events


def test_each_position_is_scored_by_the_logits_before_it():
    (event,) = scored((0, 9))
    wanted = LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True)
    assert event.logprobs[0] is None and len(event.logprobs) == len(PROMPT)
    for i, entry in enumerate(event.logprobs[1:]):
        assert entry is not None and entry.token == PROMPT[i + 1]
        assert entry.logprob == pytest.approx(wanted[i, PROMPT[i + 1]].item(), abs=1e-5)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 4), (4, 5)],
        [(0, 4), (4, 7)],  # beyond the prompt, over tokens of before a restart of the engine
        [(0, 6), (0, 4), (4, 5)],  # the row was preempted, and its prompt is computed again
        [(0, 6), (0, 6), (6, 3)],
        [(0, 9), (0, 4), (4, 5)],
    ],
)
def test_any_chunks_give_the_same_once(chunks: list[tuple[int, int]]):
    assert scored(*chunks) == scored((0, 9))
