"""Ranks whose leader waits for sums and tokens together: the same tokens, and no token of a step with a wrong sum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models import make_model

from phalanx.dist.collective_backend import environment_of, find_mpi, mpirun_command

SCRIPT = Path(__file__).with_name("joined_waits.py")


def decode(model: Path, ranks: int, fault_step: int) -> list[dict[str, Any]]:
    """What rank 0 saw without joined waits, with two kinds of them, and with these and a fault."""
    command = mpirun_command(ranks, "auto", [sys.executable, str(SCRIPT), str(model), str(fault_step)])
    environment = {**os.environ, **environment_of("mpi", None, None)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(find_mpi() is None, reason="needs the mpi extra")
def test_the_tokens_are_the_same_and_a_wrong_sum_stops_in_time(tmp_path):
    waited, *joined, built, replayed = decode(make_model("llama", tmp_path / "llama"), 2, fault_step=9)
    assert joined == [waited] * 2
    assert len(waited["tokens"]) == 24 and waited["forwards"] == 25 and not waited["said"]
    for spoiled in (built, replayed):
        assert spoiled["tokens"] == waited["tokens"][:8]
        assert "step 9: the all-reduce is wrong" in spoiled["said"] and "on rank 1." in spoiled["said"]
