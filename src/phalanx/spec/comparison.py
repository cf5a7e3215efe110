"""Measures the speed of decoding with and without drafts, in alternation on the same sequences.

Other programs on the machine slow it down by some per cent for seconds at a time, but hardly from one step to the next.
So runs of a few steps with drafts alternate with equal runs without, in a pseudo-random order.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection


class Comparison:
    """Decides which steps may have drafts, and times both kinds, each step up to the beginning of the next."""

    def __init__(self, steps: int) -> None:
        self.totals = {True: (0, 0.0), False: (0, 0.0)}  # may have drafts -> tokens and seconds of these steps
        self._run = steps  # of one kind, >= 1
        self._step = 0
        self._rows: Collection[int] = ()
        self._began = 0.0
        self._tokens: int | None = None  # of the step that is over, if it counts

    def begin(self, rows: Collection[int], now: float) -> bool:
        """A step of these sequences begins. Returns whether it may have drafts (always, if there are no sequences). The
        previous step counts only if its sequences were the same. Changes state."""
        if rows and rows == self._rows and self._tokens is not None:
            kind = self._may_draft(self._step)
            tokens, seconds = self.totals[kind]
            self.totals[kind] = tokens + self._tokens, seconds + now - self._began
        self._rows, self._began, self._tokens = rows, now, None
        self._step += bool(rows)
        return not rows or self._may_draft(self._step)

    def end(self, tokens: int) -> None:
        """The step committed `tokens` tokens. Call it only for steps that did nothing but decode: a prefill chunk or a
        growing buffer takes as long as many steps and would count for one side by chance. Changes state."""
        self._tokens = tokens

    @property
    def next_may_draft(self) -> bool:
        """Whether the next step may have drafts."""
        return self._may_draft(self._step + 1)

    def _may_draft(self, step: int) -> bool:
        run = step // self._run
        return bool((run + zlib.crc32(str(run // 2).encode())) % 2)
