"""phalanx from wheels, where there is Python and nothing else: no compiler, make, git, nor the tests' environment.

The wheels are built by the commands of `make wheels`, but for the kernels of this processor only, and without a new
environment: what `make` has compiled is taken. All else comes from a folder of wheels in the versions of the locks, so
that nothing is downloaded while phalanx is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.web import web_server

from phalanx.errors import ExitCode
from tools import wheels

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}"
BARE = """
for folder in /usr/sbin /usr/local /bin /sbin /usr/bin; do [ -L $folder ] || mount --bind "$PROGRAMS" $folder; done
exec "$@"
"""
"""Shell commands that leave a few programs of a machine; then a command runs."""
PROGRAMS = ("sh", "env", *([PYTHON.name] if PYTHON.parent == Path("/usr/bin") else []))

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
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all wheels that an install needs, ours among them, and of uv."""
    folder = tmp_path_factory.mktemp("wheels")
    house, source, built = (folder / name for name in ("house", "source", "built"))
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run("sh", "-c", wheels.PURE[1].format(directory=house, project=source))
    run("python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", built, ROOT / "native")
    repair = wheels.settings()["repair-wheel-command"]
    run("sh", "-c", repair.format(wheel=f"{built}/*.whl", dest_dir=house))
    pins = folder / "pins.txt"
    locks = (ROOT / f"requirements{one}.lock" for one in ("", "-dev", "-cpu"))
    pins.write_text("\n".join(re.findall(r"^[a-z0-9-]+==[^\\]*", "".join(map(Path.read_text, locks)), re.MULTILINE)))
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-c", pins, "-d", house]
    command += ["--find-links", house, "phalanx[cpu,mpi]", "uv"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"what phalanx needs cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return house


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


def answer(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "What is phalanx?"}], "temperature": 0, "max_tokens": 20}
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


def pip(bare: Bare, house: Path, what: str) -> Path:
    """Install into a new environment; gives the folder of its programs."""
    programs = bare.home / f"venv{len(list(bare.home.iterdir()))}" / "bin"
    for words in (
        [PYTHON, "-m", "venv", programs.parent],
        [programs / "pip", "install", "--no-index", "--find-links", house, what],
    ):
        done = bare.run(*words)
        assert done.returncode == 0, done.stderr
    return programs


def uv(bare: Bare, house: Path, what: str) -> Path:
    words = ["tool", "install", "--no-index", "--find-links", house, "--python", PYTHON, what]
    done = bare.run(pip(bare, house, "uv") / "uv", *words)
    assert done.returncode == 0, done.stderr
    return bare.home / ".local/bin"


@pytest.mark.parametrize("install", [pip, uv])
def test_two_ranks_answer_with_native_kernels(bare: Bare, house: Path, install: Callable[..., Path]) -> None:
    began = time.monotonic()
    phalanx = install(bare, house, "phalanx[cpu,mpi]") / "phalanx"
    print(f"{install.__name__}: {time.monotonic() - began:.0f} s")
    with bare.serving(phalanx, "serve", "demo", "--tp", "2", "--port", "0") as (url, log):
        assert "phalanx" in answer(url)
    assert "rank 0: kernels: native: " in log.read_text()


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
        (["generate", "demo", "--prompt", "hi"], ExitCode.CONFIG, "phalanx[cpu]"),
    ):
        done = bare.run(programs / "phalanx", *words)
        assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    done = bare.run(programs / "python", "-c", "import phalanx.bench.load")
    assert done.returncode == 0, done.stderr
