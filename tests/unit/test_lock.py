"""The locks: all that `make` installs, exact and with hashes; and that any one install brings one MLX backend."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from phalanx.cluster.wheelhouse import ALSO

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NATIVE = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text())
EXTRAS = ("engine", "mpi", "dev")
"""What `make` installs besides the light install and MLX's backend."""
COMMON = ["requirements.lock", "requirements-build.lock", "requirements-dev.lock"]
LOCKS = {"metal": COMMON, **{one: [*COMMON, f"requirements-{one}.lock"] for one in ("cpu", "cuda12", "cuda13")}}
"""What MLX computes on -> the locks that `make` installs for it."""
UNUSED = {
    "transformers", "safetensors", "sentencepiece", "protobuf", "regex", "requests", "charset-normalizer", "urllib3"
}  # fmt: skip
"""What mlx-lm asks for and phalanx imports for few models only, and gguf's client of the hub, which phalanx never
imports: `make demo` leaves it out."""
BACKEND = {"metal": "mlx-metal", "cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13"}
"""The same -> the package with its libraries. All have files of the same names in one directory."""
SYSTEMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
PLATFORMS = [
    {
        "sys_platform": system,
        "platform_system": system.capitalize(),
        "platform_machine": machine,
        "python_version": minor,
        "python_full_version": f"{minor}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for system, machine in SYSTEMS
    for minor in ("3.11", "3.12", "3.13")
]
INSTALLS = [
    pytest.param(backend, each, id=f"{backend}-{each['platform_machine']}-{each['python_version']}")
    for each in PLATFORMS
    for backend in LOCKS
    if (backend == "metal") == (each["sys_platform"] == "darwin")
]


def entries(lock: str) -> list[str]:
    """The requirements of a lock, each with its hashes, as pip reads them."""
    lines = [line for line in (ROOT / lock).read_text().splitlines() if line and not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def locked(locks: Iterable[str], environment: dict[str, str]) -> dict[str, Version]:
    """Name -> version of what locks install on a platform."""
    found: dict[str, Version] = {}
    for entry in (entry for lock in locks for entry in entries(lock)):
        wanted = Requirement(entry.split(" --hash")[0].strip())
        if wanted.marker is None or wanted.marker.evaluate(environment):
            (specifier,) = wanted.specifier
            assert specifier.operator == "=="
            name, version = canonicalize_name(wanted.name), Version(specifier.version)
            assert found.setdefault(name, version) == version, f"{wanted.name} is there in two versions"
    return found


def applies(requirement: Requirement, environment: dict[str, str], extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**environment, "extra": extra})


def wanted(backend: str) -> list[Requirement]:
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    lines = [*project["dependencies"], *groups["build"], *PROJECT["build-system"]["requires"]]
    extras = (*EXTRAS, backend) if backend in project["optional-dependencies"] else EXTRAS
    lines += [line for extra in extras for line in project["optional-dependencies"][extra]]
    native = NATIVE["build-system"]["requires"] if backend == "cpu" else []
    found = [Requirement(line) for line in (*lines, *native)]
    return [one for one in found if not one.name.startswith("phalanx")]


@pytest.mark.parametrize(("backend", "environment"), INSTALLS)
def test_the_locks_have_all_that_is_asked_for(backend: str, environment: dict[str, str]) -> None:
    found = locked(LOCKS[backend], environment)
    for requirement in wanted(backend):
        if applies(requirement, environment):
            version = found.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement} is not locked"
            assert version in requirement.specifier, f"{requirement} is locked at {version}"
    assert set(BACKEND.values()) & set(found) == {BACKEND[backend]}


@cache
def asked_by(package: str) -> list[Requirement]:
    """What a package asks for: of this repository's, or of one that is installed here."""
    if package == "phalanx-cpu":
        return [Requirement(line) for line in NATIVE["project"]["dependencies"]]
    try:
        return [Requirement(line) for line in requires(package) or []]
    except PackageNotFoundError:  # no part of this environment, and no package that asks for MLX
        return []


def needs(requirement: Requirement, environment: dict[str, str]) -> Iterator[Requirement]:
    """What a package asks for on a platform, with the extras asked of it."""
    if requirement.name == "phalanx":
        optional = PROJECT["project"]["optional-dependencies"]
        lines = PROJECT["project"]["dependencies"] + [line for one in requirement.extras for line in optional[one]]
        found = [Requirement(line) for line in lines]
    else:
        found = asked_by(requirement.name)
    for one in found:
        if any(applies(one, environment, extra) for extra in ("", *requirement.extras)):
            yield one


def resolved(root: str, environment: dict[str, str]) -> set[str]:
    """The names of all packages that an install brings."""
    seen, left = set(), [Requirement(root)]
    while left:
        one = left.pop()
        if str(one) not in seen:
            seen.add(str(one))
            left += needs(one, environment)
    return {canonicalize_name(Requirement(one).name) for one in seen}


@pytest.mark.parametrize("environment", PLATFORMS, ids=lambda found: "-".join(list(found.values())[1:4]))
@pytest.mark.parametrize("extra", ["engine", "cpu", "cuda12", "cuda13"])
def test_an_extra_brings_one_backend(extra: str, environment: dict[str, str]) -> None:
    """Two would install their libraries over each other: which one MLX loads then depends on their order."""
    found = set(BACKEND.values()) & resolved(f"phalanx[{extra}]", environment)
    if environment["sys_platform"] == "darwin":
        assert found == {"mlx-metal"}
    else:
        assert found == ({BACKEND[extra]} if extra != "engine" else set())


def test_two_backends_at_once_are_a_conflict() -> None:
    assert PROJECT["tool"]["uv"]["conflicts"] == [[{"extra": "cpu"}, {"extra": "cuda12"}, {"extra": "cuda13"}]]


@pytest.mark.parametrize("lock", sorted({lock for locks in LOCKS.values() for lock in locks}))
def test_every_line_has_hashes_and_no_place_to_download_from(lock: str) -> None:
    entry = re.compile(r"[a-z0-9-]+==[\w.]+( ; [\w.'= !<>()]+?)?( +--hash=sha256:[0-9a-f]{64})+\s*")
    assert len(entries(lock)) > (50 if lock == "requirements.lock" else 1)
    for line in entries(lock):
        assert entry.fullmatch(line), line[:100]
    assert "://" not in (ROOT / lock).read_text()


def test_running_needs_no_more_than_its_lock() -> None:
    """`make demo` installs this lock without looking at dependencies."""
    (here,) = [one for one in PLATFORMS if one["python_version"] == "3.11" and one["platform_machine"] == "x86_64"]
    found = set(locked(["requirements.lock", "requirements-cpu.lock"], here))
    asked = {canonicalize_name(one.name) for name in found for one in needs(Requirement(name), here)}
    of_these = {"regex", "safetensors", "charset-normalizer", "urllib3"}  # transformers and requests ask for two each
    assert asked - found == UNUSED - of_these
    assert set(ALSO) == UNUSED, "pip on another host looks at dependencies"
    assert not found & UNUSED and set(locked(["requirements-dev.lock"], here)) >= UNUSED
    assert "pytest" not in found and "cmake" not in found


def recipe(target: str) -> str:
    """The lines of a rule of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    return re.findall(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[0]


def test_make_installs_from_the_locks_alone() -> None:
    """Every pip command of what `make venv` does has hashes, or takes nothing but this repository."""
    makefile = (ROOT / "Makefile").read_text()
    assert "LOCKED := --require-hashes --only-binary :all:\nOWN := --no-deps --no-build-isolation\n" in makefile
    commands = re.findall(r"\$\(INSTALL\) (.*)", makefile.partition("demo:\n")[0])
    assert len(commands) == 6
    for command in commands:
        local = command.startswith(("$(OWN) -e .", "$(OWN) ./native", "--no-deps --no-index --force-reinstall $$wheel"))
        assert local or (command.startswith("$(LOCKED)") and "requirements" in command)


def test_make_demo_installs_what_running_imports() -> None:
    assert "$(MAKE) --no-print-directory -j2 $(RUN) $(NATIVE)" in recipe("demo")
    assert "-r requirements.lock" in recipe("$(RUN)") and "requirements-dev.lock" not in recipe("$(RUN)")
    assert "-r requirements-build.lock" in recipe("$(BUILD)") and "requirements-dev.lock" not in recipe("$(BUILD)")


def test_the_light_install_has_upper_bounds() -> None:
    for line in PROJECT["project"]["dependencies"]:
        assert any(specifier.operator == "<" for specifier in Requirement(line).specifier), line
