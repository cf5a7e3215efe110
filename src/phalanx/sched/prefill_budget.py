"""The prefill budget (chunked prefill): prompt tokens per step, adapted to the measured speed of earlier steps.

After a chunk that delayed decoding rows, these first get decoding time in proportion to the delay, which includes that
their own step is slower behind a chunk. Also the bounds on a CPU and on a GPU, and how rows share the budget. Times are
arguments.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from phalanx.sched.sequence import Sequence

MIN_CHUNK = 16  # prompt tokens per step at least, however slow the machine
PREFILL_ONLY = 4  # times the target time, for a step without decoding rows: wide products are faster per token
BESIDE_S = 0.1  # target of a chunk beside decoding rows on a CPU, unless their own step takes longer
RECENT = 8  # decode steps; the fastest counts, because those after a chunk or a buffer move are slower
BESIDE_STEPS = 2.0  # times the rows' own step: a longer chunk would show in their streams
COPY_SPEED = 1 << 30  # bytes per second at which a CPU copies to memory that was not touched before


class PrefillBounds(NamedTuple):
    """Bounds of the budget."""

    first: int = MIN_CHUNK
    """Prompt tokens of the first step; the budget at most doubles from step to step."""
    max_tokens: int = 512
    """Tokens per step, including those of decoding rows."""
    longest_s: float = math.inf
    """Longest planned prefill part of a step, whatever the target."""
    follows_decoding: bool = False
    """Whether a chunk beside decoding rows is also limited by the duration of their own step."""


ON_CPU = PrefillBounds(follows_decoding=True)
"""A CPU's products are as fast for 512 tokens as for more, and a first chunk must not take minutes."""
STAGED_CHUNK = 128
"""Tokens of a step on CPUs with stages. Every stage but one is idle while a prompt's first and last chunks pass, so
chunks are short; at 64 tokens the products themselves are slower."""
ON_GPU = PrefillBounds(first=256, max_tokens=2048, longest_s=2.0)
"""With fewer tokens a GPU is mostly idle. macOS ends GPU work of about 5 s that waits for other ranks; 2 s
leaves room for prompts that become slower the longer they are."""


def prefill_bounds(*, on_gpu: bool, stages: int, max_tokens: int | None, rows: int) -> PrefillBounds:
    """The bounds of a machine.

    Args:
        stages: of the pipeline.
        max_tokens: tokens per step, if configured.
        rows: most decoding rows, for which a step must have room.
    """
    bounds = ON_GPU if on_gpu else ON_CPU if stages == 1 else ON_CPU._replace(max_tokens=STAGED_CHUNK)
    return bounds._replace(max_tokens=max(bounds.max_tokens, rows) if max_tokens is None else max_tokens)


class PrefillBudget:
    """Adapts the budget so that the prefill part of a step takes its target time.

    Args:
        target_s: seconds that the prefill part of a step should take.
        decode_share: share of time reserved for decoding rows during prefill, below 1.
    """

    def __init__(self, bounds: PrefillBounds, target_s: float, decode_share: float) -> None:
        self._max_tokens = bounds.max_tokens
        self._longest_s = bounds.longest_s
        self._follows_decoding = bounds.follows_decoding
        self._target_s = target_s
        self._decode_per_prefill = decode_share / (1 - decode_share)  # seconds of decoding for a second of prefill
        self._owed_s = 0.0  # seconds of decoding before the next chunk
        self._decode_s = deque([math.inf], maxlen=RECENT)  # of the last steps with decoding rows
        self._speed = math.inf  # prompt tokens per second
        self._limit = min(bounds.first, bounds.max_tokens)  # beside decoding rows
        self._limit_prefill_only = self._limit

    def observe(self, tokens: int, prefill_s: float, decode_s: float) -> None:
        """Learn from a step that computed `tokens` prompt tokens. Changes state.

        The prefill part aims at the target time, or at the time of the decoding part where that is longer: on a slow
        machine prefill and decoding then share the time equally, so that neither starves. A step without decoding rows
        delays no token, only new requests, and may take longer.

        Args:
            prefill_s: duration of the prefill part; in a run of chunks without the wait for the previous stage, which
                computed the next chunk meanwhile.
            decode_s: duration of the decoding part, if its rows were delayed by the prefill part; else 0.
        """
        planned = self._limit_prefill_only
        if decode_s > 0:
            planned = self._beside()
            self._decode_s.append(decode_s)
            own_s = min(self._decode_s)
            delay_s = prefill_s + (min(decode_s - own_s, prefill_s) if tokens else 0.0)
            self._owed_s = max(0.0, self._owed_s + self._decode_per_prefill * delay_s - own_s)
        else:
            self._owed_s = 0.0  # those rows have ended
        if prefill_s <= 0 or tokens < min(MIN_CHUNK, self._limit):
            return
        speed = tokens / prefill_s
        if 2 * tokens < planned and 2 * prefill_s < self._target_s and speed < self._speed < math.inf:
            return  # the short last chunk of a prompt, mostly fixed cost: it says little about speed
        self._speed = speed
        self._limit = self._towards(speed, max(self._target_s, decode_s), self._limit)
        self._limit_prefill_only = self._towards(
            speed, max(PREFILL_ONLY * self._target_s, decode_s), self._limit_prefill_only
        )

    def tokens(self, decoding: int) -> int:
        """Prompt tokens for the next step, which also feeds `decoding` tokens to decoding rows.

        0 while they are owed time: decode steps pay it off, so prompts wait for a bounded time.
        """
        if decoding and self._owed_s > 0:
            return 0
        limit = self._beside() if decoding else self._limit_prefill_only
        return max(MIN_CHUNK, min(self._max_tokens - decoding, limit))

    @property
    def still_owes(self) -> bool:
        """Whether rows are owed time even after the decode step that runs now, so that the next has no chunk."""
        return self._owed_s > min(self._decode_s)

    @property
    def copied_bytes(self) -> float:
        """Bytes of prefixes to copy in a step with decoding rows: on a CPU as much as takes a step of theirs."""
        step_s = min(self._decode_s)
        return COPY_SPEED * step_s if self._follows_decoding and step_s < math.inf else math.inf

    @property
    def speed(self) -> float:
        """Prompt tokens per second; infinite before any was computed."""
        return self._speed

    def _beside(self) -> int:
        """The limit beside decoding rows. One slow decode step does not allow a longer chunk."""
        step_s = min(self._decode_s)
        seconds = min(max(BESIDE_S, step_s), BESIDE_STEPS * step_s)
        if not self._follows_decoding or math.inf in (seconds, self._speed):
            return self._limit
        return max(MIN_CHUNK, min(self._limit, int(self._speed * seconds)))

    def _towards(self, speed: float, seconds: float, before: int) -> int:
        """Tokens computed in this time at this speed, at most twice the previous limit."""
        wanted = int(min(speed * min(seconds, self._longest_s), self._max_tokens))
        return max(MIN_CHUNK, min(wanted, 2 * before))


def share_out(budget: int, rows: Iterable[Sequence], *, max_scored: int) -> dict[int, int]:
    """Tokens that each prefilling row computes in a step: sequence number -> tokens.

    Rows get equal shares, and those with the least left come first: a short prompt beside a long one is answered soon,
    and the long one still advances.

    Args:
        max_scored: most tokens of a row that asks for prompt log-probabilities.
    """
    chunks: dict[int, int] = {}
    ordered = sorted(rows, key=lambda row: (row.to_prefill, row.number))
    for i, row in enumerate(ordered):
        count = min(row.next_chunk, -(-budget // (len(ordered) - i)))
        if row.wants_scores:
            count = min(count, max_scored)
        if count > 0:
            chunks[row.number] = count
            budget -= count
    return chunks
