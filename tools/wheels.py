"""Builds the wheels of this project: phalanx, and on Linux x86-64 phalanx-cpu for each Python at hand.

    python tools/wheels.py DIRECTORY [PYTHON ...]

The commands for phalanx-cpu are those of `[tool.cibuildwheel]` in native/pyproject.toml, which the release workflow
runs in a container. Here they run on this machine, in an environment for each Python under build/wheels/. Needs an
interpreter with pip, a C++ compiler and a package index.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PURE = (
    "python -m pip install --require-hashes --only-binary :all: -r {project}/requirements-build.lock",
    "python -m pip wheel --no-deps --no-build-isolation -w {directory} {project}",
)
"""The commands that bring the wheel of phalanx."""
BESIDE = (*sorted(ROOT.glob("requirements*.lock")), ROOT / "tools/mlx_backend.sh")
"""What `phalanx install` looks for beside the wheels."""
HAS_KERNELS = (sys.platform, platform.machine()) == ("linux", "x86_64")
TAG = "import sys; print('cp%d%d' % sys.version_info[:2] if sys.implementation.name == 'cpython' else '')"


def settings() -> dict[str, Any]:
    """The settings of cibuildwheel for Linux."""
    table: dict[str, Any] = tomllib.loads((ROOT / "native/pyproject.toml").read_text())["tool"]["cibuildwheel"]
    return {**table, **table["linux"]}


def tag_of(python: str) -> str:
    """The tag of an interpreter, as `cp311`; "" if it is missing or is not CPython."""
    try:
        return subprocess.run([python, "-c", TAG], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def interpreters(tags: Sequence[str], named: Sequence[str]) -> dict[str, str]:
    """Tag -> interpreter: those that are named, or else what PATH and pyenv have."""
    minors = [tag.removeprefix("cp3") for tag in tags]
    installed = [str(path) for minor in minors for path in Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
    found: dict[str, str] = {}
    for python in named or [sys.executable, *(f"python3.{minor}" for minor in minors), *sorted(installed)]:
        tag = tag_of(python)
        if tag in tags:
            found.setdefault(tag, python)
        elif named:
            raise SystemExit(f"error: {python} is not a Python that wheels are for: {', '.join(tags)}.")
    return found


def steps(table: Mapping[str, Any], wheels: Path, directory: Path) -> list[str]:
    """The shell commands that bring the wheel of phalanx-cpu for one Python, whose environment is first in PATH."""
    options = " ".join([*table["build-frontend"]["args"], *(f"-C{k}={v}" for k, v in table["config-settings"].items())])
    return [
        *(command.format(project=ROOT, package=ROOT / "native") for command in table["before-build"]),
        f"python -m pip wheel {options} -w {wheels} {ROOT / 'native'}",
        table["repair-wheel-command"].format(wheel=f"{wheels}/*.whl", dest_dir=directory),
    ]


def left_out(tags: Sequence[str], built: Collection[str], *, has_kernels: bool = HAS_KERNELS) -> str:
    """One line: which wheels of phalanx-cpu there are not, and how to have them; "" if there are all."""
    if not has_kernels:
        return "There is no wheel of phalanx-cpu: it has wheels for Linux x86-64 only."
    missing = [tag.replace("cp3", "3.") for tag in tags if tag not in built]
    if not missing:
        return ""
    return (
        f"There is no wheel of phalanx-cpu for Python {', '.join(missing)}, where pip refuses phalanx[cpu] without it "
        "(docs/install.md). PYTHONS names interpreters that neither PATH nor pyenv has."
    )


def build(commands: Sequence[str], python: str, environment: Path) -> None:
    """Run commands in a new environment of an interpreter; the first one that fails ends the program."""
    if subprocess.run([python, "-m", "venv", "--clear", environment], check=False).returncode:
        raise SystemExit(f"error: {python} makes no environment. On Debian and Ubuntu: apt install python3-venv")
    variables = {**os.environ, "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    for command in commands:
        print(f"+ {command}", flush=True)
        if code := subprocess.run(command, shell=True, env=variables, check=False).returncode:
            raise SystemExit(f"error: status {code} of: {command}")


def main(directory: Path, named: Sequence[str]) -> None:
    """Build all wheels into a directory, in place of those that it has."""
    table = settings()
    tags = [pattern.removesuffix("-*") for pattern in table["build"]]
    found = interpreters(tags, named)
    if not found:
        raise SystemExit(f"error: none of the Pythons that wheels are for is here: {', '.join(tags)}.")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack modules that are gone
    for old in directory.glob("phalanx*.whl"):
        old.unlink()
    pure = [command.format(project=ROOT, directory=directory) for command in PURE]
    build(pure, next(iter(found.values())), ROOT / "build/wheels/pure")
    for file in BESIDE:
        shutil.copy(file, directory)
    for tag, python in found.items() if HAS_KERNELS else ():
        environment = ROOT / "build/wheels" / tag
        build(steps(table, environment / "wheels", directory), python, environment)
    if missing := left_out(tags, found):
        print(missing)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("python", nargs="*")
    given = parser.parse_args()
    main(given.directory.resolve(), given.python)
