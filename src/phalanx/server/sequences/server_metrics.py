"""Prometheus metrics under vLLM's names with the prefix `phalanx:`, label `model_name`.

The server measures latencies itself. Counters that the engine reports continue over its restarts, so they never fall.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from phalanx.server.sequences.output_queue import Timings
from phalanx.server.sequences.speed_meter import SpeedMeter
from phalanx.types import EngineStats, Finished, SpecStats

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Upper bounds of buckets, two or three to a power of ten, from a cached answer of a small model to a long document."""

GAUGES = {
    "running": ("num_requests_running", "Sequences that hold a row of the KV cache."),
    "waiting": ("num_requests_waiting", "Sequences waiting for a row."),
    "kv_usage": ("kv_cache_usage_perc", "Part of the KV budget that is allocated, 0 to 1."),
    "prefix_bytes": ("prefix_cache_bytes", "Bytes of kept prefixes."),
    "disk_blocks": ("prefix_cache_disk_blocks", "Blocks of kept prefixes on each rank's disk."),
    "active_bytes": ("engine_memory_active_bytes", "MLX's active memory in the leader."),
    "peak_bytes": ("engine_memory_peak_bytes", "The most MLX had active since the engine started."),
    "cache_bytes": ("engine_memory_cache_bytes", "MLX's buffer cache in the leader."),
    "rss_bytes": ("engine_memory_rss_bytes", "Resident set size of the leader's process."),
}
COUNTERS = {
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "disk_queries": ("external_prefix_cache_queries", "Prompt tokens looked up in the prefix cache on disk."),
    "disk_hits": ("external_prefix_cache_hits", "Prompt tokens loaded from there; also among prefix_cache_hits."),
    "disk_failures": ("prefix_cache_disk_failures", "Loads of prefixes that failed or took too long."),
    "disk_mismatches": (
        "prefix_cache_disk_mismatches",
        "Restored prefixes that were not what computing them gives, with --verify-restores.",
    ),
    "preemptions": ("num_preemptions", "Rows whose KV was dropped, to be computed again later."),
    "step": ("engine_steps", "Steps."),
    "decode_steps": ("engine_decode_steps", "Forwards that sampled."),
    "step_s": ("engine_step_seconds", "Seconds inside steps."),
    "model_s": ("engine_model_seconds", "Seconds of steps in the model call, sampling and evaluation."),
    "control_s": ("engine_control_seconds", "Seconds of steps that send plans to other ranks."),
}
SPECULATION = {
    "drafts": ("spec_decode_num_drafts", "Drafts verified: the tokens guessed for one row in one step."),
    "drafted": ("spec_decode_num_draft_tokens", "Drafted tokens."),
    "accepted": ("spec_decode_num_accepted_tokens", "Drafted tokens that the model accepted."),
}
COMPARED = {
    "tokens": ("spec_decode_compared_tokens", "Output tokens of steps that compare drafts with no drafts."),
    "seconds": ("spec_decode_compared_seconds", "Seconds of these steps."),
}
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", "Arrival of the request to its first token.", LATENCY_S),
    "itl": ("inter_token_latency_seconds", "Between two tokens of a sequence.", TOKEN_LATENCY_S),
    "e2e": ("e2e_request_latency_seconds", "Arrival of the request to its last token.", LATENCY_S),
    "first_byte": ("time_to_first_byte_seconds", "Arrival to the first byte of text handed to the network.", LATENCY_S),
    "queue": ("request_queue_time_seconds", "Waiting for a row.", LATENCY_S),
    "prefill": ("request_prefill_time_seconds", "First scheduled to first token.", LATENCY_S),
    "decode": ("request_decode_time_seconds", "First token to last token.", LATENCY_S),
    "inference": ("request_inference_time_seconds", "First scheduled to last token.", LATENCY_S),
    "prompt": ("request_prompt_tokens", "Prompt tokens of finished sequences.", TOKEN_COUNTS),
    "generation": ("request_generation_tokens", "Output tokens of finished sequences.", TOKEN_COUNTS),
}
PREFIX = "phalanx:"
LABELS = ("model_name",)


class ServerMetrics:
    """The server's metrics, in a registry of their own. Each method records one kind of event.

    Args:
        speeds: gets every request that ended.
    """

    def __init__(self, model_name: str, speeds: SpeedMeter | None = None) -> None:
        self.speeds = speeds or SpeedMeter()
        self.registry = CollectorRegistry()
        self._last_stats = EngineStats()  # of the running engine process; zero after a restart
        label = (model_name,)
        self._gauges = {
            key: Gauge(PREFIX + name, text, LABELS, registry=self.registry).labels(*label)
            for key, (name, text) in GAUGES.items()
        }
        self._engine = {
            key: Counter(PREFIX + name, text, LABELS, registry=self.registry).labels(*label)
            for key, (name, text) in COUNTERS.items()
        }
        self._speculation = {
            key: Counter(PREFIX + name, text, LABELS, registry=self.registry).labels(*label)
            for key, (name, text) in SPECULATION.items()
        }
        self._compared = {
            key: Counter(PREFIX + name, text, (*LABELS, "drafts"), registry=self.registry)
            for key, (name, text) in COMPARED.items()
        }
        self._accepted_at = Counter(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the draft.",
            (*LABELS, "position"),
            registry=self.registry,
        )
        self._histograms = {
            key: Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=self.registry).labels(*label)
            for key, (name, text, buckets) in HISTOGRAMS.items()
        }
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of sequences that produced a token.", label)
        self._generated = self._counter("generation_tokens", "Output tokens.", label)
        self._errors = self._counter("request_errors", "Requests that ended with a server-side error.", label)
        self._restarts = self._counter("engine_failures", "Times the engine process went down unasked.", label)
        self._up = Gauge(PREFIX + "engine_up", "1 while the engine serves.", LABELS, registry=self.registry).labels(
            *label
        )
        self._ended = Counter(
            PREFIX + "request_success",
            "Sequences that ended as they should, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._answers = Counter(
            PREFIX + "http_requests",
            "Answers begun, by endpoint and HTTP status.",
            (*LABELS, "endpoint", "status"),
            registry=self.registry,
        )
        self._label = label
        for reason in ("stop", "length"):
            self._ended.labels(*label, reason)  # exported as 0 before the first one

    def text(self) -> bytes:
        """All metrics in Prometheus' exposition format."""
        return generate_latest(self.registry)

    def stats(self, stats: EngineStats) -> None:
        """Record statistics that the engine sent: set gauges, add what its counters gained."""
        for key, gauge in self._gauges.items():
            gauge.set(getattr(stats, key))
        for key, counter in self._engine.items():
            counter.inc(max(0.0, getattr(stats, key) - getattr(self._last_stats, key)))
        if stats.spec is not None:
            self._spec_stats(stats.spec, self._last_stats.spec or SpecStats(method=stats.spec.method))
        self._last_stats = stats

    def _spec_stats(self, stats: SpecStats, last: SpecStats) -> None:
        for key, counter in self._speculation.items():
            counter.inc(max(0, getattr(stats, key) - getattr(last, key)))
        for position, count in enumerate(stats.accepted_at):
            before = last.accepted_at[position] if position < len(last.accepted_at) else 0
            self._accepted_at.labels(*self._label, str(position)).inc(max(0, count - before))
        for drafts, measured, measured_before in (
            ("yes", stats.compared_with, last.compared_with),
            ("no", stats.compared_without, last.compared_without),
        ):
            for key, new, old in zip(COMPARED, measured or (), measured_before or (0, 0.0), strict=False):
                self._compared[key].labels(*self._label, drafts).inc(max(0.0, new - old))

    def engine_up(self) -> None:
        """A new engine is ready; its counters start at 0."""
        self._last_stats = EngineStats()
        self._up.set(1)

    def engine_down(self) -> None:
        """The engine went down: count it, and set the engine's gauges to 0."""
        self._restarts.inc()
        self._up.set(0)
        for gauge in self._gauges.values():
            gauge.set(0)

    def tokens(self, timings: Timings, prompt_tokens: int, n: int, now: float) -> None:
        """Record n new tokens of a sequence; `timings` do not include them yet. Times in seconds."""
        self._generated.inc(n)
        if timings.first_token is None:
            self._prompt.inc(prompt_tokens)
            self._histograms["ttft"].observe(now - timings.arrived)
        elif timings.last_token is not None:
            for _ in range(n):
                self._histograms["itl"].observe((now - timings.last_token) / n)

    def finished(self, timings: Timings, event: Finished, prompt_tokens: int, now: float, *, is_alone: bool) -> None:
        """Record a sequence that ended without an error.

        Args:
            is_alone: see `SpeedMeter.finished`.
        """
        self.speeds.finished(timings, event, prompt_tokens, is_alone=is_alone)
        timing = event.timing
        observed = {
            "e2e": now - timings.arrived,
            "queue": timing.queue_s,
            "prefill": timing.prefill_s,
            "decode": timing.decode_s,
            "inference": timing.prefill_s + timing.decode_s,
            "prompt": prompt_tokens,
            "generation": event.n_tokens,
        }
        for key, value in observed.items():
            self._histograms[key].observe(value)
        self._ended.labels(*self._label, event.reason).inc()

    def first_byte(self, seconds: float) -> None:
        """Record the seconds from a request's arrival to the first byte of text handed to the network."""
        self._histograms["first_byte"].observe(seconds)

    def answered(self, endpoint: str, status: int) -> None:
        """Count an answer that begins, streamed or not."""
        self._answers.labels(*self._label, endpoint, str(status)).inc()

    def failed(self) -> None:
        """Count a request that ended with an error."""
        self._errors.inc()

    def _counter(self, name: str, text: str, label: tuple[str, ...]) -> Counter:
        return Counter(PREFIX + name, text, LABELS, registry=self.registry).labels(*label)
