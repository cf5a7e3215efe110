"""Guessed keys are seen in the log, and do not fill it."""

from __future__ import annotations

from phalanx.http.refused_keys import INTERVAL_S, RefusedKeys


def test_a_flood_of_guesses_is_a_line_each_ten_seconds(caplog):
    refused = RefusedKeys("A wrong admin key")
    for i in range(1000):
        refused.note("10.0.0.9", 50 + i * INTERVAL_S / 400)
    assert [record.message for record in caplog.records] == [
        "A wrong admin key came from 10.0.0.9",
        "A wrong admin key came from 10.0.0.9, and 399 more since the last such line",
        "A wrong admin key came from 10.0.0.9, and 399 more since the last such line",
    ]


def test_the_reason_is_told_where_there_is_one(caplog):
    RefusedKeys("A refused connection").note("10.0.0.9", 50, "TLS: http request")
    assert caplog.messages == ["A refused connection came from 10.0.0.9: TLS: http request"]
