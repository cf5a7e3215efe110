"""`--speculative-config`: vLLM's JSON, and errors that name the field."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.config import EngineConfig
from phalanx.errors import ConfigError
from phalanx.spec.parse_config import parse
from phalanx.speculation_config import (
    DraftModelSpeculation,
    NgramSpeculation,
    RandomSpeculation,
    SuffixSpeculation,
)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ('{"method": "ngram"}', NgramSpeculation()),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 1}',
            NgramSpeculation(num_speculative_tokens=3, prompt_lookup_max=5, prompt_lookup_min=1),
        ),
        (
            '{"method": "suffix", "suffix_decoding_min_token_prob": 1, "disable_by_batch_size": 4}',
            SuffixSpeculation(suffix_decoding_min_token_prob=1.0, disable_by_batch_size=4),
        ),
        ('{"method": "draft_model", "model": "a/b"}', DraftModelSpeculation(model="a/b")),
        ('{"method": "random", "control": "always"}', RandomSpeculation(control="always")),
        ('{"method": "random", "compare_steps": 4}', RandomSpeculation(compare_steps=4)),
        (
            '{"method": "ngram", "control": "floor", "floor": 0.5, "window": 20}',
            NgramSpeculation(control="floor", floor=0.5, window=20),
        ),
    ],
)
def test_what_is_written_is_meant(text, config):
    assert parse(text) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ngram", "is not JSON: 'ngram'"),
        ('{"method":' * 100_000, "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[]", "xpected `object`, got `array`"),
        ("{}", "missing required field `method`"),
        ('{"method": "eagle"}', "method: invalid value 'eagle'"),
        ('{"method": 1}', "method: expected `str`"),
        ('{"method": "ngram", "num_tokens": 4}', "unknown field `num_tokens`"),
        ('{"method": "ngram", "model": "a/b"}', "unknown field `model`"),
        ('{"method": "suffix", "prompt_lookup_max": 4}', "unknown field `prompt_lookup_max`"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens: expected `int` >= 1"),
        ('{"method": "ngram", "num_speculative_tokens": 17}', "num_speculative_tokens: expected `int` <= 16"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', "num_speculative_tokens: expected `int`, got `str`"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens: expected `int`, got `bool`"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "prompt_lookup_min 5 is larger than prompt_lookup_max 4"),
        ('{"method": "draft_model"}', "missing required field `model`"),
        ('{"method": "draft_model", "model": ""}', "model: expected `str` of length >= 1"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "suffix_decoding_min_token_prob: expected"),
        ('{"method": "ngram", "control": "vote"}', "control: invalid enum value 'vote'"),
        ('{"method": "ngram", "compare_steps": 0}', "compare_steps: expected `int` >= 1"),
        ('{"method": "ngram", "floor": 0.4}', 'floor belongs to "control": "floor", but that is "cost"'),
        ('{"method": "ngram", "control": "floor", "probe_share": 0.01}', 'probe_share belongs to "control": "cost"'),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ConfigError, match="--speculative-config") as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ['{"method": "ngram"}', '{"method": "draft_model", "model": "demo"}'])
def test_it_survives_the_command_line_of_a_rank(text):
    config = EngineConfig(model="demo", speculative_config=parse(text))
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
