"""Stages with the native kernels: replayed calls, packed rows and repacked weights give the whole model's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_isa
SCRIPT = Path(__file__).with_name("staged.py")


def test_received_hidden_states_are_an_input_of_the_replayed_call():
    names = ["llama", "qwen3_moe/4", "gpt_oss/4", "qwen3_next/4"]
    done = subprocess.run([sys.executable, str(SCRIPT), *names], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert found["forwards"] > 50 and found["different"] == 0, name
        recurrent = name.startswith("qwen3_next")
        assert len(found["replayed"]) == 3, name
        assert all(count == 0 if recurrent else count > 15 for count in found["replayed"]), name
        assert found["packs"] == [not recurrent] * 4 and (found["packed"] > 10) is not recurrent, name
