"""Decoding with calls that are replayed: the same bits as with calls that are built, in every architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.any_isa
SCRIPT = Path(__file__).with_name("replayed.py")
REPLAYED = [
    "llama", "llama/4", "llama:llama3", "qwen3", "qwen3_moe/4", "mixtral/4@bfloat16", "glm4_moe/8", "gpt2",
    "phi3:longrope", "minicpm3", "cohere", "gemma", "nemotron-nas", "qwen3:yarn", "llama/4@bfloat16", "qwen3@float16",
]  # fmt: skip
BUILT = {
    "llama:dynamic": "computes with the position",
    "llama4": "computes with the position",
    "mamba": "recurrent state",
    "qwen3_next": "recurrent state",
    "gemma2": "changes with the position",
    "deepseek_v3": "changes with the position",
    "gemma3n": "graphs differ",
}
"""What is not replayed, and why."""


def decode(*names: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("names", [REPLAYED[::2], REPLAYED[1::2]])
def test_replayed_calls_give_the_same_bits(names: list[str]):
    for name, found in decode(*names).items():
        assert found["wrong"] == [], name
        assert found["replayed"] > 90 and found["refusals"] == [], name
        assert (found["again"], found["more"]) == (15, 0), name
        assert (found["came"], found["forgotten"]) == (37, 2), name


def test_of_a_quantised_model_only_the_last_operation_is_handed_over():
    for name, found in decode("llama/4", "qwen3_moe/4@bfloat16", "mixtral/4", "gpt_oss/4", "gemma3_text/4").items():
        assert found["handed"] == ["KernQuantizedMatmul"], name


def test_what_cannot_be_replayed_is_built_each_time_and_says_why():
    for name, found in decode(*BUILT).items():
        assert found["wrong"] == [] and found["replayed"] == 0, name
        assert any(BUILT[name] in why for why in found["refusals"]), (name, found["refusals"])


def test_windows_are_replayed_before_and_when_they_are_full():
    for name, found in decode("gpt_oss", "gpt_oss+30", "gemma3_text", "cohere2", "llama:sliding").items():
        assert found["wrong"] == [] and found["replayed"] > 90 and found["refusals"] == [], name
