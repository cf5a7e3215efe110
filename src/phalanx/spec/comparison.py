"""How fast sequences are with drafts and without: measured in turns, on the same sequences.

A machine that is shared is some per cent slower for seconds at a time, but hardly between one step and the next. So
runs of a few steps that may have drafts take turns with as many that may not, in an order as good as chance. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection


class Comparison:
    """Says which steps may have drafts, and counts both kinds from the beginning of a step to that of the next."""

    def __init__(self, steps: int) -> None:
        self.totals = {True: (0, 0.0), False: (0, 0.0)}  # may have drafts -> tokens and seconds of these steps
        self._run = steps  # of one kind, >= 1
        self._step = 0
        self._rows: Collection[int] = ()
        self._began = 0.0
        self._tokens: int | None = None  # of the step that is over, if it counts

    def begin(self, rows: Collection[int], now: float) -> bool:
        """A step of these sequences begins; whether it may have drafts (always, where there are none). Where they are
        others than before, the step before does not count. Changes state."""
        if rows and rows == self._rows and self._tokens is not None:
            kind = self._may_draft(self._step)
            tokens, seconds = self.totals[kind]
            self.totals[kind] = tokens + self._tokens, seconds + now - self._began
        self._rows, self._began, self._tokens = rows, now, None
        if rows:
            self._step += 1
        return not rows or self._may_draft(self._step)

    def end(self, tokens: int) -> None:
        """The step committed so many tokens, and did nothing but decode: no prefill, no buffer that grows, which takes
        as long as many steps and falls to one side by chance. Not to be called of others. Changes state."""
        self._tokens = tokens

    @property
    def next_may_draft(self) -> bool:
        """Whether the next step may have drafts."""
        return self._may_draft(self._step + 1)

    def _may_draft(self, step: int) -> bool:
        run = step // self._run
        return bool((run + zlib.crc32(str(run // 2).encode())) % 2)
