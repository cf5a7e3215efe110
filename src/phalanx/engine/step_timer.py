"""Measures the phases of steps, in seconds: of the current step, for planning, and in total, for metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["draft", "control", "model"]
"""Drafting; sending the plan to the other ranks; executing it, with sampling and evaluation."""
PHASES: tuple[Phase, ...] = ("draft", "control", "model")


class StepTimer:
    """Measures one step at a time: `start`, any number of phases, `stop`."""

    def __init__(self) -> None:
        self.steps_s = 0.0
        """Total of all steps that had a plan."""
        self.totals_s = dict.fromkeys(PHASES, 0.0)
        """The same by phase."""
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        """The current step so far, by phase."""
        self._started = 0.0

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()
        self.phases_s = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count what happens inside towards a phase."""
        before = time.perf_counter()
        yield
        self.phases_s[phase] += time.perf_counter() - before

    @property
    def elapsed_s(self) -> float:
        """Since the current step began."""
        return time.perf_counter() - self._started

    def stop(self, *, planned: bool) -> None:
        """The step is over. One without a plan had nothing to do and is not counted."""
        if planned:
            self.steps_s += self.elapsed_s
            for phase, seconds in self.phases_s.items():
                self.totals_s[phase] += seconds
