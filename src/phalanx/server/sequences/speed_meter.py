"""Speed of requests that a server computes alone, and the planner's prediction for it.

Only such requests compare with a prediction for one stream: others share their steps.
"""

from __future__ import annotations

import statistics
from collections import deque

from msgspec import Struct

from phalanx.server.sequences.output_queue import Timings
from phalanx.types import Finished

RECENT = 64  # requests
MIN_OUTPUT = 16  # tokens of an answer whose rate counts
MIN_PROMPT, MAX_PROMPT = 128, 2048  # computed tokens of a prompt whose time counts
PROMPT = 512  # tokens of the prompt for which times are predicted; others' are converted in proportion


class PredictedSpeed(Struct, frozen=True, kw_only=True):
    """What `phalanx plan` predicted for one stream."""

    tokens_per_second: float
    ttft_seconds: float
    """Of a prompt of PROMPT tokens."""
    model: str = ""
    """`ModelShape.key`, under which the planner keeps what it learns."""
    plan: str = ""
    rate_factor: float = 1.0
    """In the prediction already, from earlier starts."""
    ttft_factor: float = 1.0


class SpeedMeter:
    """Collects requests that ran alone.

    Args:
        predicted: None: nothing was.
    """

    def __init__(self, predicted: PredictedSpeed | None = None) -> None:
        self.predicted = predicted
        self._rates: deque[float] = deque(maxlen=RECENT)
        self._firsts_s: deque[float] = deque(maxlen=RECENT)
        self._busy_until = 0.0  # when the last request left

    def finished(self, timings: Timings, event: Finished, prompt_tokens: int, *, is_alone: bool) -> None:
        """Note a request that ended, unless it shared the engine or an earlier engine began it.

        Args:
            is_alone: no other is unfinished, and this engine computed all of its tokens.
        """
        if not is_alone or self._busy_until > timings.arrived or timings.first_token is None:
            return
        decode_s = event.timing.decode_s
        if event.n_tokens >= MIN_OUTPUT and decode_s > 0 and not event.drafted_tokens:  # predictions have no drafts
            self._rates.append((event.n_tokens - 1) / decode_s)
        computed = prompt_tokens - event.cached_tokens
        if MIN_PROMPT <= computed <= MAX_PROMPT:
            self._firsts_s.append((timings.first_token - timings.arrived) * PROMPT / computed)

    def left(self, now: float) -> None:
        """Note that a request is gone, whether it ended, failed or was cancelled."""
        self._busy_until = now

    @property
    def tokens_per_second(self) -> float | None:
        """Median; None before the first."""
        return statistics.median(self._rates) if self._rates else None

    @property
    def ttft_seconds(self) -> float | None:
        """Median, of a prompt of PROMPT tokens; None before the first."""
        return statistics.median(self._firsts_s) if self._firsts_s else None

    def report(self) -> dict[str, dict[str, float]]:
        """`predicted` and `measured`, each where known."""
        found = {}
        if self.predicted is not None:
            found["predicted"] = _plain(self.predicted.tokens_per_second, self.predicted.ttft_seconds)
        if measured := _plain(self.tokens_per_second, self.ttft_seconds):
            found["measured"] = measured
        return found


def _plain(rate: float | None, first_s: float | None) -> dict[str, float]:
    named = {"tokens_per_second": (rate, 1), "ttft_seconds": (first_s, 3)}
    return {name: round(value, digits) for name, (value, digits) in named.items() if value is not None}
