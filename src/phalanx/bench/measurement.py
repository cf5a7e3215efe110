"""Measures a server under a load: `vllm bench serve`'s figures, under its names, of what has ended so far."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx
from msgspec.structs import replace

from phalanx.bench.http_client import stream_chat
from phalanx.bench.load_generator import OfferedLoad, Outcome, arrival_times, distribution, offer, offered
from phalanx.bench.workload import LoadConfig, requests

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, after the first",
    "itl": "time between two pieces of an answer",
    "e2el": "time to the end",
}
"""Metric -> what it is. Milliseconds."""

NO_TEXT = "The answer has no text."
WARM_UP_SEED = 1 << 40  # added to the load's own, so that no prompt is cached


class Measurement:
    """One run of a load. Finished requests count, even if `run` is cancelled.

    Args:
        on_end: called when a request has ended, with whether it failed.
    """

    def __init__(self, config: LoadConfig, model: str, on_end: Callable[[bool], None]) -> None:
        self._config = config
        self._model = model
        self._on_end = on_end
        self._outcomes: dict[int, Outcome] = {}
        self._begun = self._last = 0.0

    async def run(self, client: httpx.AsyncClient) -> None:
        """Send all requests.

        Raises:
            RequestFailed: a warm-up failed.
        """
        config = self._config
        warm_ups = replace(
            config, num_prompts=config.num_warmups, seed=config.seed + WARM_UP_SEED, prefix_repetition_num_prefixes=1
        )
        for body in requests(warm_ups, self._model) if config.num_warmups else []:
            await stream_chat(client, body, path=config.path)
        bodies = requests(config, self._model)
        due = arrival_times(len(bodies), config.request_rate, config.burstiness, config.seed)
        self._begun = self._last = time.monotonic()
        await offer(client, bodies, due, config.max_concurrency, self._ended, path=config.path)

    def _ended(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome
        self._last = time.monotonic()
        self._on_end(isinstance(outcome, Exception))

    @property
    def load(self) -> OfferedLoad:
        """What has ended."""
        return offered(self._outcomes, self._last - self._begun)


def figures(
    load: OfferedLoad, metrics: Sequence[str] = tuple(METRICS), percentiles: Sequence[float] = (99,)
) -> dict[str, Any]:
    """The figures under vLLM's names, and `failures`: error message -> count. A figure without samples is None."""
    answered = [exchange for exchange in load.exchanges if exchange.arrivals]
    failures = Counter(load.failures)
    failures.update([NO_TEXT] * (len(load.exchanges) - len(answered)))
    samples = {
        "ttft": [one.ttft_s for one in answered if one.ttft_s is not None],
        "tpot": [one.tpot_s for one in answered if one.tpot_s is not None],
        "itl": [after - before for one in answered for before, after in pairwise(one.arrivals)],
        "e2el": [one.e2el_s for one in answered],
    }
    read = sum(one.prompt_tokens or 0 for one in answered)
    written = sum(one.completion_tokens or len(one.arrivals) for one in answered)
    per_s = 1 / load.wall_s if load.wall_s > 0 else 0.0
    found: dict[str, Any] = {
        "duration": load.wall_s,
        "completed": len(answered),
        "failed": failures.total(),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(answered) * per_s,
        "output_throughput": written * per_s,
        "total_token_throughput": (read + written) * per_s,
        "failures": dict(failures.most_common()),
    }
    for name in metrics:
        found |= distribution(samples[name], percentiles).json(name)
    return {name: None if value != value else value for name, value in found.items()}  # nan: of no sample


def settings_json(config: LoadConfig, model: str, label: str | None) -> dict[str, Any]:
    """The load under vLLM's names."""
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.backend,
        "backend": config.backend,
        "label": label,
        "model_id": model,
        "num_prompts": config.num_prompts,
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": "inf" if math.isinf(config.burstiness) else config.burstiness,
        "max_concurrency": config.max_concurrency,
    }
