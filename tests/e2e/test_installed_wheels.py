"""phalanx from wheels, where there is Python and nothing else: no compiler, make, git, nor the tests' environment.

The kernels are those of `make wheels`, where it has run for the same sources; else they are built by its commands, but
for this processor only and without a new environment: what `make` has compiled is taken. For a second Python they are
not built, which takes minutes. All else comes from a folder of wheels in the versions of the locks, so that nothing is
downloaded while phalanx is installed, nor when it fetches the model that comes in a package.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.dockerfiles import last_stage, words_of
from support.web import web_server

from phalanx.catalog.packaged import PACKAGE
from phalanx.errors import ExitCode
from tools import wheels

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}"
OWN_TAG = f"cp3{sys.version_info[1]}"
BARE = """
for folder in /usr/sbin /usr/local /bin /sbin /usr/bin; do [ -L $folder ] || mount --bind "$PROGRAMS" $folder; done
exec "$@"
"""
"""Shell commands that leave a few programs of a machine; then a command runs."""
PROGRAMS = ("sh", "env", "mkdir", "chown", *([PYTHON.name] if PYTHON.parent == Path("/usr/bin") else []))

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not wheels.HAS_KERNELS, reason="kernels have wheels for Linux x86-64"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to hide the programs of this machine"),
]


def run(*command: str | Path, **more: str) -> str:
    """Output of a command with the tests' environment in PATH; the test fails with its errors."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(word) for word in command], env={**os.environ, "PATH": path, **more}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of phalanx."""
    source, built = (tmp_path_factory.mktemp(name) for name in ("source", "pure"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run("sh", "-c", wheels.PURE[1].format(directory=built, project=source))
    (wheel,) = built.iterdir()
    return wheel


@pytest.fixture(scope="module")
def house(pure: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all wheels that an install needs, ours among them, of uv and of the model that a package holds."""
    house, built = (tmp_path_factory.mktemp(name) for name in ("house", "built"))
    if made := made_before(OWN_TAG):
        shutil.copy(made[0], house)
    else:
        run("python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", built, ROOT / "native")
        repair = wheels.settings()["repair-wheel-command"]
        run("sh", "-c", repair.format(wheel=f"{built}/*.whl", dest_dir=house))
    fill(house, pure, PYTHON)
    return house


def made_before(tag: str) -> list[Path]:
    """The wheel of the present kernels that `make wheels` left for a Python."""
    key = run("make", "-s", "-C", ROOT, "native-key").strip()
    return sorted(ROOT.glob(f"dist/phalanx_cpu-*-{key}-{tag}-*.whl"))


def fill(house: Path, pure: Path, python: Path) -> None:
    """Add phalanx, and what it asks for on this Python, to the kernels in a folder."""
    shutil.copy(pure, house)
    pins = house / "pins.txt"
    locks = (ROOT / f"requirements{one}.lock" for one in ("", "-dev", "-cpu"))
    pins.write_text("\n".join(re.findall(r"^[a-z0-9-]+==[^\\]*", "".join(map(Path.read_text, locks)), re.MULTILINE)))
    command = [sys.executable, "-m", "pip", "--python", python, "download", "-q", "--only-binary", ":all:", "-d", house]
    command += ["--find-links", house, "-c", pins]
    for wanted in (["phalanx[cpu,mpi]", "uv"], ["--no-deps", PACKAGE]):
        done = subprocess.run([*map(str, command), *wanted], capture_output=True, text=True, check=False)
        if done.returncode and not os.environ.get("CI"):
            pytest.skip(f"what phalanx needs cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def other(pure: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Python of another version than that of the tests, and a folder of wheels for it."""
    tags = [pattern.removesuffix("-*") for pattern in wheels.settings()["build"]]
    for tag, named in wheels.interpreters(tags, []).items():
        made, python = made_before(tag), Path(shutil.which(named) or named)
        if made and tag != OWN_TAG and not python.is_relative_to("/usr"):  # which is hidden
            house = tmp_path_factory.mktemp("house_of_another_python")
            shutil.copy(made[0], house)
            fill(house, pure, python)
            return python, house
    pytest.skip("make wheels has not built these kernels for a second Python that is here")


class Bare:
    """A machine with Python, `sh` and `env`, and an empty home."""

    def __init__(self, folder: Path) -> None:
        self.home, programs = folder / "home", folder / "programs"
        self.home.mkdir()
        programs.mkdir()
        for name in PROGRAMS:
            shutil.copy(Path("/usr/bin", name).resolve(), programs / name)
        self.environment = {"HOME": str(self.home), "PATH": "/usr/bin", "PROGRAMS": str(programs)}

    def command(self, *words: str | Path) -> list[str]:
        return ["/usr/bin/unshare", "-m", "/bin/sh", "-ec", f"PATH=/usr/bin:/bin; {BARE}", "sh", *map(str, words)]

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.environment, cwd=self.home, capture_output=True, text=True, check=False
        )

    @contextmanager
    def serving(self, *words: str | Path) -> Iterator[tuple[str, Path]]:
        """A server or gateway: its URL, once it is ready, and its log."""
        log = self.home / f"{words[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(*words), env=self.environment, cwd=self.home, stdout=output, stderr=output
            )
        try:
            found: list[str] = []
            while not found and process.poll() is None:
                time.sleep(0.1)
                found = re.findall(r"^phalanx.* is ready: (\S+)", log.read_text(), re.MULTILINE)
            assert found, log.read_text()
            yield found[0], log
        finally:
            process.terminate()
            assert process.wait(120) == 0, log.read_text()


def answer(url: str, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 20}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    made = Bare(tmp_path)
    for program in ("cc", "c++", "gcc", "make", "git"):
        assert made.run("/usr/bin/env", program, "--version").returncode == 127
    return made


def pip(bare: Bare, house: Path, *what: str, python: Path = PYTHON) -> Path:
    """Install into a new environment; gives the folder of its programs."""
    programs = bare.home / f"venv{len(list(bare.home.iterdir()))}" / "bin"
    for words in (
        [python, "-m", "venv", programs.parent],
        [programs / "pip", "install", "--no-index", "--find-links", house, *what],
    ):
        done = bare.run(*words)
        assert done.returncode == 0, done.stderr
    return programs


def uv(bare: Bare, house: Path, what: str, *, python: Path = PYTHON) -> Path:
    words = ["tool", "install", "--no-index", "--find-links", house, "--python", python, what]
    done = bare.run(pip(bare, house, "uv") / "uv", *words)
    assert done.returncode == 0, done.stderr
    return bare.home / ".local/bin"


def three_ranks_answer(bare: Bare, house: Path, install: Callable[..., Path], python: Path) -> None:
    """A real model on three ranks: pip's own settings say where the package is that holds it."""
    began = time.monotonic()
    phalanx = install(bare, house, "phalanx[cpu,mpi]", python=python) / "phalanx"
    megabytes = sum(file.lstat().st_blocks for file in phalanx.parents[1].rglob("*")) >> 11
    print(f"{install.__name__}, {python}: {time.monotonic() - began:.0f} s, {megabytes} MB")
    bare.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(house)}
    with bare.serving(phalanx, "serve", "smollm2", "--tp", "3", "--port", "0", "--log-level", "debug") as (url, log):
        assert "Paris" in answer(url, "What is the capital of France?")
    said = log.read_text()
    assert "rank 0: kernels: native: " in said and "3 ranks over mpi: Open MPI is installed" in said


@pytest.mark.parametrize("install", [pip, uv])
def test_three_ranks_answer_with_native_kernels(bare: Bare, house: Path, install: Callable[..., Path]) -> None:
    three_ranks_answer(bare, house, install, PYTHON)


def test_on_another_python(bare: Bare, other: tuple[Path, Path]) -> None:
    python, house = other
    three_ranks_answer(bare, house, uv, python)


def test_without_the_wheel_of_the_kernels_a_line_says_what_is_lost(bare: Bare, house: Path) -> None:
    """The command is that of docs/install.md."""
    document = (ROOT / "docs/install.md").read_text()
    (command,) = re.findall(r"^pip install .*'phalanx\[engine,mpi\].*$", document, re.MULTILINE)
    wanted = [word for word in shlex.split(command, comments=True) if "==" in word]
    phalanx = pip(bare, house, *wanted) / "phalanx"
    with bare.serving(phalanx, "serve", "demo", "--tp", "2", "--port", "0") as (url, log):
        assert "phalanx" in answer(url, "What is phalanx?")
    (line,) = [line for line in log.read_text().splitlines() if "kernels: " in line]
    assert "phalanx-cpu is not installed, without which models run several times slower" in line


def test_the_light_install_has_no_mlx_and_its_commands_work(bare: Bare, house: Path) -> None:
    programs = pip(bare, house, "phalanx")
    assert bare.run(programs / "python", "-c", "import mlx").returncode != 0
    with (
        web_server(lambda path, body: (200, "{}")) as replica,
        bare.serving(programs / "phalanx", "gateway", "--worker-urls", replica.removesuffix("/v1"), "--port", "0"),
    ):
        pass
    for words, code, said in (
        (["doctor", "--hosts", "nobody@127.0.0.1:1"], 20, "nobody"),
        (["up", "--hosts", "nobody@127.0.0.1:1", "--skip-checks"], 1, "Install OpenSSH."),
        (["generate", "demo", "--prompt", "hi"], ExitCode.CONFIG, "phalanx[cpu,mpi]"),
        (["demo"], ExitCode.CONFIG, "phalanx[cpu,mpi]"),
    ):
        done = bare.run(programs / "phalanx", *words)
        assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    done = bare.run(programs / "python", "-c", "import phalanx.bench.load_generator")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "model"), [("server", ["demo"]), ("gateway", [])])
def test_the_steps_of_a_dockerfile_make_an_image_that_serves_and_is_healthy(
    bare: Bare, house: Path, name: str, model: list[str]
) -> None:
    """They run on the machine itself, with other folders in the places of the image's."""
    stage, programs = last_stage(name), bare.home / "python" / "bin"
    assert bare.run(PYTHON, "-m", "venv", programs.parent).returncode == 0
    bare.environment["PIP_NO_INDEX"] = "1"
    places = {"/wheels": str(house), "/models": f"{bare.home}/models", "python ": f"{programs}/python "}
    for step in stage["RUN"]:
        for old, new in places.items():
            step = step.replace(old, new)
        done = bare.run("/bin/sh", "-ec", step)
        assert done.returncode == 0, done.stderr
    for variable in stage.get("ENV", [""])[0].split():
        key, _, value = variable.partition("=")
        bare.environment[key] = value.replace("/models", places["/models"])
    command, *flags = words_of(stage["CMD"][0])
    flags = [word for word in flags if word != "smollm2"]
    if name == "gateway":
        flags += ["--worker-urls", "http://127.0.0.1:9"]
    with bare.serving(programs / "phalanx", command, *model, *flags, "--port", "0") as (url, log):
        check = words_of(stage["HEALTHCHECK"][0])[-1]
        port = re.search(r":(\d+)/v1", log.read_text())
        assert port is not None and url
        done = bare.run(programs / "python", "-c", re.sub(r"127.0.0.1:\d+", f"127.0.0.1:{port[1]}", check))
        assert done.returncode == 0, done.stderr
