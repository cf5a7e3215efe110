"""`phalanx plan` on this machine: real headers, and one measurement of the bundled model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import process

from phalanx.demo import MODEL_DIR
from phalanx.errors import ExitCode

GUARD = "0.5"  # GiB; the default leaves nothing on a small machine


def plan(*words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "plan", *words]
    environment = os.environ if home is None else {**os.environ, "HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_started_server_is_what_was_predicted():
    ranks = json.loads(plan("demo", "--memory-only", "--json", "--memory-guard-gb", GUARD).stdout)["plans"][0]["fit"]
    predicted = sum(rank["process"] + rank["weights"] for rank in ranks["ranks"])
    with process("-m", "phalanx", "serve", "demo", "--port", "0", "--memory-guard-gb", GUARD) as server:
        top = psutil.Process(server.process.pid)
        measured = sum(one.memory_full_info().pss for one in (top, *top.children(recursive=True)))
    assert abs(predicted - measured) < 100 << 20, f"{predicted >> 20} MiB predicted, {measured >> 20} MiB measured"


def test_this_machine_is_measured_once(tmp_path: Path):
    words = ("demo", "--ranks", "2", "--json", "--memory-guard-gb", GUARD)
    first, second = (json.loads(plan(*words, home=tmp_path).stdout) for _ in range(2))
    speeds = [one["speed"] for one in first["plans"]]
    assert all(min(speed["tokens_per_s"].values()) > 0 and min(speed["ttft_s"].values()) > 0 for speed in speeds)
    assert speeds[0]["ttft_s"].keys() == {"512", "4000"}  # the model's context is 4,096 tokens
    assert [one["speed"] for one in second["plans"]] == speeds
    assert (tmp_path / ".phalanx" / "calibrations.json").is_file()
    fewest = len(first["plans"][0]["fit"]["candidate"]["hosts"])
    assert first["recommended"]["why"] and fewest == 1


def test_what_does_not_fit_is_refused_with_what_each_plan_lacks():
    done = plan("demo", "--memory-only", "--memory-guard-gb", "100000")
    assert done.returncode == ExitCode.MEMORY
    assert "demo fits in no way" in done.stderr and "one rank: demo does not fit: localhost lacks" in done.stderr
    assert "tok/s" not in done.stdout and "more host" not in done.stderr  # not even on 16 of them


def test_what_does_not_fit_is_refused_with_the_nearest_that_does():
    words = ("--memory-only", "--memory-guard-gb", GUARD, "--kv-cache-gb", "0", "--max-model-len", "4096")
    refused = plan("demo", *words)
    assert refused.returncode == ExitCode.MEMORY
    suggested = re.search(r"What fits: --kv-cache-gb ([0-9.]+) \(", refused.stderr)
    assert suggested is not None, refused.stderr
    assert plan("demo", *words[:4], suggested[1], *words[5:]).returncode == ExitCode.OK


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
