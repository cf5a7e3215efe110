"""Whether a row is finished, by token ids and counts. The only place that decides it.

Does not know stop strings: they need text, which only the server has; it sends `Finish` to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.types import FinishReason, StopRule


class Clip(NamedTuple):
    """How many verified tokens to keep, and why the row ends there (None: it continues)."""

    keep: int
    finish: FinishReason | None
    stop_id: int | None


def clip(rule: StopRule, n_output: int, tokens: Sequence[int], *, constrained: bool = False) -> Clip:
    """Cut verified tokens at the first stop id or at `max_tokens`, whichever comes first.

    A stop token counts as an output token. Before `min_tokens` a stop id does not end the row (the sampler does not
    draw it there, but a draft could contain it). With a grammar it does, because the sampler then draws it only if the
    grammar allows nothing else.

    Args:
        n_output: output tokens committed before these.
        tokens: verified tokens in order; none if the grammar left no token to draw.
        constrained: whether the request has a grammar.
    """
    for i, token in enumerate(tokens):
        n = n_output + i + 1
        if token in rule.stop_ids and (constrained or n > rule.min_tokens):
            return Clip(i + 1, "stop", token)
        if n >= rule.max_tokens:
            return Clip(i + 1, "length", None)
    return Clip(len(tokens), None, None)
