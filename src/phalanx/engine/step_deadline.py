"""The time limit of a step, from the durations of earlier steps (design: Fail-stop, then resume).

The watchdog finds by it a rank that is alive but stuck.
"""

from __future__ import annotations

from phalanx.sched.plan import Step

FACTOR = 5.0  # limit / predicted duration
UNMEASURED = 12.0  # limit / `min_s`, before any step was measured
DECAY = 0.98  # of the slowest durations, per step: so that one slow step does not count for ever


class StepDeadline:
    """Remembers the slowest recent prefill token and decode steps.

    Args:
        min_s: the shortest limit.
    """

    def __init__(self, min_s: float) -> None:
        self._min_s = min_s
        self._per_token = 0.0  # seconds
        self._decode: dict[int, float] = {}  # tokens per row -> seconds

    def observe(self, prefill_tokens: int, prefill_s: float, decode_s: float, width: int = 1) -> None:
        """Record the durations of a step with `width` tokens per decoding row. Changes state."""
        if prefill_tokens:
            self._per_token = max(self._per_token * DECAY, prefill_s / prefill_tokens)
        self._decode = {known: seconds * DECAY for known, seconds in self._decode.items()}
        self._decode[width] = max(self._decode.get(width, 0.0), decode_s)

    def limit(self, step: Step) -> float:
        """The time limit of a step, in seconds."""
        decode = max((s * max(1.0, step.width / width) for width, s in self._decode.items()), default=0.0)
        if not decode:
            return self._min_s * UNMEASURED
        tokens = sum(sum(forward.valid) for forward in step.forwards if not forward.sample)
        per_token = self._per_token or decode
        return max(self._min_s, FACTOR * (tokens * per_token + decode))
