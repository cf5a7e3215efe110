"""Kept answers of mlx-lm: none is given that anything could have changed, and none is lost."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from support import golden
from support.golden import Golden, entries
from support.mlx_lm_greedy import greedy_here, stock_greedy
from support.models import make_model

JOBS = [{"prompt": [5, 6, 7], "max_tokens": 3}, {"prompt": [8], "max_tokens": 3}]


class Asked:
    """Gives each job an answer that no other gets, and counts the jobs."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def __call__(self, jobs: list[Any]) -> list[Any]:
        self.jobs += jobs
        return [{"tokens": [*job["prompt"], len(self.jobs), i], "gaps": [0.1, 3e-45]} for i, job in enumerate(jobs)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(100))
    return path


@pytest.fixture
def ask(tmp_path: Path, model: Path) -> Callable[..., tuple[list[Any], list[Any]]]:
    """As another process: answers, and the jobs that had to be computed."""

    def answers(code: str = "code", jobs: list[Any] = JOBS) -> tuple[list[Any], list[Any]]:
        asked = Asked()
        store = Golden([tmp_path / "kept"], tmp_path / "kept", tmp_path / "asked")
        return store.answers(code, [{**job, "model": str(model)} for job in jobs], asked), asked.jobs

    return answers


def test_what_is_missing_is_computed_once_and_kept_as_it_was(ask):
    first, computed = ask()
    assert len(computed) == 2 and first[1]["tokens"][0] == 8 and first[1]["gaps"] == [0.1, 3e-45]
    assert ask() == (first, [])
    answers, computed = ask(jobs=[JOBS[1], {"prompt": [9]}, JOBS[0], {"prompt": [9]}])
    assert [job["prompt"] for job in computed] == [[9]]
    assert answers == [first[1], answers[1], first[0], answers[1]] and answers[1]["tokens"][0] == 9


def test_an_answer_that_its_owner_changes_stays_as_it_was(tmp_path, model):
    store, jobs = Golden([], None), [{"model": str(model)}]
    store.answers("code", jobs, lambda jobs: [{"tokens": [1, 2]}])[0]["tokens"].clear()
    assert store.answers("code", jobs, Asked()) == [{"tokens": [1, 2]}]


def test_where_nothing_can_be_kept_all_is_computed(tmp_path, model):
    (tmp_path / "taken").touch()
    asked, store = Asked(), Golden([], tmp_path / "taken" / "answers")
    with pytest.warns(UserWarning, match="taken/answers keeps no answers, so each run computes them"):
        (answer,) = store.answers("code", [{"model": str(model), "prompt": [5]}], asked)
    assert answer["tokens"] == [5, 1, 0] and len(asked.jobs) == 1


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], Any]] = {
    "weights": lambda patch, model: (model / "model.safetensors").write_bytes(bytes(99) + b"\1"),
    "config": lambda patch, model: (model / "config.json").write_text("{} "),
    "a file more": lambda patch, model: (model / "model.py").write_text(""),
    "a version": lambda patch, model: patch.setattr(golden, "version", lambda name: "1.2.3"),
    "a library": lambda patch, model: patch.setattr(golden, "files_of", lambda package: [["mlx/lib/libmlx.so", "12"]]),
    "Python": lambda patch, model: patch.setattr(golden.sys, "version_info", (4, 0, 0)),
    "libc": lambda patch, model: patch.setattr(golden.platform, "libc_ver", lambda: ("musl", "1")),
    "the processor": lambda patch, model: patch.setattr(golden, "processor", lambda: ["x86_64", "avx"]),
    "the device": lambda patch, model: patch.setattr(golden.mx, "default_device", lambda: "another"),
    "a variable": lambda patch, model: patch.setenv("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_everything_is_computed_again(ask, model, monkeypatch, change):
    ask()
    CHANGES[change](monkeypatch, model)
    assert len(ask()[1]) == 2
    monkeypatch.undo()
    if change in ("weights", "config", "a file more"):
        (model / "model.py").unlink(missing_ok=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(bytes(100))
    assert ask()[1] == []


@pytest.mark.parametrize("change", [{"prompt": [5, 6]}, {"max_tokens": 4}, {"stop_ids": [1]}])
def test_another_job_or_code_is_another_key(ask, change):
    ask()
    assert len(ask(jobs=[{**JOBS[0], **change}])[1]) == 1
    assert len(ask(code="code ")[1]) == 2


def test_flags_and_files_that_calculate_are_in_the_key():
    assert {"mlx/nn/layers/linear.py", "mlx_lm/generate.py"} <= {
        name for package in golden.COMPUTE for name, _ in golden.files_of(package)
    }
    assert any(".so" in name for name, _ in golden.files_of("mlx"))
    chosen = [flag for flag in "fma avx2 avx512f smep fpu sve2 asimddp lm".split() if golden.ARITHMETIC.match(flag)]
    assert chosen == ["fma", "avx2", "avx512f", "sve2", "asimddp"]


def test_a_file_that_is_cut_or_changed_anywhere_gives_no_wrong_answer(ask, tmp_path):
    ask()
    whole = (tmp_path / "kept").read_bytes()
    wanted = dict(entries(tmp_path / "kept"))
    damaged = tmp_path / "damaged"
    for at in range(len(whole)):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            damaged.write_bytes(content)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = dict(entries(damaged))
            assert found.items() <= wanted.items()
            between_lines = content == whole[:at] and b"\n" in (whole[at - 1 : at] or b"\n", whole[at : at + 1])
            assert len(found) == 2 or said or between_lines
    damaged.write_bytes(whole[:-9])
    with pytest.warns(UserWarning, match=r"damaged:3 is not what was written there: its answer is computed again"):
        assert len(dict(entries(damaged))) == 1


def test_who_is_killed_while_writing_costs_nobody_elses_entry(ask, tmp_path):
    ask()
    with (tmp_path / "kept").open("ab") as file:
        file.write(b"\n0123456789abcdef01")
    with pytest.warns(UserWarning):
        ask(jobs=[{"prompt": [9]}])
    with pytest.warns(UserWarning):
        assert ask(jobs=[*JOBS, {"prompt": [9]}])[1] == []


WRITER = """
import sys
from pathlib import Path
from support.golden import append
for n in range(150):
    append(Path(sys.argv[1]), {f"{sys.argv[2]} {n}".replace(" ", "-"): "1" * 20_000})
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "kept")]
    tests = str(Path(__file__).parents[1])
    writers = [subprocess.Popen([*command, name], cwd=tests, env={"PYTHONPATH": tests}) for name in ("a", "b")]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert {key for key, _ in entries(tmp_path / "kept")} == {f"{name}-{n}" for name in "ab" for n in range(150)}


def test_the_checked_in_file_gets_what_was_asked_for_and_nothing_else(ask, tmp_path):
    ask(jobs=[{"prompt": [1]}])
    (tmp_path / "asked").unlink()
    ask()
    ask()
    kept = dict(entries(tmp_path / "kept"))
    assert len(kept) == 3
    golden.write(tmp_path / "asked", tmp_path / "checked in" / "here")
    assert not (tmp_path / "asked").exists()
    written = [*entries(tmp_path / "checked in" / "here")]
    assert len(written) == 2 and written == sorted(written) and dict(written).items() <= kept.items()


def test_answers_of_a_gpu_are_not_kept(monkeypatch):
    monkeypatch.setattr(golden.mx, "default_device", lambda: mx.Device(mx.gpu))
    store = golden._golden.__wrapped__(None)
    assert (store._entries, store._write) == ({}, None)


def test_kept_answers_are_mlx_lms_and_never_of_the_native_kernels(tmp_path, monkeypatch):
    path, file = make_model("llama", tmp_path / "model"), tmp_path / "kept"
    jobs = [{"model": str(path), "prompt": [5, 6, 7], "tokens": 12, "tie": 0.0}]
    wanted = stock_greedy(load_model(path)[0], [[5, 6, 7]], 12)
    assert Golden([file], file).answers("code", jobs, greedy_here) == wanted
    assert Golden([file], file).answers("code", jobs, Asked()) == wanted

    def matmul(*_: Any) -> None: ...

    matmul.__wrapped__ = mx.matmul
    monkeypatch.setattr(mx, "matmul", matmul)
    with pytest.raises(RuntimeError, match="native kernels compute in this process"):
        greedy_here(jobs)
