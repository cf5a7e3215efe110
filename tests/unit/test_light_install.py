"""phalanx without its engine, as `pip install phalanx` gives it: what works there, and what the other commands say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx import __version__
from phalanx.cli.engine_extra import ENGINE
from phalanx.cli.main import COMMANDS
from phalanx.errors import ExitCode

ROOT = Path(__file__).parents[2]
MISSING = sorted({*ENGINE, "transformers", "phalanx_cpu"})
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({MISSING})); "
"""Python code after which these modules cannot be imported."""
COMPUTING = {"generate", "rank", "serve", "selftest"}
"""Commands that need the engine, at once or for what they start here."""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *arguments], capture_output=True, text=True, check=False
    )


def test_every_command_that_computes_nothing_is_imported_without_the_engine() -> None:
    names = sorted(set(COMMANDS) - COMPUTING)
    assert {"gateway", "up", "doctor", "chat", "launch"} <= set(names)
    done = python(
        "import importlib; [importlib.import_module(name) for name in sys.argv[1:]]; "
        "import phalanx.bench.load_generator",
        *(f"phalanx.cli.{name}" for name in names),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    ["serve demo", "generate demo --prompt hi", "rank --config x", "pull smollm2", "demo", "chat", "selftest"],
)
def test_a_command_that_computes_says_once_what_to_install(command: str) -> None:
    """Those that start other processes, too: each of these would say it."""
    done = python("from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))", *command.split())
    assert (done.returncode, done.stdout) == (ExitCode.CONFIG, "")
    first, remedy = done.stderr.splitlines()
    assert first.startswith("error: This command needs phalanx's engine, and this installation has no ")
    assert "phalanx[cpu,mpi]" in remedy and "phalanx[engine]" in remedy


def test_a_plan_without_the_engine_is_made_by_hosts() -> None:
    done = python("from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))", "plan", "demo")
    assert (done.returncode, done.stdout) == (ExitCode.CONFIG, "")
    first, remedy = done.stderr.splitlines()
    assert first.startswith("error: This machine cannot say how fast it is: this installation of phalanx has no ")
    assert "Name hosts that have the engine" in remedy
    code = "from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    asked = python(code, "plan", "demo", "--hosts", "no-such-host.invalid", "--memory-only")
    assert "no-such-host.invalid" in asked.stderr and "no mlx" not in asked.stderr


def test_without_a_command_it_names_what_works_here() -> None:
    done = python(
        "import importlib.util as util; find = util.find_spec;"
        "util.find_spec = lambda name, package=None: None if name == 'mlx' else find(name, package);"
        "from phalanx.cli.main import main; sys.exit(main([]))"
    )
    assert done.returncode == 0, done.stderr
    assert "phalanx gateway --worker-urls" in done.stdout and f"=={__version__}'" in done.stdout
    assert "phalanx serve" not in done.stdout and "phalanx chat" not in done.stdout


def test_a_module_that_is_missing_for_another_reason_is_no_matter_of_the_engine() -> None:
    done = python(
        "sys.modules['typer'] = None; from phalanx.cli.main import main; main(sys.argv[1:])", "gateway", "--help"
    )
    assert done.returncode == 1 and "needs phalanx's engine" not in done.stderr


def test_what_counts_as_the_engine_is_what_the_extra_brings() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["engine"]
    brought = {line.partition(";")[0].partition("=")[0].partition(">")[0].replace("-", "_") for line in extra}
    assert brought - {"transformers"} == ENGINE


def test_a_hosts_commands_need_what_the_seed_of_an_installation_has() -> None:
    """phalanx with msgspec and psutil, on a host that has nothing yet."""
    code = """
import importlib.abc

class Lacks(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in {"phalanx", "msgspec", "psutil", *sys.stdlib_module_names}:
            raise ImportError(f"the seed has no {name}")

sys.meta_path.insert(0, Lacks())
import phalanx.cluster.host_verbs
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
