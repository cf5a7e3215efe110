"""The requests of a load: lengths, shared prefixes, seeds; when they are due."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.load_generator import arrival_times
from phalanx.bench.workload import TOKENS, WORDS, LoadConfig, check_load, requests
from phalanx.errors import ConfigError

SMALL = LoadConfig(num_prompts=4, random_input_len=7, random_output_len=3)


def prompts(config: LoadConfig) -> list[list[int]]:
    return [body["prompt"] for body in requests(config, "m")]


def test_prompts_have_exactly_the_length_that_was_asked_for() -> None:
    bodies = requests(SMALL, "m")
    assert [len(body["prompt"]) for body in bodies] == [7] * 4
    assert {token in TOKENS for body in bodies for token in body["prompt"]} == {True}
    for body in bodies:
        del body["prompt"]
    assert bodies == [{"model": "m", "temperature": 0.0, "max_tokens": 3, "ignore_eos": True}] * 4


def test_a_seed_makes_the_same_prompts_again_and_another_seed_others() -> None:
    assert prompts(SMALL) == prompts(SMALL)
    other = LoadConfig(num_prompts=4, random_input_len=7, random_output_len=3, seed=1)
    assert not {tuple(one) for one in prompts(SMALL)} & {tuple(one) for one in prompts(other)}


def test_prefixes_are_shared_evenly() -> None:
    config = LoadConfig(
        dataset_name="prefix_repetition", num_prompts=9, prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=6, prefix_repetition_suffix_len=2, prefix_repetition_output_len=5,
    )  # fmt: skip
    found = prompts(config)
    prefixes = [tuple(one[:6]) for one in found]
    assert list(Counter(prefixes).values()) == [3, 3, 3]
    assert prefixes != prefixes[:3] * 3, "not by turns"
    assert len({tuple(one) for one in found}) == 9 and {len(one) for one in found} == {8}
    body = requests(config, "m")[0]
    assert body["max_tokens"] == 5 and "ignore_eos" not in body


def test_the_chat_api_gets_as_many_words() -> None:
    config = LoadConfig(backend="openai-chat", num_prompts=1, random_input_len=7)
    (message,) = requests(config, "m")[0]["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 7
    assert set(message["content"].split()) <= set(WORDS)
    assert config.path == "/chat/completions" and SMALL.path == "/completions"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"request_rate": 0.0}, "--request-rate is 0"),
        ({"request_rate": math.nan}, "--request-rate is nan"),
        ({"request_rate": -2.0}, "--request-rate is -2"),
        ({"burstiness": 0.0}, "--burstiness is 0"),
        ({"burstiness": 2.0}, "--burstiness needs a --request-rate"),
        ({"prefix_repetition_suffix_len": 9}, "--prefix-repetition-suffix-len needs --dataset-name prefix_repetition"),
        (
            {"dataset_name": "prefix_repetition", "random_input_len": 9},
            "--random-input-len needs --dataset-name random",
        ),
        ({"dataset_name": "prefix_repetition", "num_prompts": 5}, "--prefix-repetition-num-prefixes 10 is more than"),
    ],
)
def test_settings_that_make_no_load_are_named(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_load(LoadConfig(**settings))
    check_load(SMALL)


# When requests are due -----------------------------------------------------------------------------------------------

RATES = st.floats(0.01, 1000)
SHAPES = st.one_of(st.floats(0.01, 50), st.just(math.inf))


@given(st.integers(1, 50), RATES, SHAPES, st.integers(0, 5))
def test_times_are_those_of_their_seed_rise_and_end_at_the_rate(n: int, rate: float, shape: float, seed: int) -> None:
    times = arrival_times(n, rate, shape, seed)
    assert times == arrival_times(n, rate, shape, seed)
    assert len(times) == n and times == sorted(times)
    assert times[-1] == pytest.approx(n / rate)


def test_another_seed_makes_other_times() -> None:
    assert arrival_times(5, 2, 1, 0) != arrival_times(5, 2, 1, 1)


def test_burstiness_goes_from_bursts_to_a_clock() -> None:
    def spread(shape: float) -> float:
        """Longest gap in shares of the mean one."""
        return max(after - before for before, after in pairwise([0.0, *arrival_times(1000, 1.0, shape, 3)]))

    assert spread(0.1) > 2 * spread(1) > 4 * spread(10) > 4 * spread(math.inf)
    assert spread(math.inf) == pytest.approx(1.0)


def test_without_a_rate_all_are_due_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
