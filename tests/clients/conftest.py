"""Clients as people install them (`environments.py`) against `demo_server.py` and `scripted_server.py`.

`make clients` runs these.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.demo_server import demo_server
from clients.environments import INSTALL_S, PROGRAMS, CannotInstall, environment, variables
from clients.note_server import note_server
from clients.scripted_server import Scripted, scripted_server
from support.real_model import real_model
from support.serving import Running

CLIENT_S = 240.0  # for a benchmark or an evaluation on a busy machine
SETTINGS = {  # no client asks a hub or reads what the user configured
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "NO_PROXY": "127.0.0.1",
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session", autouse=True)
def _no_other_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers list the models on this disk beside their own: here there are none."""
    with pytest.MonkeyPatch.context() as patch:
        empty = tmp_path_factory.mktemp("disk")
        patch.delenv("HF_HUB_CACHE", raising=False)
        patch.setenv("HF_HOME", str(empty))
        patch.setattr("phalanx.catalog.local_models.packaged_directory", lambda: empty / "packaged")
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with demo_server() as running:
        yield running


@pytest.fixture
def note_reader(tmp_path: Path) -> Iterator[Running]:
    with note_server(tmp_path / "tokenizer") as running:
        yield running


@pytest.fixture(scope="session")
def trained_server() -> Iterator[Running]:
    with demo_server(real_model()) as running:
        yield running


@pytest.fixture(scope="session", name="scripted_server")
def serve_a_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted_server(tmp_path_factory.mktemp("scripted")) as running:
        yield running


@pytest.fixture(scope="session")
def client_folder() -> Callable[[str], Path]:
    """The environment of a client; the test fails where it cannot be installed."""

    def folder(name: str) -> Path:
        try:
            return environment(name)
        except CannotInstall as error:
            pytest.fail(str(error))

    return folder


@pytest.fixture(scope="session")
def run(client_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program of a client's environment in an empty directory: `run("llm", "llm", "models", SETTING="value")`."""

    def start(name: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        folder = client_folder(name)
        empty = tmp_path_factory.mktemp(name)
        return subprocess.run(
            [str(folder / "bin" / words[0]), *words[1:]],
            cwd=empty,
            env={**variables(folder), **SETTINGS, "HOME": str(empty), **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
        )

    return start


@pytest.fixture(scope="session")
def report_of(run: Run, client_folder: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    """Run a program of `programs/` and parse what it prints: `report_of("litellm", "litellm_client.py", ...)`."""

    def report(name: str, program: str, *arguments: str) -> dict[str, Any]:
        path, interpreter = PROGRAMS / program, "python"
        if path.suffix == ".mjs":
            interpreter = "node"
            path = shutil.copy(path, client_folder(name))  # node looks for packages beside the importing program
        ended = run(name, interpreter, str(path), *arguments)
        assert ended.returncode == 0, ended.stderr
        parsed: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return parsed

    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a client may have to install it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(INSTALL_S + CLIENT_S))
