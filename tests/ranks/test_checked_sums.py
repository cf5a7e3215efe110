"""Sums over real ranks: never a false alarm, and what a bad backend delivers is noticed by every rank (A6)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.examples import SOAK

from phalanx.dist.collective_backend import environment_of, find_mpi, mpirun_command

ROUNDS = 96 if SOAK else 24
"""Every width, number of rows, spread, rank and layer comes round in twelve."""
SCRIPT = Path(__file__).with_name("checked_sums.py")


@pytest.mark.grows
@pytest.mark.skipif(find_mpi() is None, reason="needs the mpi extra")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_fault_is_noticed_and_nothing_else(ranks):
    """With both checksums, in one group; without phalanx-cpu with the composed one."""
    checksums = ["composed", *(["native"] if importlib.util.find_spec("phalanx_cpu") else [])]
    command = mpirun_command(ranks, "auto", [sys.executable, str(SCRIPT), str(ROUNDS), *checksums])
    environment = {**os.environ, **environment_of("mpi", None, None)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == checksums
    for rates in found.values():
        assert {name: rate["none"] for name, rate in rates.items()} == dict.fromkeys(rates, 0.0)
        for kind in ("garbage", "stale", "zero", "permute"):
            assert rates["float32"][kind] == 1.0
            assert all(rate[kind] >= 0.95 for rate in rates.values()), (kind, rates)
