"""Rows with drafts of several lengths that are computed without padding: the same greedy tokens as mlx-lm, in every
architecture that allows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("packed.py")
PACKED = [
    "llama", "llama:sliding", "qwen2", "qwen3", "qwen3_moe", "gpt2", "gpt_oss", "gpt_oss+30", "gemma3_text", "cohere2",
    "phi3", "mixtral", "glm4_moe", "minicpm3", "gemma3n", "olmo2",
]  # fmt: skip
PADDED = ["gemma2", "deepseek_v3", "llama4", "mamba", "qwen3_next"]
"""Attention by hand, keys that are repacked into others, recurrent state."""


def decode(*names: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(SCRIPT), *names], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


# Other instruction sets than the best decode with the first half: full and sliding attention, sinks, experts.
@pytest.mark.parametrize("names", [PACKED[::2], pytest.param(PACKED[1::2], marks=pytest.mark.any_isa)])
def test_packed_rows_give_the_tokens_of_mlx_lm(names: list[str]):
    for name, found in decode(*names).items():
        assert found["packs"] and found["packed"] > 5, name
        assert found["wrong"] == [] and found["distinct"] > 8, name


@pytest.mark.any_isa
def test_what_cannot_be_packed_is_found_out_and_padded():
    for name, found in decode(*PADDED).items():
        assert (found["packs"], found["packed"], found["wrong"]) == (False, 0, []), name
