"""The scheduler's counters."""

from __future__ import annotations

from msgspec import Struct


class Counters(Struct):
    """Cumulative counts, for `EngineStats`."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    disk_hits: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
