"""`phalanx plan` on this machine: real headers, no measurement."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.demo import MODEL_DIR
from phalanx.errors import ExitCode

GUARD = "0.5"  # GiB; the default leaves nothing on a small machine


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_what_fits_is_shown_without_measuring():
    done = plan("demo", "--memory-only", "--json", "--memory-guard-gb", GUARD)
    assert done.returncode == ExitCode.OK, done.stderr
    found = json.loads(done.stdout)
    names = [one["fit"]["candidate"] for one in found["plans"]]
    assert [(one["stages"], one["width"]) for one in names][:1] == [(1, 1)]
    weights = [sum(rank["weights"] for rank in one["fit"]["ranks"]) for one in found["plans"]]
    files = sum(file.stat().st_size for file in MODEL_DIR.glob("*.safetensors"))
    assert weights[0] == pytest.approx(files, rel=0.05)
    assert found["recommended"]["plan"]["fit"]["context"] == 4096
    assert all(one["speed"] is None for one in found["plans"])


def test_what_does_not_fit_is_refused_with_what_each_plan_lacks():
    done = plan("demo", "--memory-only", "--memory-guard-gb", "100000")
    assert done.returncode == ExitCode.MEMORY
    assert "demo fits in no way" in done.stderr and "one rank: demo does not fit: localhost lacks" in done.stderr
    assert "tok/s" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-model"], "no-such-model is not on this machine"),
        (["demo", "no-such-file.json"], "The hostfile no-such-file.json cannot be read"),
        (["demo", "--hosts", "no-such-host.invalid"], "no-such-host.invalid"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], said: str):
    done = plan(*words, "--memory-only")
    assert done.returncode != ExitCode.OK and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == done.stderr.splitlines()[:1]


def test_a_model_without_headers_is_one_line(tmp_path: Path):
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    done = plan(str(tmp_path), "--memory-only")
    assert done.returncode != ExitCode.OK
    assert "has no model*.safetensors" in done.stderr and "Traceback" not in done.stderr
