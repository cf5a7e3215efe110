"""The figures of speculation on /metrics: vLLM's names, and never falling over restarts (M2, A8)."""

from __future__ import annotations

from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.types import EngineStats, SpecStats


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"phalanx:{name}_total", {"model_name": "tiny", **labels})


def stats(drafts: int, accepted_at: list[int]) -> EngineStats:
    drafted_at = [drafts] * len(accepted_at)
    accepted, drafted = sum(accepted_at), sum(drafted_at)
    return EngineStats(
        spec=SpecStats(
            method="ngram", drafts=drafts, drafted=drafted, accepted=accepted, drafted_at=drafted_at,
            accepted_at=accepted_at,
        )
    )  # fmt: skip


def test_counters_grow_with_the_engines_figures_and_survive_its_restart():
    metrics = ServerMetrics("tiny")
    metrics.engine_up()
    metrics.stats(stats(4, [3, 1]))
    metrics.stats(stats(6, [5, 2, 1]))
    metrics.engine_down()
    metrics.engine_up()
    metrics.stats(stats(2, [1, 0]))
    assert value(metrics, "spec_decode_num_drafts") == 8
    assert value(metrics, "spec_decode_num_draft_tokens") == 18 + 4
    assert value(metrics, "spec_decode_num_accepted_tokens") == 8 + 1
    per_position = [value(metrics, "spec_decode_num_accepted_tokens_per_pos", position=str(i)) for i in range(4)]
    assert per_position == [6, 2, 1, None]


def test_comparisons_are_counted_by_kind_and_survive_a_restart():
    metrics = ServerMetrics("tiny")
    metrics.engine_up()
    for drafted, plain in (((10, 1.0), (8, 2.0)), ((25, 3.5), (9, 2.25))):
        metrics.stats(EngineStats(spec=SpecStats(method="ngram", compared_with=drafted, compared_without=plain)))
    metrics.engine_up()
    metrics.stats(EngineStats(spec=SpecStats(method="ngram", compared_with=(1, 0.5), compared_without=(0, 0.0))))
    found = {
        drafts: [value(metrics, f"spec_decode_compared_{what}", drafts=drafts) for what in ("tokens", "seconds")]
        for drafts in ("yes", "no")
    }
    assert found == {"yes": [26, 4.0], "no": [9, 2.25]}


def test_without_speculation_they_stay_at_zero():
    metrics = ServerMetrics("tiny")
    metrics.stats(EngineStats())
    assert value(metrics, "spec_decode_num_drafts") == 0
    assert b"per_pos_total{" not in metrics.text()
    metrics.stats(EngineStats(spec=SpecStats(method="ngram")))
    assert b"compared_tokens_total{" not in metrics.text()
