"""Requests that ran alone are measured beside what was predicted."""

from __future__ import annotations

import pytest

from phalanx.server.sequences.output_queue import Timings
from phalanx.server.sequences.speed_meter import PredictedSpeed, SpeedMeter
from phalanx.types import Finished, Timing


def answered(
    meter: SpeedMeter, *, arrived=0.0, first=0.5, n=101, prompt=256, cached=0, drafted=0, is_alone=True
) -> None:
    """A request that decodes 100 tokens a second after its first one."""
    decode_s = (n - 1) / 100
    event = Finished("a", "length", n, cached_tokens=cached, drafted_tokens=drafted, timing=Timing(decode_s=decode_s))
    meter.finished(Timings(arrived, arrived + first), event, prompt, is_alone=is_alone)
    meter.left(arrived + first + decode_s)


def test_a_request_alone_counts_for_the_rate_and_for_a_first_token_of_512():
    meter = SpeedMeter(PredictedSpeed(tokens_per_second=110.04, ttft_seconds=0.9996))
    assert meter.report() == {"predicted": {"tokens_per_second": 110.0, "ttft_seconds": 1.0}}
    answered(meter, prompt=256)
    assert meter.report()["measured"] == {"tokens_per_second": 100.0, "ttft_seconds": 1.0}


@pytest.mark.parametrize("rate", [{"n": 15}, {"drafted": 4}])
def test_a_rate_of_few_tokens_or_of_drafts_is_left_out(rate):
    meter = SpeedMeter()
    answered(meter, **rate)
    assert meter.tokens_per_second is None and meter.ttft_seconds is not None


@pytest.mark.parametrize("prompt", [{"prompt": 127}, {"prompt": 2049}, {"cached": 200}])
def test_a_prompt_that_is_unlike_512_tokens_is_left_out(prompt):
    meter = SpeedMeter()
    answered(meter, **prompt)
    assert meter.ttft_seconds is None and meter.tokens_per_second is not None


def test_a_request_that_shared_the_engine_does_not_count():
    meter = SpeedMeter()
    answered(meter, arrived=0.0, is_alone=False)  # the other one runs still
    answered(meter, arrived=1.0)  # the first ended after this one came
    assert meter.report() == {}
    answered(meter, arrived=5.0)
    assert meter.tokens_per_second == pytest.approx(100)


def test_a_request_beside_one_that_was_cancelled_does_not_count():
    meter = SpeedMeter()
    meter.left(0.7)
    answered(meter, arrived=0.0)
    assert meter.report() == {}


def test_medians_of_the_last_requests():
    meter = SpeedMeter()
    for i, first in enumerate((0.1, 0.2, 9.0)):
        answered(meter, arrived=20.0 * i, first=first, prompt=512)
    assert meter.ttft_seconds == pytest.approx(0.2)
