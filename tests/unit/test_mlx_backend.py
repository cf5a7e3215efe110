"""`tools/mlx_backend.sh`: which MLX a machine gets, on machines made of stand-ins for `uname` and `nvidia-smi`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/mlx_backend.sh"


def asked(folder: Path, system: str, gpu: str | None, *arguments: str, backend: str = "") -> tuple[int, str, str]:
    """Exit status and output on a machine; `gpu` is what nvidia-smi prints, None without it."""
    tools = {"uname": f"echo {system}", "head": 'exec /usr/bin/head "$@"', "tr": 'exec /usr/bin/tr "$@"'}
    if gpu is not None:
        tools["nvidia-smi"] = f"printf '{gpu}'" if gpu else "exit 9"
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    variables = {"PATH": str(folder), "BACKEND": backend}
    done = subprocess.run(["/bin/sh", SCRIPT, *arguments], env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("system", "gpu", "backend"),
    [
        ("Darwin", None, "metal"),
        ("Linux", None, "cpu"),
        ("Linux", "580.65.06, 9.0\n580.65.06, 9.0\n", "cuda13"),
        ("Linux", "590.1, 12.0\n", "cuda13"),
        ("Linux", "579.99, 8.9\n", "cuda12"),
        ("Linux", "550.54.14, 7.5\n", "cuda12"),
    ],
)
def test_the_machine_decides(tmp_path: Path, system: str, gpu: str | None, backend: str) -> None:
    assert asked(tmp_path, system, gpu) == (0, backend, "")


@pytest.mark.parametrize(
    ("gpu", "why"),
    [("535.1, 9.0\n", "too old"), ("580.1, 6.1\n", "too old"), ("", "shows no GPU"), ("No devices\n", "shows no GPU")],
)
def test_a_gpu_that_mlx_cannot_use_is_named(tmp_path: Path, gpu: str, why: str) -> None:
    code, said, problem = asked(tmp_path, "Linux", gpu)
    assert (code, said) == (0, "cpu") and why in problem


def test_a_backend_can_be_chosen_and_has_its_locks(tmp_path: Path) -> None:
    assert asked(tmp_path, "Linux", "580.1, 9.0\n", backend="cuda12")[1] == "cuda12"
    locks = asked(tmp_path, "Linux", None, "locks", backend="cuda13")[1].split()
    assert locks == ["requirements.lock", "requirements-cuda13.lock"]
    assert asked(tmp_path, "Darwin", None, "locks")[1].split() == ["requirements.lock"]
    code, said, problem = asked(tmp_path, "Linux", None, backend="gpu")
    assert code == 2 and said == "" and "BACKEND=gpu is not one of" in problem
