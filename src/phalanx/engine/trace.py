"""A trace of one engine: every message from the server, every plan and what it cost, as lines of JSON (design: Proof).

With the same model, messages and steps in the same order give the same run.
"""

from __future__ import annotations

import gc
import logging
import resource
import time
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from phalanx.engine.step_timer import Phase, StepTimer
from phalanx.errors import ConfigError
from phalanx.sched.plan import Plan
from phalanx.types import ToEngine

log = logging.getLogger("phalanx.engine")


class StepCost(Struct, frozen=True):
    """What the leader's process spent on a step. The three counts include what happened since the step before."""

    id: int
    at: float  # end of the step, on the monotonic clock
    seconds: float
    phases_s: dict[Phase, float]
    prefill_s: float
    page_faults: int  # without input or output: mostly memory that was touched for the first time
    interruptions: int  # times that the system gave the processor to another process
    collections: int  # full ones of Python's garbage collector


class Trace:
    """Appends to a file, unbuffered, so that a crash loses no line. A full disk ends the trace, not the engine."""

    def __init__(self, path: str) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self._file: IO[bytes] | None = Path(path).open("ab", buffering=0)  # noqa: SIM115 (open for the process's life)
        except OSError as error:
            raise ConfigError(
                f"--trace {path} cannot be written: {error.strerror}.", remedy="Name a file that this user may write."
            ) from error
        self._encoder = msgspec.json.Encoder()
        self._counted = _counts()

    def message(self, message: ToEngine) -> None:
        """Write a message that the leader has taken from the server."""
        self._line({"message": message})

    def plan(self, plan: Plan) -> None:
        """Write a plan that the leader is about to broadcast."""
        self._line({"plan": plan})

    def cost(self, step_id: int, timer: StepTimer, prefill_s: float) -> None:
        """Write what a step cost, at its end."""
        before, self._counted = self._counted, _counts()
        counts = [now - then for now, then in zip(self._counted, before, strict=True)]
        self._line({"cost": StepCost(step_id, time.monotonic(), timer.elapsed_s, timer.phases_s, prefill_s, *counts)})

    def _line(self, value: object) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(value) + b"\n")
        except OSError as error:
            log.error("--trace %s ends here: %s", self._file.name, error.strerror)
            self._file.close()
            self._file = None


def _counts() -> tuple[int, int, int]:
    """Page faults, interruptions and full collections of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_nivcsw, gc.get_stats()[2]["collections"]
