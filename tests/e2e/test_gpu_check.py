"""`tools/gpu_check.sh`: the check of a machine with a GPU, run on processors; and what its verdicts rest on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.near_ties import Forced

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "BACKEND": "cpu", "INSTALL": "0", "PYTHON": sys.executable}
    command = ["sh", str(ROOT / "tools" / "gpu_check.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_the_whole_check_on_processors(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    code, said, problems = run("--tokens", "8", "--json", str(file))
    assert code == 0, problems
    summary: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert json.loads(file.read_text()) == summary and summary["ok"]
    parts = summary["parts"]
    assert list(parts) == ["device", "demo: load", "demo: tokens", "http", "two ranks"]
    assert parts["device"]["device"] == "cpu" and parts["demo: load"]["kv_budget_gb"] > 0
    tokens = parts["demo: tokens"]
    assert tokens["answers"] == 4 and tokens["tokens"] > 16
    assert tokens["phalanx_tokens_per_s"] > 0 and tokens["mlx_lm_tokens_per_s"] > 0
    assert "phalanx" in parts["http"]["answer"] and "skipped" in parts["two ranks"]


def test_a_directory_without_a_model_is_named_at_once(tmp_path: Path) -> None:
    code, said, problems = run(str(tmp_path))
    assert code == 2 and said == "" and f"{tmp_path} is no directory of a model" in problems


def test_a_part_that_fails_fails_the_check_and_the_others_run(check: ModuleType, capsys) -> None:
    found = check.Check("cpu", 8)
    found.part("broken", lambda: 1 / 0)
    found.part("wrong", lambda: {"ok": False})
    found.part("right", dict)
    assert [part["ok"] for part in found.summary()["parts"].values()] == [False, False, True]
    assert not found.summary()["ok"] and "ZeroDivisionError" in found.parts["broken"]["error"]
    found.started -= check.LIMIT_S
    found.part("late", dict)
    assert "TimeoutError" in found.parts["late"]["error"]


def test_mlx_on_processors_is_no_gpu(check: ModuleType) -> None:
    assert not check.device(check.Check("cuda13", 8))["ok"]


SAID = [([1, 2], [5, 6, 7])] * 40


@pytest.mark.parametrize(
    ("behind", "rounding", "dtype", "ok"),
    [
        (0.01, 0.004, "bfloat16", True),  # one token of 120, by less than four times the rounding
        (0.02, 0.004, "bfloat16", False),
        (0.00005, 0.0, "float32", True),
        (0.001, 0.0, "float32", False),
    ],
)
def test_other_tokens_have_to_be_near_ties(check: ModuleType, behind, rounding, dtype, ok) -> None:
    theirs = [[5, 6, 7]] * 39 + [[5, 9, 9]]
    logits = [Forced([0.0] * 3, rounding, 0)] * 39 + [Forced([0.0, behind, 0.0], rounding, 0)]
    found = check.same_tokens(SAID, theirs, lambda: logits, dtype)
    assert (found["equal"], found["near_ties"], found["ok"]) == (39, 1, ok)
    assert bool(found["unexplained"]) is not ok


def test_equal_tokens_need_no_logits(check: ModuleType) -> None:
    found = check.same_tokens(SAID, [[5, 6, 7]] * 40, lambda: pytest.fail("asked"), "float32")
    assert found == {"answers": 40, "equal": 40, "tokens": 120}


def test_a_wrong_token_is_found_by_mlx_lms_own_logits(check: ModuleType) -> None:
    model, prompt = str(check.MODEL_DIR), [10, 11, 12]
    right = check.mlx_lm(check.Check("cpu", 8), model, "float32", [{"prompt": prompt, "tokens": 4}])[0]["tokens"]
    wrong = [*right[:2], (right[2] + 1) % 4096, right[3]]
    said = [(prompt, wrong)]
    found = check.same_tokens(said, [right], lambda: check.forced(model, "float32", said, "cpu"), "float32")
    assert not found["ok"] and found["unexplained"][0]["at"] == 2
