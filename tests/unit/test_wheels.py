"""What is built for release: `make wheels` and the workflow run the same commands, for the same Pythons."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import phalanx
from tools import wheels

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()
JOBS: dict[str, dict[str, Any]] = yaml.safe_load(WORKFLOW)["jobs"]
TAGS = [pattern.removesuffix("-*") for pattern in wheels.settings()["build"]]
MINORS = [tag.replace("cp3", "3.") for tag in TAGS]


def ran(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def matrix(job: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = JOBS[job]["strategy"]["matrix"]
    return found


def test_the_workflow_builds_for_the_pythons_of_make_wheels_and_tries_each() -> None:
    assert matrix("phalanx-cpu") == {"tag": TAGS} and matrix("try") == {"python": MINORS}
    build = next(step for step in JOBS["phalanx-cpu"]["steps"] if "cibuildwheel --" in step.get("run", ""))
    assert build["env"] == {"CIBW_BUILD": "${{ matrix.tag }}-*"}  # the rest is in native/pyproject.toml
    assert build["run"] == "python -m cibuildwheel --output-dir dist native"
    assert JOBS["publish"]["needs"] == "try" and JOBS["try"]["needs"] == ["phalanx", "phalanx-cpu"]


def test_the_workflow_builds_phalanx_as_make_wheels_does() -> None:
    commands = [command.format(project=".", directory="dist") for command in wheels.PURE]
    assert ran("phalanx") == [command.replace("./", "") for command in commands]


def test_both_put_the_key_of_the_sources_into_the_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "SKBUILD_WHEEL_BUILD_TAG=$(NATIVE_KEY) $(PYTHON) tools/wheels.py" in makefile
    assert "native-key:\n\t@echo $(NATIVE_KEY)\n" in makefile
    assert 'echo "SKBUILD_WHEEL_BUILD_TAG=$(make -s native-key)" >> "$GITHUB_ENV"' in ran("phalanx-cpu")
    assert wheels.settings()["environment-pass"] == ["SKBUILD_WHEEL_BUILD_TAG"]


def test_the_workflow_tries_its_own_wheel_and_ends_where_the_demo_fails() -> None:
    install, demo = ran("try")
    assert install.endswith('"phalanx[cpu,mpi] @ file://$(echo $PWD/dist/phalanx-[0-9]*.whl)"')
    assert demo.startswith("set -o pipefail; phalanx demo 2>&1 | tee demo.log; ")  # the shell is `bash -e`


def test_the_workflow_attests_its_wheels_and_knows_no_secret() -> None:
    assert "secrets" not in WORKFLOW
    uses = [step.get("uses", "").partition("@")[0] for step in JOBS["publish"]["steps"]]
    assert uses[:2] == ["actions/download-artifact", "actions/attest-build-provenance"]
    assert JOBS["publish"]["permissions"].keys() == {"attestations", "contents", "id-token"}
    assert yaml.safe_load(WORKFLOW)["permissions"] == {"contents": "read"}


def test_the_commands_for_a_kernel_wheel() -> None:
    *before, build, repair = wheels.steps(wheels.settings(), Path("/built"), Path("/dist"))
    assert all("--require-hashes --only-binary :all:" in command for command in before)
    assert build.startswith("python -m pip wheel --no-build-isolation --no-deps -C")
    assert "KERN_EVERY_ISA=ON" in build and build.endswith(f"-w /built {ROOT}/native")
    assert repair.startswith("auditwheel repair --plat manylinux_2_35_x86_64 --only-plat --exclude libmlx.so")
    assert repair.endswith("-w /dist /built/*.whl")


def test_a_python_that_no_wheel_is_for_is_an_error(tmp_path: Path) -> None:
    assert wheels.interpreters([f"cp3{sys.version_info[1]}"], [sys.executable]) == {
        f"cp3{sys.version_info[1]}": sys.executable
    }
    with pytest.raises(SystemExit, match="/none is not a Python that wheels are for: cp398"):
        wheels.interpreters(["cp398"], [str(tmp_path / "none")])
    assert wheels.interpreters(["cp398"], []) == {}


def test_the_last_line_names_the_pythons_without_a_wheel_of_the_kernels() -> None:
    line = wheels.left_out(TAGS, {"cp311": "python3.11", "cp313": "/opt/python"}, has_kernels=True)
    assert "no wheel of phalanx-cpu for Python 3.12, 3.14, where" in line and "\n" not in line
    assert wheels.left_out(TAGS, TAGS, has_kernels=True) == ""
    assert "for Linux x86-64 only" in wheels.left_out(TAGS, TAGS, has_kernels=False)


def test_a_python_that_makes_no_environment_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o700)
    with pytest.raises(SystemExit, match=r"error: .*/python makes no environment. .* python3-venv"):
        wheels.build([], str(python), tmp_path / "environment")


def test_the_extra_asks_for_kernels_where_there_are_wheels() -> None:
    """pip would end on a platform without one, instead of leaving the kernels out."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (kernels,) = [one for one in map(Requirement, extras["cpu"]) if one.name == "phalanx-cpu"]
    places = {
        (system, machine, python)
        for system in ("linux", "darwin")
        for machine in ("x86_64", "aarch64", "arm64")
        for python in ("3.10", *MINORS, "3.15")
        if kernels.marker is not None
        and kernels.marker.evaluate({"sys_platform": system, "platform_machine": machine, "python_version": python})
    }
    assert {place for place in places if place[2] != "3.10"} == {("linux", "x86_64", minor) for minor in MINORS}


def test_the_versions_agree() -> None:
    native = tomllib.loads((ROOT / "native/pyproject.toml").read_text())
    mlx = re.search(r'MLX_VERSION = "(.*)"', (ROOT / "native/phalanx_cpu/__init__.py").read_text())
    assert mlx and native["project"]["dependencies"] == [f"mlx[cpu]=={mlx[1]}"]
    assert f"mlx=={mlx[1]} " in (ROOT / "requirements-cpu.lock").read_text()
    assert f"'mlx[cpu]=={mlx[1]}'" in (ROOT / "docs/install.md").read_text()
    cpu = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cpu"]
    assert any(one.startswith(f"phalanx-cpu=={native['project']['version']};") for one in cpu)
    assert native["project"]["version"] == phalanx.__version__
    assert set(re.findall(r"phalanx\[\w+,mpi\]==([\d.]+)'", (ROOT / "docs/install.md").read_text())) == {
        phalanx.__version__
    }
    releases = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0] == phalanx.__version__
